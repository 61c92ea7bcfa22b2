"""Public recipes of T5X run from their own folders, with what their scripts export.

Each repository has a tasks.py beside its gin files, which needs T5 and TensorFlow Datasets, and
scripts that start T5X there. The folders here are minimal equivalents in words of our own, with
the settings that count: of dumitrescustefan/t5x_models (6847565) and bertin-project/bertin-t5x
(e466ad5).
"""

import os
import pathlib
import shutil
import sys

import pytest

from tests.support.parameters import slow_unless
from tests.support.processes import completed
from tests.support.runs import TASK, losses

pytestmark = pytest.mark.processes

RECIPES = pathlib.Path(__file__).parent / "recipes"
# What nobody may import: it leaves a trace.
TASKS = """\
import pathlib
pathlib.Path(__file__).with_suffix('.executed').touch()
import seqio
import t5.data
vocabulary = seqio.SentencePieceVocabulary('gs://t5-data/vocabs/ro.model', extra_ids=0)
seqio.TaskRegistry.add('rlm_span_corruption_stream', source=None, output_features={})
"""
# The clone is in ~/models/t5x_models, beside T5X.
OF_ROMANIAN = """\
PROJECT_DIR=${{HOME}}"/models/t5x_models"
T5X_DIR="../../t5x"
MODEL_DIR="gs://myv4-bucket/{0}"
GIN_FILE="{0}.gin"
export PYTHONPATH=${{PROJECT_DIR}}
python3 ${{T5X_DIR}}/t5x/train.py --gin_search_paths=${{PROJECT_DIR}} --gin_file=${{GIN_FILE}} \\
  --gin.MODEL_DIR="'${{MODEL_DIR}}'" \\
"""
ROMANIAN = ("ro_t5x_base", "ro_t5x_large", "ro_mt5x_base", "ro_mt5x_large")
OF_OTHERS = """\
MODEL_DIR="gs://{0}"
TFDS_DATA_DIR="gs://{0}/tfds"
python -m t5x.train --gin_file={0}.gin --gin.MODEL_DIR=\\"${{MODEL_DIR}}\\" \\
  --tfds_data_dir=\\"${{TFDS_DATA_DIR}}\\" --alsologtostderr \\
"""
FINETUNED = """\
from __gin__ import dynamic_registration
include 't5x/examples/t5/{model}.gin'
include 't5x/configs/runs/finetune.gin'
import t5.data.mixtures
import seqio
import tasks
INITIAL_CHECKPOINT_PATH = 'gs://{checkpoint}'
"""
PRETRAINED = """\
include 't5x/examples/t5/t5_1_1/examples/base_c4_pretrain.gin'
include 't5x/configs/runs/pretrain.gin'
import t5.data.mixtures
import seqio
import tasks
"""
SETTINGS = """\
MIXTURE_OR_TASK_NAME = '{task}'
TASK_FEATURE_LENGTHS = {{'inputs': 512, 'targets': 512}}
TRAIN_STEPS = {steps}
DROPOUT_RATE = 0.0
"""
VOCABULARY = """\
VOCABULARY = @seqio.SentencePieceVocabulary()
seqio.SentencePieceVocabulary.sentencepiece_model_file = 'gs://32000_unigram.sp.model'
seqio.SentencePieceVocabulary.extra_ids = 100
NUM_EMBEDDINGS = 32128
"""
# Recipe -> model, task, updates; other lines of the file, with settings that T5X drops in silence.
OTHERS = {
    "finetune_t5_base": ("t5_1_1/base", "mc4_es_gaussian_span_corruption", 2_000_000, VOCABULARY),
    "pretrain_t5_1_1_base": (
        *(None, "mc4_es_gaussian_span_corruption_pretrain", 1_000_000),
        "BATCH_SIZE = 56\nINITIAL_CHECKPOINT_PATH = 'gs//t5-data/a'\n",
    ),
}


def clone(home: pathlib.Path, repository: str, name: str) -> pathlib.Path:
    """Writes the folder with a recipe and its script; returns the folder."""
    folder = home / "models" / repository
    folder.mkdir(parents=True)
    for module in ("tasks", f"{name}_tasks", "convert_t5x_checkpoint_to_flax"):
        (folder / f"{module}.py").write_text(TASKS)
    if repository == "t5x_models":
        for file in ("ro_pretrain.gin", f"{name}.gin"):
            shutil.copy(RECIPES / file, folder)
        (folder / "run.sh").write_text(OF_ROMANIAN.format(name))
        return folder
    model, task, steps, more = OTHERS[name]
    head = PRETRAINED
    if model:
        head = FINETUNED.format(model=model, checkpoint=f"{name}/checkpoint_1")
    text = head + SETTINGS.format(task=task, steps=steps) + more
    (folder / f"{name}.gin").write_text(text)
    (folder / "run.sh").write_text(OF_OTHERS.format(name))
    return folder


