"""Files of T5X users are read as T5X reads them, or refused in one line."""

import re

import jax
import numpy as np
import optax
import pytest

from tasks.terminal.command_line import UserError
from tests.support.runs import command, done, run
from trainer.annexes.gin import includes, recipe
from trainer.model.config import ModelConfig
from trainer.optim.optimizer import learning_rate_schedule, make_optimizer

RUN = """\
include 't5x/examples/{model}.gin'
include 't5x/configs/runs/pretrain.gin'
from t5x import optimizers
from t5x import trainer
import optax
MIXTURE_OR_TASK_NAME = 'rlm_span_corruption'
TASK_FEATURE_LENGTHS = {{'inputs': 64, 'targets': 18}}
TRAIN_STEPS = 5000
DROPOUT_RATE = 0.0
MODEL_DIR = 'model'
"""
CHAIN = """
OPTIMIZER = @optimizers.chain()
optimizers.chain.transformations = [@optax.{clip}(), @optax.{name}()]
optax.clip.max_delta = 0.5
optax.clip_by_global_norm.max_norm = 2.0
optax.{name}.learning_rate = @optax.warmup_cosine_decay_schedule()
optax.warmup_cosine_decay_schedule:
  init_value = 1e-5
  peak_value = 1e-3
  warmup_steps = 100
  decay_steps = %TRAIN_STEPS
  end_value = 2e-5
"""


def load(folder, text="", *flags, model="t5/t5_1_1/tiny"):
    path = folder / "run.gin"
    path.write_text(RUN.format(model=model) + text)
    return recipe.load([str(path)], [], list(flags), None, [])


