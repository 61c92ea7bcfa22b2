"""The zoo's parts use what a user's module could use, and nothing else knows them."""

import ast
import functools
import pathlib
from dataclasses import replace

import trainer.zoo  # noqa: F401  (registers its parts)
from tests.support.processes import started
from trainer.config import Config
from trainer.config.presets import MODEL_PRESETS
from trainer.config.run import save_config
from trainer.model.parts import FAMILIES, SLOTS

ROOT = pathlib.Path(__file__).parents[3]
ZOO = [*(ROOT / "trainer" / "zoo").glob("*.py")]
OTHERS = [
    *(ROOT / "trainer" / "model").glob("*.py"),
    *(ROOT / "trainer" / "engine").glob("*.py"),
    *(ROOT / "trainer").glob("setup*"),
]


# Names of parts that are also names of modules and collections.
ALSO_WORDS = {"mixed", "fixed"}


def _names():
    """Returns the names of the zoo's parts and families, and of its classes and functions."""
    parts = {"primer", "evolved_transformer"} & {*FAMILIES}
    for slot in SLOTS.values():
        for name, part in slot.items():
            builder = part.builder
            if isinstance(builder, functools.partial):
                (builder,) = builder.args
            module = builder if isinstance(builder, str) else builder.__module__
            parts |= {name} if module.startswith("trainer.zoo") else set()
    defined = {
        node.name
        for path in ZOO
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }
    return parts, defined


def test_runs_with_its_parts_open_in_a_new_process(tmp_path):
    models = {
        "primer": MODEL_PRESETS["tiny_primer"],
        "evolved": MODEL_PRESETS["tiny_evolved_transformer"],
        "synthesizer": MODEL_PRESETS["tiny_synthesizer"],
        "march": MODEL_PRESETS["t5_1_0_base_cdq"],
        "pattern": replace(
            MODEL_PRESETS["lm_tiny"], attention_pattern="bigbird:window=3,random_blocks=1,block=8"
        ),
    }
    for name, model in models.items():
        (tmp_path / name).mkdir()
        save_config(Config(preset=name, model=model, model_dir=str(tmp_path / name)), {})
    code = "import sys; from trainer.config import load_config\n"
    code += "for each in sys.argv[1:]: load_config(each)"
    done = started("-c", code, *(tmp_path / name for name in models))
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_outside_of_the_zoo_names_its_tenants():
    parts, defined = _names()
    assert {"cdq", "mdha", "bigbird", "merged", "primer_alternating"} <= parts
    for path in [each for each in OTHERS if each.suffix == ".py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant):
                assert node.value not in parts - ALSO_WORDS, (path, node.lineno)
            if isinstance(node, ast.Name):
                assert node.id not in defined, (path, node.lineno)
            if isinstance(node, ast.ImportFrom):
                assert not str(node.module).startswith("trainer.zoo"), (path, node.lineno)


def test_methods_of_the_model_stay_short():
    for path in [*ZOO, *(ROOT / "trainer" / "model").glob("*.py")]:
        for kind in ast.walk(ast.parse(path.read_text())):
            for each in kind.body if isinstance(kind, ast.ClassDef) else ():
                if isinstance(each, ast.FunctionDef):
                    assert each.end_lineno - each.lineno < 50, (path, each.name)
