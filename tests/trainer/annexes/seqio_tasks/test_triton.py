"""TensorFlow and transformers in one process, where triton crashes if TensorFlow comes first."""

import json
import signal

import pytest

from tests.support.processes import ROOT, started

pytestmark = [pytest.mark.torch, pytest.mark.processes]

TASKS = """
import seqio

LINES = seqio.FunctionDataSource(lambda split, shuffle_files, seed=None: None, ["train"])
seqio.TaskRegistry.add("theirs", LINES, preprocessors=[],
                       output_features={"targets": seqio.Feature(seqio.ByteVocabulary())})
"""
OPEN_TASK = """
from trainer.config.from_flags import build_config
from trainer.annexes.seqio_tasks.seqio_data import SeqioData
flags = ["--task=seqio:theirs", "--task_module=./theirs.py", "--lengths.targets=8"]
config, _ = build_config("lm_tiny", flags)
SeqioData(config, "theirs")
"""
LOAD_TASKS = "from tasks import registry; registry.load('./theirs.py')"
OPEN_MODEL = """
import json
from trainer.huggingface import parity
parity.their_model("t5", json.load(open("t5/config.json")))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a module of seqio Tasks and a T5 of transformers."""
    from transformers import T5Config, T5ForConditionalGeneration

    folder = tmp_path_factory.mktemp("triton")
    (folder / "theirs.py").write_text(TASKS)
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    T5ForConditionalGeneration(T5Config(vocab_size=32, **sizes)).save_pretrained(folder / "t5")
    assert json.loads((folder / "t5" / "config.json").read_text())["model_type"] == "t5"
    return folder


@pytest.fixture(scope="module")
def triton():
    pytest.importorskip("triton", reason="needs triton, which torch's CUDA build brings")


def ended(folder, *parts):
    program = "\n".join([f"import sys; sys.path.insert(0, {str(ROOT)!r})", *parts])
    return started("-c", program, cwd=folder)


def test_triton_after_tensorflow_crashes(triton):
    # When this fails, `extras.prepare_tensorflow` and `check_triton` have lost their reason.
    assert started("-c", "import tensorflow, triton").returncode == -signal.SIGSEGV


@pytest.mark.parametrize("before", [[OPEN_TASK], ["import transformers", OPEN_TASK], [LOAD_TASKS]])
def test_transformers_after_a_task_of_seqio(folder, triton, before):
    found = ended(folder, *before, OPEN_MODEL)
    assert found.returncode == 0, found.stderr[-2000:]


def test_a_task_of_seqio_after_transformers(folder, triton):
    found = ended(folder, OPEN_MODEL, OPEN_TASK)
    assert found.returncode == 0, found.stderr[-2000:]


def test_a_program_that_imported_tensorflow_first_is_refused(folder, triton):
    found = ended(folder, "import tensorflow", OPEN_MODEL)
    assert found.returncode == 1
    assert "begin your program with `import triton`" in found.stderr.splitlines()[-1]
