"""Gin files of Mesh T5 and Primer, and the configurations that they describe."""

import dataclasses
import pathlib

import pytest

from tasks.terminal.command_line import UserError
from tests.trainer.annexes.gin.test_recipe import try_arguments
from trainer.annexes.gin import recipe
from trainer.annexes.mesh_gin import includes, tables
from trainer.config import field_paths
from trainer.config.presets import model_preset

FOLDER = pathlib.Path(__file__).parent / "mesh"
FLAGS = (
    "MIXTURE_NAME = 'c4_v020_unsupervised'",
    "utils.run.train_steps = 1000",
    "utils.run.batch_size = ('tokens_per_batch', 65536)",
    "utils.run.model_dir = 'model'",
)
# As in Primer's README, but for the files.
LM = (
    "MIXTURE_NAME = 'c4_v220_autoregressive_language_modeling'", "utils.run.train_steps = 1000000",
    "utils.run.batch_size = ('tokens_per_batch', 65536)",
    "run.sequence_length = {'inputs': 1, 'targets': 512}", "run.model_type = 'lm'",
    "utils.run.save_checkpoints_steps = 2400",
    "utils.serialize_num_microbatches.tokens_per_microbatch_per_replica = 8192",
    "utils.tpu_mesh_shape.model_parallelism = 1", "utils.tpu_mesh_shape.tpu_topology = '2x2'",
    "utils.run.model_dir = 'model'",
)  # fmt: skip
LM_FILES = ("learning_rate_schedules/rsqrt_no_ramp_down.gin", "objectives/lm.gin")


def load(*files, flags=FLAGS, preset=None):
    return recipe.load(["dataset.gin", *files], [str(FOLDER)], list(flags), preset, [])


@pytest.mark.parametrize(
    ("file", "preset"),
    [
        *((f"t5.1.0.{size}", f"t5_1_0_{size.lower()}") for size in ("small", "base", "3B", "11B")),
        *((f"t5.1.1.{size}", f"t5_1_1_{size}") for size in ("small", "base", "large", "xxl")),
        ("bi_v1_large", "t5_1_0_large"),
    ],
)
def test_a_t5_model_is_its_preset(file, preset):
    config, origins, _ = load(f"models/{file}.gin", "objectives/span.gin")
    expected = dict(field_paths.leaves(model_preset(preset)))
    found = dict(field_paths.leaves(config.model))
    # The files say what families leave open, what activations are computed in, and T5's dropout.
    gated = preset.startswith("t5_1_1")
    expected |= {
        "dtype": "bfloat16",
        "dropout_rate": 0.0 if gated else 0.1,
        "tied_logits": not gated,
        "mlp_activations": ("gelu", "linear") if gated else ("relu",),
    }
    assert found == expected
    assert config.task == "c4_span_corruption"
    assert origins["model.emb_dim"] == f"models/{file}.gin (built in) via d_model"


def test_a_mesh_t5_run():
    config, origins, notes = load("models/t5.1.1.base.gin", "objectives/span_5_15_u_u.gin")
    assert (config.task, config.objective) == ("c4_span_5_15_u_u", ())
    # Source: T5's random_spans_helper: 512 of .15 and 5 take 581 tokens, 105 of them targets.
    assert (config.lengths.inputs, config.lengths.targets) == (512, 105)
    assert config.batch_size == 128
    assert config.loss.normalizer == "num_total_target_tokens"
    # Mesh's own schedule falls to 0 over the last tenth.
    assert config.optimizer.schedule == "constant * rsqrt_decay * linear_cooldown"
    assert (config.optimizer.cooldown_start, config.optimizer.cooldown_steps) == (900, 100)
    assert origins["task"].startswith("--gin.MIXTURE_NAME via MIXTURE_NAME")
    assert any("have no seed" in text for subject, text in notes if subject == "warning")


def test_other_files_of_mesh():
    files = ("models/t5.1.0.small.gin", "objectives/span.gin")
    config, _, _ = load(*files, "learning_rate_schedules/constant_0_001.gin")
    assert (config.optimizer.schedule, config.optimizer.learning_rate) == ("constant", 0.001)
    flag = "make_layer_stack.layer_stack_cls = @t5_models.PrePostNormLayerStack"
    config, _, _ = load("released.gin", *LM_FILES, flags=(*LM, flag))
    assert config.model == dataclasses.replace(model_preset("small_primer"), dtype="bfloat16")
    config, _, _ = load("models/lm_v1.gin", *LM_FILES, flags=LM)
    assert config.model.family == "lm"
    assert config.model.mlp_activations == ("relu",)
    assert (config.model.num_encoder_layers, config.model.num_decoder_layers) == (0, 12)
    config, _, _ = load("gelu.gin", *LM_FILES, flags=LM, preset="lm_small")
    assert config.model == dataclasses.replace(model_preset("lm_small"), dtype="bfloat16")


