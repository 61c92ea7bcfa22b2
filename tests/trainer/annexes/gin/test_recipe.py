"""Gin files of T5X, and the configurations that they describe; any literal is read or refused."""

import dataclasses
import importlib.util
import math
import pathlib

import pytest

from tasks.terminal.command_line import UserError
from trainer.annexes.gin import includes, recipe, t5x_run_table
from trainer.annexes.gin.flags import build
from trainer.config import Config, field_paths
from trainer.config.presets import model_preset

RECIPES = pathlib.Path(__file__).parent / "recipes"
MT5 = "gs://t5-data/pretrained_models/t5x/mt5_{}/checkpoint_1000000"
MT5_VOCABULARY = "gs://t5-data/vocabs/mc4.250000.100extra/sentencepiece.model"

# Source: dumitrescustefan/t5x_models, its four recipes.
BASE = {"model.emb_dim": 768, "model.num_heads": 12, "model.mlp_dim": 2048}
BASE |= {"model.num_encoder_layers": 12, "model.num_decoder_layers": 12, "lengths.targets": 256}
LARGE = {"model.emb_dim": 1024, "model.num_heads": 16, "model.mlp_dim": 2816}
LARGE |= {"model.num_encoder_layers": 24, "model.num_decoder_layers": 24, "lengths.targets": 512}
SCRATCH = {
    "model.vocab_size": 64_000, "vocabulary.model_file": "gs://bucket/ro.model", "init_from": None,
    "optimizer.learning_rate": 1.0, "checkpoint.every_steps": 10_000, "checkpoint.keep": 5,
    "train_steps": 2_000_000,
}  # fmt: skip
CONTINUED = {
    "model.vocab_size": 250_112,
    "vocabulary.model_file": MT5_VOCABULARY,
    "checkpoint.keep": 3,
    "mesh.tensor": 2,
}
COMMON = {
    **{"model.family": "t5_1_1", "model.head_dim": 64, "model.mlp_activations": ("gelu", "linear")},
    **{"model.tied_logits": False, "model.dtype": "bfloat16", "model.dropout_rate": 0.0},
    **{"task": "seqio:rlm_span_corruption_stream", "lengths.inputs": 512, "batch_size": 128},
    **{"microbatches": 1, "seed": 0, "model_dir": "gs://bucket/run", "data.shuffle": "global"},
    **{"data.use_cached": True, "data.pack": True, "vocabulary.extra_ids": None},
    **{"optimizer.name": "adafactor", "optimizer.schedule": "constant * rsqrt_decay"},
    **{"optimizer.warmup_steps": 10_000, "optimizer.decay_rate": 0.8, "optimizer.step_offset": 0},
    **{"loss.z_loss": 1e-4, "loss.label_smoothing": 0.0, "loss.normalizer": "sum"},
    **{"loss.normalizing_constant": None, "evaluation.every_steps": 1000},
    **{"evaluation.batches": 20, "evaluation.batch_size": 128, "mesh.data": -1, "mesh.fsdp": 1},
    "mesh.rules": "standard",
}
EXPECTED = {
    "ro_t5x_base": {**BASE, **SCRATCH, "mesh.tensor": 2},
    "ro_t5x_large": {**LARGE, **SCRATCH, "mesh.tensor": 4},
    "ro_mt5x_base": {
        **(BASE | CONTINUED | {"init_from": MT5.format("base"), "optimizer.learning_rate": 0.4}),
        **{"checkpoint.every_steps": 25_000, "train_steps": 2_000_000},
    },
    "ro_mt5x_large": {
        **(LARGE | CONTINUED | {"init_from": MT5.format("large"), "optimizer.learning_rate": 0.5}),
        **{"checkpoint.every_steps": 10_000, "train_steps": 1_500_000},
    },
}


REQUIRED = (
    *("MODEL_DIR='x'", "MIXTURE_OR_TASK_NAME='a'", "TRAIN_STEPS=5"),
    "TASK_FEATURE_LENGTHS={'inputs': 8, 'targets': 8}",
)