def started(folder: pathlib.Path, *flags: str) -> str:
    """Runs the script with our command in the place of T5X's; returns what it printed."""
    text = (folder / "run.sh").read_text()
    ours = f"{sys.executable} -m trainer.pretrain"
    for theirs in ("python3 ${T5X_DIR}/t5x/train.py", "python -m t5x.train"):
        text = text.replace(theirs, ours)
    assert ours in text
    (folder / "run.sh").write_text(text + " ".join(flags) + "\n")
    home = {**os.environ, "HOME": str(folder.parents[1]), "PYTHONPATH": ""}
    made = completed(["bash", "run.sh"], cwd=folder, env=home)
    assert made.returncode == 0, made.stderr
    assert not list(folder.glob("*.executed"))
    return made.stdout


def fields(shown: str) -> dict[str, str]:
    """Returns the values that --print_config printed."""
    return {
        line.split()[0]: line.partition(" = ")[2].partition("  #")[0].strip()
        for line in shown.splitlines()
        if " = " in line and not line.startswith(("warning", "read, no", "not imported"))
    }


@pytest.mark.parametrize("name", ROMANIAN)
def test_the_romanian_recipes_are_read_from_their_folder(name, tmp_path):
    """What they set is in test_recipe.py."""
    shown = started(clone(tmp_path, "t5x_models", name), "--print_config")
    assert fields(shown)["model_dir"] == f'"gs://myv4-bucket/{name}"'
    assert f"not imported: {name}_tasks ({name}.gin:5): --task_module={name}_tasks" in shown
    warned = "its last text pieces would serve as sentinels" in shown
    assert warned == name.startswith("ro_t5x")


@pytest.mark.parametrize("name", OTHERS)
def test_other_recipes_are_read_from_their_folder(name, tmp_path):
    model, task, steps, more = OTHERS[name]
    shown = started(clone(tmp_path, "bertin-t5x", name), "--print_config")
    found = fields(shown)
    assert found["task"] == f'"seqio:{task}"'
    assert (found["train_steps"], found["batch_size"]) == (str(steps), "128" if model else "56")
    assert (found["lengths.inputs"], found["lengths.targets"]) == ("512", "512")
    assert (found["model.emb_dim"], found["model.vocab_size"]) == ("768", "32128")
    assert found["vocabulary.extra_ids"] == ("100" if VOCABULARY in more else "null")
    assert found["init_from"] == (f'"gs://{name}/checkpoint_1"' if model else "null")
    assert f"not imported: tasks ({name}.gin:" in shown
    assert "read, no counterpart: --tfds_data_dir: " in shown
    for dead in ("NUM_EMBEDDINGS", "INITIAL_CHECKPOINT_PATH"):
        assert (f"warning: {dead} ({name}.gin:" in shown) == (f"{dead} =" in more)


SMALL = (
    *("--model.emb_dim=8", "--model.num_heads=2", "--model.head_dim=4", "--model.mlp_dim=16"),
    *("--model.num_encoder_layers=1", "--model.num_decoder_layers=1", "--model.dtype=float32"),
    *("--batch_size=2", "--lengths.inputs=32", "--lengths.targets=10", "--train_steps=2"),
    *("--metrics.every_steps=1", "--metrics.tensorboard=false", "--evaluation.every_steps=0"),
    *("--mesh.tensor=1", f"--task={TASK}", "--model_dir=run"),
)
TRAINED = ("ro_t5x_base", "ro_mt5x_large", *OTHERS)


@pytest.mark.parametrize("name", slow_unless(TRAINED[:1], TRAINED))
def test_recipes_train_in_their_folder(name, text_cache, tmp_path):
    folder = clone(tmp_path, "t5x_models" if name in ROMANIAN else "bertin-t5x", name)
    # The vocabulary of the cache has its sentinels inside.
    inside = ["--vocabulary.extra_ids=0"] * (VOCABULARY in OTHERS.get(name, [""])[-1])
    scratch = "--gin.INITIAL_CHECKPOINT_PATH=None"
    started(folder, f"--cache_dir={text_cache.parent}", scratch, *inside, *SMALL)
    assert [step for _, step in losses(folder / "run")] == [1, 2]
