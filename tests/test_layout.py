"""The import graph, every package standing on tasks alone; and commands that answer at once."""

import ast
import graphlib
import pathlib
import resource
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("experiments", "pipeline", "tasks", "trainer", "vocab")

# What a module of each package may import of ours, and what it must not import from outside.
OURS = {
    "tasks": {"tasks"},
    "vocab": {"vocab", "tasks", "pipeline"},
    "pipeline": {"pipeline", "tasks"},
    "trainer": {"trainer", "tasks"},
    "experiments": {"experiments", "trainer", "tasks"},
}
FORBIDDEN = {
    "tasks": {"apache_beam", "jax", "flax", "tensorflow", "seqio"},
    "vocab": {"jax", "flax", "tensorflow", "seqio"},
    "pipeline": {"jax", "flax", "tensorflow", "seqio"},
    "trainer": {"apache_beam", "tensorflow", "seqio", "sentencepiece", "datasets"},
    "experiments": {"apache_beam", "tensorflow", "seqio", "sentencepiece", "datasets"},
}
# Decision 005: vocab runs its Beam job as pipeline does, and takes nothing else from there.
OF_PIPELINE = {"pipeline.runners"}
ONLY_IN = {
    "tasks/seqio_tasks.py": {"seqio", "tensorflow"},
    "tasks/seqio_supervised.py": {"seqio", "tensorflow"},
    "trainer/data/seqio_data.py": {"seqio", "tensorflow"},
    "trainer/t5x/engine.py": {"seqio", "tensorflow"},
    "trainer/huggingface/tokenizer.py": {"sentencepiece"},
}


def modules():
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def imports(path: pathlib.Path, members: bool = False) -> set[str]:
    """Modules that are imported; with `members`, also what is taken from them, as module.member."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            if members:
                found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path):
    package = path.relative_to(ROOT).parts[0]
    roots = {name.split(".")[0] for name in imports(path)}
    assert roots & set(PACKAGES) <= OURS[package]
    if package == "vocab":
        names = imports(path, members=True)
        borrowed = {".".join(name.split(".")[:2]) for name in names if name[:9] == "pipeline."}
        assert borrowed <= OF_PIPELINE
    allowed = ONLY_IN.get(str(path.relative_to(ROOT)), set())
    assert not roots & FORBIDDEN[package] - allowed
    assert not roots & {"benchmarks", "tests"}
    if path.relative_to(ROOT).parts[:2] == ("trainer", "model"):
        outside = {name for name in roots if name not in sys.stdlib_module_names}
        assert outside <= {"jax", "flax", "numpy", "tasks", "trainer"}
        ours = {name for name in imports(path) if name.startswith("tasks")}
        assert ours <= {"tasks.terminal.fields"}
        inside = {name for name in imports(path) if name.startswith("trainer")}
        assert all(name.startswith("trainer.model") for name in inside)


def import_graph() -> dict[str, set[str]]:
    """Returns module -> our modules that it imports anywhere, lazily and for types alone, too.

    `from package import module` is an import of the module, not of the package.
    """
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in modules()
    }
    graph = {}
    for module, path in paths.items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {name.name for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                members = (f"{node.module}.{name.name}" for name in node.names)
                found |= {name if name in paths else node.module or "" for name in members}
        graph[module] = found & set(paths) - {module}
    return graph


def test_no_module_is_in_a_circle():
    graphlib.TopologicalSorter(import_graph()).prepare()  # CycleError names the circle


def test_no_file_is_named_for_nothing():
    names = {path.name for path in modules()}
    assert not names & {"utils.py", "helpers.py", "common.py", "misc.py"}


COMMANDS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in modules()
    if '__name__ == "__main__"' in path.read_text()
)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_answers_in_under_a_second(command):
    # Of processor time: the machine may be busy with something else.
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(
        [sys.executable, "-m", command, "--help"], capture_output=True, text=True, cwd=ROOT
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0, result.stderr
    assert "usage:" in result.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1


def test_the_main_commands_are_there():
    assert {"vocab.train", "pipeline.build", "trainer.pretrain", "trainer.evaluate"} <= set(
        COMMANDS
    )