def load(files, *flags, preset=None, overrides=(), paths=(RECIPES,)):
    files = [files] if isinstance(files, str) else files
    return recipe.load(files, [str(path) for path in paths], list(flags), preset, list(overrides))


def recipe_of(name, *flags, **kwargs):
    return load(f"{name}.gin", "MODEL_DIR = 'gs://bucket/run'", *flags, **kwargs)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_recipe_sets_the_fields_of_the_table(name):
    read = recipe_of(name)
    values = dict(field_paths.leaves(read.config))
    expected = {**COMMON, **EXPECTED[name]}
    found = {path: values[path] for path in expected}
    assert found == expected
    assert [*map(type, found.values())] == [*map(type, expected.values())]
    # Whatever is not in the table has the default.
    plain = dataclasses.replace(Config("", read.config.model), preset=f"{name}.gin")
    defaults = dict(field_paths.leaves(plain))
    assert {path for path, value in values.items() if value != defaults[path]} <= set(expected)


def test_every_value_has_the_file_and_line_that_set_it():
    bindings = ["MODEL_DIR='x'", "train.eval_period = 500"]
    given = (["ro_t5x_base.gin"], [str(RECIPES)], bindings, None, ["--checkpoint.keep=7"])
    config, origins, _ = build(*given)
    lines = (RECIPES / "ro_t5x_base.gin").read_text().splitlines()
    run = (RECIPES / "ro_pretrain.gin").read_text().splitlines()

    def at(file, lines, text):
        return f"{file}:{next(n for n, line in enumerate(lines, 1) if line.strip() == text)}"

    expected = {
        "train_steps": at("ro_t5x_base.gin", lines, "TRAIN_STEPS = 2_000_000") + " via TRAIN_STEPS",
        "batch_size": at("ro_pretrain.gin", run, "BATCH_SIZE = 128") + " via BATCH_SIZE",
        "evaluation.batches": at("ro_pretrain.gin", run, "eval_steps = 20"),
        "model.vocab_size": at("ro_t5x_base.gin", lines, "network.T5Config.vocab_size = 64_000"),
        "model.emb_dim": "t5x/examples/t5/t5_1_1/base.gin (built in)",
        "loss.z_loss": "t5x/examples/t5/t5_1_1/base.gin (built in) via Z_LOSS",
        "model_dir": "--gin.MODEL_DIR via MODEL_DIR",
        "evaluation.every_steps": "--gin.train.eval_period",
        "checkpoint.keep": "command line",
    }
    assert {path: origins[path] for path in expected} == expected
    assert config.checkpoint.keep == 7
    assert config.evaluation.every_steps == 500
    shown = field_paths.describe(config, origins)
    assert f"# {expected['batch_size']}" in shown


def test_unbound_arguments_have_t5x_defaults():
    config, origins, _ = load(
        "ro_t5x_base.gin",
        "MODEL_DIR = 'x'",
        "Trainer.learning_rate_fn = @other/create_learning_rate_scheduler()",
        "other/create_learning_rate_scheduler.factors = 'constant'",
        "MODEL = @other/EncoderDecoderModel()",
    )
    # gin: what is bound without a scope holds in every scope.
    assert config.optimizer.schedule == "constant"
    assert config.optimizer.warmup_steps == 10_000
    assert config.loss.z_loss == 1e-4
    config, origins, _ = load(
        ["t5x/configs/runs/pretrain.gin", "model.gin"],
        *("MODEL_DIR='x'", "MIXTURE_OR_TASK_NAME='a'", "TRAIN_STEPS=1"),
        "TASK_FEATURE_LENGTHS={'targets': 8}",
        paths=[RECIPES],
    )
    assert config.loss.z_loss == 0.0
    assert origins["loss.z_loss"] == "T5X's default of EncoderDecoderModel.z_loss"
    assert config.model.emb_dim == 512
    assert config.model.dropout_rate == 0.1


