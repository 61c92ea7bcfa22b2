"""Errands of people who come from transformers, T5X and Primer, as commands alone."""

import pathlib
import shlex

import numpy as np
import pytest

from tests.support import t5x_files
from tests.support.parameters import slow_unless
from tests.support.runs import TASK, command, done, losses, run
from tests.trainer.conftest import assert_one_line

pytestmark = pytest.mark.processes

HERE = pathlib.Path(__file__).parent
QUIET = ["--metrics.every_steps=1", "--metrics.tensorboard=false", "--evaluation.every_steps=0"]


RECIPE = """
include 't5x/examples/{model}.gin'
include 't5x/configs/runs/finetune.gin'
from t5x import utils
from t5x import partitioning
import my_tasks
MIXTURE_OR_TASK_NAME = 'my_span_corruption'
TASK_FEATURE_LENGTHS = {{'inputs': 40, 'targets': 12}}
INITIAL_CHECKPOINT_PATH = '{checkpoint}'
TRAIN_STEPS = 13
DROPOUT_RATE = 0.0
BATCH_SIZE = 2
EVAL_PERIOD = 0
{network}.T5Config:
  vocab_size = 768
  emb_dim = 8
  num_heads = 4
  head_dim = 3
  mlp_dim = 16
  num_encoder_layers = 2
  num_decoder_layers = 2
utils.create_learning_rate_scheduler.base_learning_rate = 0.01
"""


@pytest.mark.parametrize(
    "model",
    slow_unless({"scalable_t5/t5_1_1/small"}, ["t5/t5_1_1/small", "scalable_t5/t5_1_1/small"]),
)
def test_a_recipe_of_t5x_goes_on_from_its_checkpoint(model, text_cache, tmp_path, monkeypatch):
    monkeypatch.setattr(t5x_files, "V", 768)
    arrays = t5x_files.parameters()
    moments = t5x_files.moments(arrays, 128)
    network = "t5x.examples.t5.network"
    if model.startswith("scalable"):
        network = "t5x.examples.scalable_t5.network"
        arrays = t5x_files.scanned(arrays)
        for name in arrays:
            if "relpos_bias" in name:
                arrays[name] = np.random.default_rng(1).normal(size=arrays[name].shape).astype("f4")
        moments = t5x_files.scanned_moments(arrays, own_tables=True)
    checkpoint = t5x_files.write(tmp_path / "theirs", "legacy", arrays, moments)
    recipe = RECIPE.format(model=model, checkpoint=checkpoint, network=network)
    (tmp_path / "run.gin").write_text(recipe)
    files = (f"--gin_file={tmp_path}/run.gin", f"--gin_search_paths={tmp_path}")
    here = (f"--gin.MODEL_DIR='{tmp_path}/run'", f"--task={TASK}", f"--cache_dir={text_cache}")
    made = done(command("trainer.pretrain", *files, *here, *QUIET))
    assert f"starts from {checkpoint}, after step 10" in made.stdout
    assert [step for _, step in losses(tmp_path / "run")] == [11, 12, 13]
    back = ["--scan_layers"] if model.startswith("scalable") else []
    flags = (f"--model_dir={tmp_path}/run", f"--output={tmp_path}/back", *back)
    done(command("trainer.annexes.t5x.export_t5x", *flags))
    assert (tmp_path / "back" / "checkpoint_13").is_dir()