def error_of(folder, text="", **kwargs):
    with pytest.raises(UserError) as error:
        load(folder, text, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("clip", ["clip", "clip_by_global_norm"])
@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_a_chain_of_optax_makes_its_updates(name, clip, tmp_path):
    config, _, _ = load(tmp_path, CHAIN.format(name=name, clip=clip))
    ours, schedule = make_optimizer(config.optimizer), learning_rate_schedule(config.optimizer)
    theirs = optax.warmup_cosine_decay_schedule(1e-5, 1e-3, 100, 5000, 2e-5)
    for step in (0, 1, 50, 99, 100, 101, 2500, 4999):
        np.testing.assert_allclose(schedule(step), theirs(step), rtol=2e-6, atol=1e-9)
    clipping = optax.clip(0.5) if clip == "clip" else optax.clip_by_global_norm(2.0)
    reference = optax.chain(clipping, getattr(optax, name)(theirs))
    params = {"kernel": jax.random.normal(jax.random.key(0), (6, 5))}
    states = [each.init(params) for each in (ours, reference)]
    for number in range(3):
        gradient = {"kernel": 3 * jax.random.normal(jax.random.key(number + 1), (6, 5))}
        (update, states[0]), (expected, states[1]) = (
            each.update(gradient, state, params)
            for each, state in zip((ours, reference), states, strict=True)
        )
        np.testing.assert_allclose(update["kernel"], expected["kernel"], rtol=1e-5, atol=1e-9)


def test_a_chain_that_is_not_supported_is_refused(tmp_path):
    chain, schedule = "optimizers.chain.transformations", "optax.warmup_cosine_decay_schedule"
    for binding, says in (
        (f"{chain} = [@optax.clip(), @optax.clip(), @optax.adamw()]", "must be an optimizer, or"),
        (f"{chain} = [@optax.adamw(), @optax.clip()]", "must be @clip or @clip_by_global_norm"),
        (f"{schedule}.decay_steps = 400", "decay_steps = 400 must be at least the run's 5000"),
        (f"{schedule}.warmup_steps = 6000", "more decay_steps than warmup_steps"),
    ):
        text = CHAIN.format(name="adamw", clip="clip") + binding + "\n"
        assert says in error_of(tmp_path, text)


def test_scalable_t5_has_a_table_of_positions_in_every_layer(tmp_path):
    config, origins, _ = load(tmp_path, model="scalable_t5/t5_1_1/small")
    assert (config.model.position, config.model.scan_layers) == ("relative_per_layer", True)
    assert "T5Config" in origins["model.position"]
    plain, _, _ = load(tmp_path, model="t5/t5_1_1/small")
    assert (plain.model.position, plain.model.scan_layers) == (None, False)


def test_a_file_of_sizes_sees_the_import_of_the_file_that_it_includes(tmp_path):
    base = (
        "from t5x.examples.scalable_t5 import network\ninclude 't5x/examples/scalable_t5/{}.gin'\n"
    )
    (tmp_path / "base.gin").write_text(base.format("t5_1_1/base"))
    sizes = "include 'base.gin'\nnetwork.T5Config:\n  emb_dim = 64\n  num_heads = 2\n"
    (tmp_path / "small.gin").write_text(sizes)
    config, origins, notes = load(tmp_path, "include 'small.gin'\nDROPOUT_RATE = 0.0\n")
    assert (config.model.emb_dim, config.model.num_heads) == (64, 2)
    assert config.model.position == "relative_per_layer"
    assert origins["model.emb_dim"] == "small.gin:3"
    assert not [text for subject, text in notes if "T5Config" in text]


@pytest.mark.parametrize("normalizer", ["'NUM_REAL_TARGET_TOKENS'", "'AVERAGE_PER_SEQUENCE'"])
def test_microbatches_with_a_normalizer_have_the_law_of_t5x(normalizer, tmp_path):
    both = f"LOSS_NORMALIZING_FACTOR = {normalizer}\ntrainer.Trainer.num_microbatches = 4\n"
    config, origins, notes = load(tmp_path, both)
    assert (config.microbatches, config.loss.normalize_over) == (4, "microbatch")
    assert "run.gin:12" in origins["loss.normalize_over"]
    assert "normalized separately, as in T5X; with --loss.normalize_over=batch" in str(notes)
    for other in (*both.splitlines(), both.replace(normalizer, "233.5")):
        assert load(tmp_path, other + "\n").config.loss.normalize_over == "batch"


def test_unread_macros_are_named_with_the_nearest(tmp_path):
    config, _, notes = load(tmp_path, "NUM_EMBEDDINGS = 32128\nTRAIN_STEP = 9\n")
    assert config.train_steps == 5000
    warnings = [text for subject, text in notes if subject == "warning"]
    assert [text for text in warnings if text.startswith("NUM_EMBEDDINGS (")]
    (misspelt,) = [text for text in warnings if text.startswith("TRAIN_STEP (")]
    assert misspelt.endswith("is read by none of these files (did you mean TRAIN_STEPS?)")


def test_a_mark_of_the_byte_order_is_no_text(tmp_path):
    (tmp_path / "other.gin").write_bytes(b"\xef\xbb\xbfTRAIN_STEPS = 7\n")
    assert load(tmp_path, "include 'other.gin'\n").config.train_steps == 7


def test_flags_of_ours_set_what_files_require(tmp_path):
    text = """include 't5x/examples/t5/t5_1_1/tiny.gin'
include 't5x/configs/runs/pretrain.gin'
TASK_FEATURE_LENGTHS = {'inputs': 64, 'targets': 18}
DROPOUT_RATE = 0.0
"""
    required = {"MIXTURE_OR_TASK_NAME": "task", "TRAIN_STEPS": "train_steps"}
    flags = ["--train-steps=7", "--task=c4_span_corruption", "--model_dir", "2024"]
    path = tmp_path / "own.gin"
    path.write_text(text)
    read = recipe.load([str(path)], [], [], None, flags).config
    assert (read.train_steps, read.task, read.model_dir) == (7, "c4_span_corruption", "2024")
    for name, flag in required.items():
        others = [each for each in flags if flag not in each.replace("-", "_")]
        with pytest.raises(UserError, match=f"{name} must be set: --{flag}=VALUE"):
            recipe.load([str(path)], [], [], None, others)
    with pytest.raises(UserError, match=re.escape("--gin.TRAIN_STEPS=\"'text'\"")):
        recipe.load([str(path)], [], ["TRAIN_STEPS=/a"], None, flags)


def test_the_built_in_files_need_no_clone(tmp_path):
    """A folder with a clone has them in t5x/t5x; those of other libraries are not taken so."""
    example = "include '{}t5x/examples/t5/t5_1_1/examples/{}_c4_pretrain.gin'\nMODEL_DIR = 'm'\n"
    read = {}
    for size, clone in (("base", ""), ("base", "t5x/"), ("small", "t5x/")):
        (tmp_path / "run.gin").write_text(example.format(clone, size))
        read[size, clone] = recipe.load([f"{tmp_path}/run.gin"], [], [], None, []).config
    base, small = read["base", "t5x/"], read["small", "t5x/"]
    assert base == read["base", ""]
    # Source: google-research/t5x, `examples/t5/t5_1_1/examples/{base,small}_c4_pretrain.gin`.
    for config, emb_dim, steps, period in ((base, 768, 100_000, 2000), (small, 512, 10_000, 1000)):
        assert config.model.emb_dim == emb_dim
        assert (config.train_steps, config.evaluation.every_steps) == (steps, period)
        assert (config.batch_size, config.task) == (256, "seqio:c4_v220_span_corruption")
        assert (config.lengths.inputs, config.lengths.targets) == (512, 114)
    assert "there is no t5x/dataset.gin" in error_of(tmp_path, "include 't5x/dataset.gin'\n")


def test_an_evaluation_on_another_split_is_a_warning(tmp_path):
    text = "train_eval/utils.DatasetConfig.split = 'train'\n"
    config, _, notes = load(tmp_path, "from t5x import utils\n" + text)
    assert config == load(tmp_path).config
    (said,) = [text for _, text in notes if "DatasetConfig.split = 'train'" in text]
    assert "run.gin:12): here, evaluation reads the validation split" in said
    assert "DatasetConfig.split" not in str(load(tmp_path, text.replace("train'", "validation'")))


EVALUATOR = """\
from t5x import utils
import seqio
{parent}
infer_eval/utils.DatasetConfig.split = 'test'
seqio.Evaluator.num_examples = 500
seqio.Evaluator.logger_cls = []
"""


def test_what_an_evaluator_reads_is_named(tmp_path):
    """Also if only a built-in file refers to it, and once if the reason is the same."""
    fine = RUN.format(model="t5/t5_1_1/tiny").replace("pretrain.gin", "finetune.gin")
    parents = (
        "train.inference_evaluator_cls = @seqio.Evaluator",
        "train.infer_eval_dataset_cfg = @infer_eval/utils.DatasetConfig()\n"
        "train.inference_evaluator_cls = @seqio.Evaluator",
    )
    told = []
    for parent in parents:
        (tmp_path / "run.gin").write_text(fine + EVALUATOR.format(parent=parent))
        flags = ["INITIAL_CHECKPOINT_PATH='a'"]
        notes = recipe.load([f"{tmp_path}/run.gin"], [], flags, None, []).notes
        idle = [text.partition(" (")[0] for subject, text in notes if subject.startswith("read")]
        told.append([text.partition(" = ")[0].rpartition(".t5x.")[2] for text in idle])
        assert "num_examples = 500" in str(notes)
        assert "set --evaluation.examples" in str(notes)
    first, second = told
    assert first == [
        *("infer_eval/t5x.utils.DatasetConfig.split", "train.inference_evaluator_cls"),
        "seqio.Evaluator.num_examples",
    ]
    assert second[0] == "train.infer_eval_dataset_cfg"
    assert second[1:] == first[1:]


def test_flags_of_other_trainers_are_ours_or_noted(tmp_path):
    (tmp_path / "run.gin").write_text(RUN.format(model="t5/t5_1_1/tiny"))
    theirs = ("--coordinator_address=a:1", "--process_count=2", "--process_index=1")
    others = ("--multiprocess_gpu", "--seqio_additional_cache_dirs=/a", "--project_dirs=/b")
    others += ("--alsologtostderr", "--t5_tfds_data_dir=gs://data", "--module_import=t5_imports")
    flags = (f"--gin_file={tmp_path}/run.gin", *theirs, *others, "--tpu", "name", "--train_steps=9")
    shown = done(command("trainer.pretrain", *flags, "--print_config")).stdout
    fields = {line.split()[0]: line.split()[2] for line in shown.splitlines() if " = " in line}
    found = [fields[f"processes.{name}"] for name in ("coordinator", "count", "index")]
    assert [*found, fields["train_steps"]] == ['"a:1"', "2", "1", "9"]
    for flag in (*others, "--tpu"):
        assert f"read, no counterpart: {flag.partition('=')[0]}: " in shown
    listed = run(command("trainer.pretrain", "--help")).stdout
    assert "--processes.coordinator" in listed
    assert "--coordinator_address" not in listed
    refused = run(command("trainer.pretrain", "--preset=t5_1_1_tiny", "--tpu=name"))
    assert refused.returncode == 2
    assert "--tpu" in refused.stderr


def test_a_run_that_restores_from_its_own_folder_resumes(tmp_path):
    path = "from t5x import utils\nutils.RestoreCheckpointConfig.path = "
    config, _, notes = load(tmp_path, path + "%MODEL_DIR\n")
    assert config.init_from is None
    assert "RestoreCheckpointConfig.path is the model_dir (" in str(notes)
    config, _, notes = load(tmp_path, path + "'other'\n")
    assert config.init_from == "other"
    assert "is the model_dir" not in str(notes)


def test_byt5_needs_no_copy_of_t5x(tmp_path):
    config, _, _ = load(tmp_path, model="t5/byt5/small")
    sizes = {"vocab_size": 384, "emb_dim": 1472, "num_heads": 6, "head_dim": 64, "mlp_dim": 3584}
    layers = {"num_encoder_layers": 12, "num_decoder_layers": 4, "dtype": "bfloat16"}
    parts = {"tied_logits": False, "mlp_activations": ("gelu", "linear")}
    assert config.model == ModelConfig(family="t5_1_1", **sizes, **layers, **parts)
    for size in ("base", "large", "xl", "xxl", "tiny"):
        assert f"t5x/examples/t5/byt5/{size}.gin" in includes.DESCRIPTIONS