def test_a_risky_recipe_loads_with_warnings():
    notes = recipe_of("ro_t5x_base").notes
    warnings = "\n".join(text for subject, text in notes if subject == "warning")
    for text in (
        "use_cached = True (ro_pretrain.gin:",
        "initial parameters and dropout have no seed (ro_pretrain.gin:",
        "the order of the data and its noise have no seed (ro_pretrain.gin:",
        "fills 114 positions, 44.5%; the rest is padding, which --lengths.targets=114 avoids",
        "extra_ids of gs://bucket/ro.model is 0 (ro_t5x_base.gin:",
    ):
        assert text in warnings
    assert (
        "not imported",
        "ro_t5x_base_tasks (ro_t5x_base.gin:5): --task_module=ro_t5x_base_tasks makes its tasks "
        "available",
    ) in notes
    # mT5's own vocabulary ends in sentinels, and says so in its name.
    mt5 = "\n".join(text for _, text in recipe_of("ro_mt5x_base").notes)
    assert "extra_ids" not in mt5
    # Mended, nothing is left to say.
    flags = ("RANDOM_SEED = 3", "train/utils.DatasetConfig.seed = 3", "USE_CACHED_TASKS = False")
    flags += ("TASK_FEATURE_LENGTHS = {'inputs': 512, 'targets': 114}",)
    flags += ("seqio.SentencePieceVocabulary.extra_ids = 100",)
    config, _, notes = recipe_of("ro_t5x_base", *flags)
    assert {subject for subject, _ in notes} == {"not imported"}
    assert config.seed == 3
    assert config.vocabulary.extra_ids == 100


def test_a_local_vocabulary_is_checked_for_sentinels(text_cache):
    model = next(text_cache.parents[1].glob("vocabulary/*.model"))
    flag = f"seqio.SentencePieceVocabulary.sentencepiece_model_file = '{model}'"
    assert "extra_ids" not in str(recipe_of("ro_t5x_base", flag).notes)


def test_a_task_of_ours_is_read_from_its_cache():
    flags = ("MIXTURE_OR_TASK_NAME = 'rlm_span_corruption'", "USE_CACHED_TASKS = False")
    config, origins, notes = recipe_of("ro_t5x_base", *flags)
    assert config.task == "rlm_span_corruption"
    assert origins["task"] == "--gin.MIXTURE_OR_TASK_NAME via MIXTURE_OR_TASK_NAME"
    assert config.data.use_cached is None
    assert any("use_cached = False" in text for subject, text in notes if subject != "warning")
    # The same task, named by a flag of ours.
    config, _, _ = recipe_of("ro_t5x_base", overrides=["--task=rlm_span_corruption"])
    assert config.data.use_cached is None