# The commands of Primer's README, with its line breaks, variables and quotes.
PRIMER = r"""
t5_mesh_transformer   --tpu="${TPU_NAME}"   --gcp_project="${PROJECT}" \
  --tpu_zone="${ZONE}"   --model_dir="${MODEL_DIR}"  --gin_file="dataset.gin" \
  --t5_tfds_data_dir="${DATA_DIR}" \
  --gin_file="models/defaults.gin"   --gin_file="models/${MODEL_NAME}.gin" \
  --gin_param="utils.tpu_mesh_shape.model_parallelism = 1" \
  --gin_param="utils.tpu_mesh_shape.tpu_topology = \"2x2\"" \
  --gin_param="MIXTURE_NAME = \"${TASK}\"" \
  --gin_param="utils.run.train_steps = 1000000" \
  --module_import="t5_imports" \
  --gin_location_prefix="gin/" \
  --gin_param="utils.run.batch_size = (\"tokens_per_batch\", 65536)" \
  --gin_param="run.sequence_length = {'inputs': 1, 'targets': 512}" \
  --gin_file="learning_rate_schedules/rsqrt_no_ramp_down.gin" \
  --gin_file="objectives/lm.gin" \
  --gin_param="run.model_type = 'lm'" \
  --gin_param="utils.run.save_checkpoints_steps = 2400" \
  --gin_param="utils.serialize_num_microbatches.tokens_per_microbatch_per_replica = 8192"
"""
TO_EVALUATE = r"""
  --gin_file="perplexity_eval.gin" --gin_param="utils.run.mode = \"perplexity_eval\"" \
  --gin_param="utils.run.dataset_split = \"validation\"" \
  --gin_param="utils.run.eval_checkpoint_step = \"all\""
"""


@pytest.mark.slow
def test_the_commands_of_primers_readme(text_cache, tmp_path):
    (tmp_path / "gin" / "models").mkdir(parents=True)
    for theirs, ours in (("ours", "defaults"), ("ez", "medium_primer")):
        text = (HERE / "annexes" / "mesh_gin" / "mesh" / f"{theirs}.gin").read_text()
        text = text.replace("include 'ours.gin'\n", "")
        (tmp_path / "gin" / "models" / f"{ours}.gin").write_text(text)
    variables = {"TPU_NAME": "name", "PROJECT": "project", "ZONE": "zone", "DATA_DIR": "gs://data"}
    variables |= {"MODEL_NAME": "medium_primer", "MODEL_DIR": str(tmp_path / "run")}
    variables["TASK"] = "c4_v220_autoregressive_language_modeling"
    text = PRIMER
    for name, value in variables.items():
        text = text.replace(f"${{{name}}}", value)
    _, *flags = shlex.split(text.replace("\\\n", " "))
    flags = [flag.replace("=gin/", f"={tmp_path}/gin/") for flag in flags]
    shown = done(command("trainer.pretrain", *flags, "--print_config")).stdout
    for flag in ("tpu", "gcp_project", "tpu_zone", "t5_tfds_data_dir", "module_import"):
        assert f"read, no counterpart: --{flag}: " in shown
    for field, value in (
        *(("task", '"c4_autoregressive_lm"'), ("train_steps", "1000000"), ("batch_size", "128")),
        *(("tokens_per_microbatch_per_replica", "8192"), ("checkpoint.keep", "null")),
    ):
        assert any(
            line.split()[:3] == [field, "=", value] for line in shown.splitlines() if line
        ), field
    # The same command trains, at sizes for a test, on a cache of another corpus.
    small = {"d_model": 16, "num_layers": 2, "d_ff": 32, "num_heads": 4, "utils.run.train_steps": 3}
    bindings = [f"--gin_param={name} = {value}" for name, value in small.items()]
    here = ["--task=python_docs_autoregressive_lm", f"--cache_dir={text_cache}", *QUIET]
    sizes = ["--batch_size=2", "--lengths.targets=32", "--tokens_per_microbatch_per_replica=None"]
    done(command("trainer.pretrain", *flags, *bindings, *here, *sizes))
    assert [step for _, step in losses(tmp_path / "run")] == [1, 2, 3]
    evaluating = shlex.split(TO_EVALUATE.replace("\\\n", " "))
    refused = run(command("trainer.pretrain", *flags, *evaluating))
    assert_one_line(refused.returncode, refused.stderr, "--steps=all --split=validation")
    flags = (f"--model_dir={tmp_path}/run", "--steps=all", "--split=validation")
    assert "perplexity" in done(command("trainer.evaluate", *flags)).stdout