@pytest.mark.parametrize(
    ("file", "preset"),
    [
        ("ez", "small_primer_ez"), ("released", "small_primer_as_released"),
        ("gelu", "small_transformer_gelu"), ("switch", "switch_transformer"),
        ("evolved", "small_evolved_transformer"), ("synthesizer", "synthesizer"),
    ],
)  # fmt: skip
def test_a_primer_model_is_its_preset(file, preset):
    """Layers, norms and activations in the files determine the preset."""
    config, _, notes = load(f"{file}.gin", *LM_FILES, flags=LM)
    assert config.model == dataclasses.replace(model_preset(preset), dtype="bfloat16")
    assert config.task == "c4_autoregressive_lm"
    assert (config.batch_size, config.checkpoint.every_steps) == (128, 2400)
    assert (config.lengths.inputs, config.lengths.targets) == (None, 512)
    assert config.optimizer.schedule == "constant * rsqrt_decay"
    assert config.train_steps == 1_000_000
    assert ("has no effect in Mesh" in str(notes)) == (file == "released")


WRONG = {
    "another mode": (
        ("utils.run.mode = 'perplexity_eval'",),
        ["utils.run.mode", "trainer.evaluate"],
    ),
    "rows by the replica": (
        ("utils.run.batch_size = ('tokens_per_replica', 2048)",),
        ["utils.run.batch_size", "tokens_per_batch"],
    ),
    "tokens that do not divide": (
        ("utils.run.batch_size = ('tokens_per_batch', 65535)",),
        ["utils.run.batch_size", "a multiple"],
    ),
    "another objective": (
        ("preprocessors.unsupervised.preprocessors = [@preprocessors.select_random_chunk]",),
        ["preprocessors.unsupervised.preprocessors", "--task"],
    ),
    "an unknown argument": (("utils.run.train_step = 5",), ["train_step", "train_steps?"]),
    "an unknown configurable": (("Unitransfomer.d_model = 5",), ["Unitransformer?"]),
    "positions of its own": (
        ("Unitransformer.positional_embedding = True",),
        ["Unitransformer.positional_embedding", "only False"],
    ),
    "another schedule": (
        ("run.learning_rate_schedule = @optimize.AdafactorOptimizer",),
        ["learning_rate_schedule", "@constant_learning_rate"],
    ),
    "no optimizer": (("run.optimizer = 'sgd'",), ["run.optimizer", "@AdafactorOptimizer"]),
    "other targets": (
        ("preprocessors.denoise.targets_fn = @preprocessors.drop_noise_tokens",),
        ["denoise.targets_fn", "targets drop_noise_tokens of RandomSpans"],
    ),
    "two norms": (
        ("LayerStack.sublayers_final = [@transformer.sublayer_true_layer_norm]",),
        ["LayerStack.sublayers_final", "one norm"],
    ),
    "another kind of run": (("run.model_type = 'delimited_lm'",), ["run.model_type", "'lm'"]),
    "a program": (("utils.run.vocabulary = @os.system()",), ["@os.system()", "nothing"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_binding_is_a_one_line_error(case):
    flags, says = WRONG[case]
    with pytest.raises(UserError) as error:
        load("models/t5.1.1.base.gin", "objectives/span.gin", flags=(*FLAGS, *flags))
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith("--gin.")
    for part in says:
        assert part in message


def test_objectives_map_to_our_tasks():
    tasks = {
        name: load("models/t5.1.1.base.gin", f"objectives/{name}.gin").config.task
        for name in ("span", "span_3_15_u_u", "prefix_lm")
    }
    assert tasks == {
        "span": "c4_span_corruption",
        "span_3_15_u_u": "c4_span_corruption",
        "prefix_lm": "c4_prefix_lm",
    }
    assert set(includes.DESCRIPTIONS) >= {"dataset.gin", "objectives/denoise.gin"}
    masked = load("models/t5.1.1.base.gin", "objectives/denoise.gin").config
    assert masked.task == "c4_iid_15_m_f"


ANY = (
    ["dataset.gin", "models/t5.1.1.base.gin", "objectives/span.gin"],
    ["MIXTURE_NAME='c4_x'", "run.train_steps=9", "run.batch_size=('sequences_per_batch', 8)"],
)


@pytest.mark.processes
def test_any_value_of_any_argument():
    try_arguments(*ANY, tables.KNOWN)