MEANINGS = {
    "an optimizer's arguments": (["Adafactor.beta1 = 0.9", "Adafactor.clipping_threshold = None",
        "Adafactor.weight_decay_rate = 1", "Adafactor.weight_decay_rate_lr_exponent = 2.0",
        "Adafactor.global_norm_clip_threshold = 1.0", "Adafactor.epsilon2 = 1e-2"],
        {"optimizer.beta1": 0.9, "optimizer.clipping_threshold": math.inf,
        "optimizer.weight_decay": 1.0, "optimizer.weight_decay_rate_exponent": 2.0,
        "optimizer.clip_norm": 1.0, "optimizer.minimum_parameter_scale": 0.01}),
    "adamw of optax with a rate of its own": (["OPTIMIZER = @optimizers.adamw()",
        "optimizers.adamw.learning_rate = 1e-3"],
        {"optimizer.name": "adamw", "optimizer.schedule": "constant",
        "optimizer.learning_rate": 1e-3, "optimizer.weight_decay": 1e-4,
        "optimizer.no_weight_decay": ()}),
    "lion with the run's schedule": (["OPTIMIZER = @optimizers.lion()",
        "optimizers.lion.learning_rate = @utils.create_learning_rate_scheduler()"],
        {"optimizer.name": "lion", "optimizer.learning_rate": 1.0, "optimizer.beta2": 0.99}),
    "a loss divided": (["LOSS_NORMALIZING_FACTOR = 233472", "LABEL_SMOOTHING = 0.1"],
        {"loss.normalizing_constant": 233472.0, "loss.label_smoothing": 0.1}),
    "a loss by its tokens": (["LOSS_NORMALIZING_FACTOR = 'NUM_REAL_TARGET_TOKENS'"],
        {"loss.normalizer": "num_real_target_tokens"}),
    "parameters divided twice": (["standard_logical_axis_rules.parameter_partitioning_dims = 2"],
        {"mesh.data": 1, "mesh.fsdp": -1, "mesh.tensor": 2}),
    "a submesh": (["PjitPartitioner.model_parallel_submesh = (2, 2, 1, 1)"], {"mesh.tensor": 4}),
    "microbatches": (["Trainer.num_microbatches = 4"], {"microbatches": 4}),
    "no checkpoint but the last": (["utils.CheckpointConfig.save = None",
        "utils.CheckpointConfig.restore = None"], {"checkpoint.every_steps": 0, "init_from": None}),
    "no evaluation": (["train.train_eval_dataset_cfg = None"], {"evaluation.every_steps": 0}),
    "statistics": (["train.stats_period = 50"], {"metrics.every_steps": 50}),
    "the order of the cache": (["SHUFFLE_TRAIN_EXAMPLES = False"], {"data.shuffle": "none"}),
    "unpacked rows": (["train/utils.DatasetConfig.pack = False"], {"data.pack": False}),
    "steps from the beginning": (["train.relative_steps = 9"], {"train_steps": 9}),
    "the newest of a folder": (["INITIAL_CHECKPOINT_PATH = 'gs://a/b'",
        "RestoreCheckpointConfig.mode = 'latest'"], {"init_from": "gs://a/b"}),
    "T5 1.0": (["network.T5Config.mlp_activations = ('relu',)",
        "network.T5Config.logits_via_embedding = True"],
        {"model.family": "t5_1_0", "model.mlp_activations": ("relu",), "model.tied_logits": True}),
    "layers scanned": (["T5Config.scan_layers = True", "T5Config.remat_policy = 'minimal'"],
        {"model.scan_layers": True, "model.remat": "dots"}),
}  # fmt: skip


@pytest.mark.parametrize("case", MEANINGS)
def test_a_binding_means(case):
    flags, expected = MEANINGS[case]
    config, origins, _ = recipe_of("ro_t5x_base", *flags)
    values = dict(field_paths.leaves(config))
    assert {path: values[path] for path in expected} == expected
    assert all(path in origins for path in expected if values[path] is not None)


def test_a_decoder_only_model():
    files = ["t5x/examples/decoder_only/models/large.gin", "t5x/configs/runs/pretrain.gin"]
    task = "MIXTURE_OR_TASK_NAME='c4_autoregressive_lm'"
    lengths = "TASK_FEATURE_LENGTHS={'targets': 512}"
    config, _, _ = load(files, *REQUIRED, task, lengths, "DROPOUT_RATE=0.0")
    assert config.model.family == "lm"
    assert (config.model.num_encoder_layers, config.model.num_decoder_layers) == (0, 24)
    assert config.task == "c4_autoregressive_lm"


def test_a_preset_is_the_model_if_files_name_none():
    config, origins, _ = load("t5x/configs/runs/pretrain.gin", *REQUIRED, preset="t5_1_1_mini")
    assert config.model.emb_dim == 128
    assert config.preset == "t5_1_1_mini"
    assert origins["model.emb_dim"] == "preset t5_1_1_mini"
    assert config.train_steps == 5


def test_finetuning_starts_from_a_checkpoint():
    files = ["t5x/examples/t5/t5_1_1/small.gin", "t5x/configs/runs/finetune.gin"]
    config, _, notes = load(files, *REQUIRED, "INITIAL_CHECKPOINT_PATH='gs://a/checkpoint_9'")
    assert config.init_from == "gs://a/checkpoint_9"
    assert (config.optimizer.schedule, config.optimizer.learning_rate) == ("constant", 1e-3)
    assert config.model.dropout_rate == 0.1
    assert not [text for subject, text in notes if subject == "read, no counterpart"]


