"""Parts of annexes: they are imported when a model names them, and the core never names them."""

import ast
import pathlib
import re

import pytest

from tasks import annexes
from tests.support.processes import started
from trainer.config import Config, save_config
from trainer.config.presets import MODEL_PRESETS

ROOT = pathlib.Path(__file__).parents[3]
# Names of parts that are also words.
WORDS = {"mixed", "fixed", "local", "variable", "merged", "primer", "switch", "halves"}
STARTED = """
import sys
from trainer.config.presets import model_preset
from trainer.model.spec import model_spec
for name in sys.argv[1:]:
    model_spec(model_preset(name))
loaded = [name for name in sys.modules if ".annexes." in name and name.count(".") > 2]
print([name for name in loaded if not name.endswith(".options")])  # dataclasses of flags
"""


def test_a_model_of_the_core_imports_no_annex():
    names = ("t5_1_1_tiny", "lm_tiny", "llama_tiny", "bert_tiny")
    assert started("-c", STARTED, *names).stdout == "[]\n"


@pytest.mark.parametrize("name", annexes.entries("presets"))
def test_runs_with_its_models_open_in_a_new_process(tmp_path, name):
    presets = dict(annexes.get("presets", name)())
    for preset in (min(presets), max(presets)):
        (tmp_path / preset).mkdir()
        model = MODEL_PRESETS[preset]
        save_config(Config(preset=preset, model=model, model_dir=str(tmp_path / preset)), {})
    code = "import sys; from trainer.config import load_config; [*map(load_config, sys.argv[1:])]"
    done = started("-c", code, *sorted(tmp_path.iterdir()))
    assert (done.returncode, done.stderr) == (0, "")


def test_the_core_names_no_part_of_an_annex():
    slots = [slot for slot in annexes.slots() if slot == "families" or slot.startswith("parts.")]
    names = {name for slot in slots for name in annexes.entries(slot)} - WORDS
    for room in ("model", "engine", "data", "config", "decoding", "optim"):
        for path in (ROOT / "trainer" / room).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    assert not names & {*re.findall(r"\w+", node.value)}, (path, node.lineno)