def test_descriptions_hold_our_presets_and_t5x_settings():
    flags = (*REQUIRED, "DROPOUT_RATE=0.0")
    for name, preset in (
        ("t5_1_0/3B", "t5_1_0_3b"),
        ("t5_1_1/xl", "t5_1_1_xl"),
        ("mt5/small", "mt5_small"),
    ):
        files = [f"t5x/examples/t5/{name}.gin", "t5x/configs/runs/pretrain.gin"]
        config = load(files, *flags).config
        old = "1_0" in name
        parts = {"tied_logits": old, "mlp_activations": ("relu",) if old else ("gelu", "linear")}
        model = dataclasses.replace(model_preset(preset), dtype="bfloat16", **parts)
        assert config.model == model
    # Source: T5X's `configs/runs/pretrain.gin`.
    assert config.batch_size == config.evaluation.batch_size == 128
    assert (config.evaluation.every_steps, config.evaluation.batches) == (1000, 20)
    assert (config.checkpoint.every_steps, config.checkpoint.keep) == (1000, None)
    optimizer = config.optimizer
    assert optimizer.schedule == "constant * rsqrt_decay"
    assert (optimizer.learning_rate, optimizer.warmup_steps) == (1.0, 10_000)
    assert (optimizer.decay_rate, optimizer.step_offset) == (0.8, 0)
    assert (config.loss.z_loss, config.loss.label_smoothing) == (1e-4, 0.0)
    assert (config.mesh.tensor, config.microbatches, config.init_from) == (1, 1, None)


@pytest.mark.tensorflow
def test_descriptions_match_t5x_files():
    found = importlib.util.find_spec("t5x")
    if not found or not found.submodule_search_locations:
        pytest.skip("T5X is not on the path: its files are not compared with our descriptions")
    upstream = pathlib.Path(next(iter(found.submodule_search_locations))).parent
    flags = (*REQUIRED, "DROPOUT_RATE=0.0", "INITIAL_CHECKPOINT_PATH='x'")
    for path in includes.DESCRIPTIONS:
        files = ["t5x/examples/t5/t5_1_1/base.gin", path]
        if "configs" not in path:
            files = [path, "t5x/configs/runs/pretrain.gin"]
        ours, theirs = load(files, *flags), load(files, *flags, paths=[upstream])
        assert ours.config == theirs.config, path


def test_an_unreadable_flag_is_named():
    with pytest.raises(UserError, match=r"--gin\.TRAIN_STEPS: "):
        recipe_of("ro_t5x_base", "TRAIN_STEPS = 2 * 3")
    with pytest.raises(UserError, match=r"--gin\.TRAIN_STEPS needs a value"):
        recipe_of("ro_t5x_base", "TRAIN_STEPS")


TINY = "t5x/examples/t5/t5_1_1/tiny.gin"
T5X = ([TINY, "t5x/configs/runs/pretrain.gin"], [*REQUIRED, "DROPOUT_RATE=0.0"])
VALUES = (None, True, -1, 2.5, "word", [[1]], {"a": [1]})


def arguments(known):
    return sorted({(each.names[0], name) for each in known for name in each.arguments}, key=str)


def try_arguments(files, flags, known):
    """Binds any value to any argument: each is taken, or refused by its name."""
    refused = taken = 0
    for place, (configurable, argument) in enumerate(arguments(known)):
        # Two values each, other ones from argument to argument.
        for value in (VALUES * 2)[place % len(VALUES) :][:2]:
            binding = f"{configurable}.{argument}"
            try:
                recipe.load(files, [], [*flags, f"{binding} = {value!r}"], None, [])
                taken += 1
            except UserError as error:
                refused += 1
                message = str(error)
                assert "\n" not in message
                assert binding in message or "these files do not name a model" in message, message
    assert refused > 50
    assert taken > 50


@pytest.mark.processes
def test_any_value_of_any_argument():
    try_arguments(*T5X, t5x_run_table.KNOWN)
