"""The import graph, every package standing on tasks alone; and commands that answer at once."""

import ast
import functools
import graphlib
import json
import pathlib
import re
import resource
import sys

from tasks import annexes
from tests.support.processes import completed

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("experiments", "palimpsest", "pipeline", "tasks", "trainer", "vocab")

# What a module of each package may import of ours, and what it must not import from outside.
OURS = {
    "palimpsest": {"palimpsest", "pipeline", "tasks", "trainer", "vocab"},
    "tasks": {"tasks"},
    "vocab": {"vocab", "tasks", "pipeline"},
    "pipeline": {"pipeline", "tasks"},
    "trainer": {"trainer", "tasks"},
    "experiments": {"experiments", "trainer", "tasks"},
}
FORBIDDEN = {
    "palimpsest": {"apache_beam", "jax", "flax", "tensorflow", "seqio"},
    "tasks": {"apache_beam", "jax", "flax", "tensorflow", "seqio"},
    "vocab": {"jax", "flax", "tensorflow", "seqio"},
    "pipeline": {"jax", "flax", "tensorflow", "seqio"},
    "trainer": {"apache_beam", "tensorflow", "seqio", "sentencepiece", "datasets"},
    "experiments": {"apache_beam", "tensorflow", "seqio", "sentencepiece", "datasets"},
}
# Decision 005: vocab runs Beam and normalises text as pipeline does, and takes nothing else.
OF_PIPELINE = {"pipeline.runners", "pipeline.tokenizer"}
ONLY_IN = {
    "trainer/annexes/seqio_tasks/catalogue.py": {"seqio", "tensorflow"},
    "tasks/annexes/t5_tasks/seqio_supervised.py": {"seqio", "tensorflow"},
    "trainer/annexes/seqio_tasks/seqio_data.py": {"seqio", "tensorflow"},
    "trainer/annexes/t5x/engine.py": {"seqio", "tensorflow"},
    "trainer/huggingface/tokenizer.py": {"sentencepiece"},
}


OF_THE_WHOLE = {
    *(("test_docs.py",), ("test_migrating.py",), ("test_migrating_from_t5x.py",)),
    ("trainer", "test_migrants_errands.py"),
}


def modules():
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


@functools.cache
def imports(path: pathlib.Path) -> set[tuple[str, str]]:
    """Returns (module, what is taken from it or "") of all imports, lazy ones included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {(name.name, "") for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {(node.module or "", name.name) for name in node.names}
    return found


def test_imports_go_one_way():
    for path in modules():
        name, package = str(path.relative_to(ROOT)), path.relative_to(ROOT).parts[0]
        whole = {module for module, _ in imports(path)}
        roots = {module.split(".")[0] for module in whole}
        assert roots & set(PACKAGES) <= OURS[package], name
        if package == "vocab":
            members = {".".join(each) for each in imports(path)}
            borrowed = {".".join(one.split(".")[:2]) for one in members if one[:9] == "pipeline."}
            assert borrowed <= OF_PIPELINE, name
        assert not roots & FORBIDDEN[package] - ONLY_IN.get(name, set()), name
        assert not roots & {"benchmarks", "tests"}, name
        if name.startswith("trainer/model/"):
            outside = {root for root in roots if root not in sys.stdlib_module_names}
            assert outside <= {"jax", "flax", "numpy", "tasks", "trainer"}, name
            ours = {module for module in whole if module.startswith(("tasks", "trainer"))}
            inside = {module for module in ours if module.startswith("trainer.model")}
            assert ours - inside <= {"tasks.annexes", "tasks.terminal.flag_fields"}, name


def import_graph() -> dict[str, set[str]]:
    """Returns module -> our modules that it imports.

    `from package import module` is an import of the module, not of the package.
    """
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in modules()
    }
    graph = {}
    for module, path in paths.items():
        found = {f"{name}.{member}" if f"{name}.{member}" in paths else name
                 for name, member in imports(path)}  # fmt: skip
        graph[module] = found & set(paths) - {module}
    return graph


def is_annex(module: str) -> bool:
    return re.match(r"\w+\.annexes\.\w", module) is not None


def named_modules(path: pathlib.Path) -> set[str]:
    """Returns the modules of ours that a file's strings name, such as "package.module:function"."""
    strings = {
        node.value.partition(":")[0]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return {each for each in strings if each.split(".")[0] in PACKAGES and "." in each}


def test_the_core_names_no_annex():
    for module, imported in import_graph().items():
        path = path_of(module)
        if module.startswith("experiments") or is_annex(module):
            continue
        named = {each for each in imported | named_modules(path) if is_annex(each)}
        assert not named, f"{module} names {', '.join(sorted(named))}"


def test_tests_of_the_core_name_no_annex():
    """So they pass where annexes are deleted; the laboratory and tests of docs are of the whole."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        parts = path.relative_to(ROOT).parts
        if parts[2:3] == ("annexes",) or parts[1] == "laboratory" or parts[1:] in OF_THE_WHOLE:
            continue
        found = {module for module, _ in imports(path) if ".annexes" in module}
        found |= {f"{module}.{name}" for module, name in imports(path) if name == "annexes"}
        found |= {module for module in named_modules(path) if is_annex(module)}
        found -= {"tasks.annexes"}
        assert not found, f"{path} names {', '.join(sorted(found))}"


def skipped_without(path: pathlib.Path) -> set[str]:
    """Returns the annexes' modules without which a test of a file is skipped, and those below."""
    asked = re.findall(r'importorskip\(\s*"([\w.]+)"', path.read_text())
    return {each for each in named_modules(path) if any(each.startswith(one) for one in asked)}


def test_an_annex_and_its_tests_import_only_annexes_that_it_needs():
    """So an annex can be deleted without others, but those whose annex.toml names it."""
    found = {annex.name: annex for annex in annexes.annexes()}

    def needed(name: str) -> set[str]:
        return {name}.union(*(needed(each) for each in found[name].needs))

    for path in sorted([*modules(), *(ROOT / "tests").rglob("*.py")]):
        parts = path.relative_to(ROOT).parts
        at = 2 if parts[0] == "tests" else 1
        if parts[at : at + 1] == ("annexes",) and len(parts) > at + 2:
            named = {module for module, _ in imports(path)} | named_modules(path)
            named = {each for each in named if is_annex(each)} - skipped_without(path)
            used = {each.split(".")[2] for each in named}
            assert used <= needed(parts[at + 1]), f"{path} uses {used - needed(parts[at + 1])}"


def test_the_core_names_no_command_of_an_annex():
    commands = "|".join(
        command.replace("_", "[-_]")
        for slot in annexes.slots()
        if slot.startswith("commands.")
        for command in annexes.entries(slot)
    )
    for path in modules():
        module = path.relative_to(ROOT).parts
        if module[0] != "experiments" and "annexes" not in module[1:2]:
            found = re.search(rf"\bpalimpsest ({commands or '(?!)'})\b", path.read_text())
            assert not found, f"{path}: {found[0]}"


def test_each_entry_of_an_annex_exists():
    names = [annex.name for annex in annexes.annexes()]
    assert len(names) == len({*names})
    for annex in annexes.annexes():
        assert annex.title, annex.package
        for entries in annex.slots.values():
            for reference in entries.values():
                module, _, attribute = reference.partition(":")
                if module.split(".")[0] in PACKAGES:
                    tree = ast.parse(path_of(module).read_text())
                    assert not attribute or attribute in defined(tree), reference


def defined(tree: ast.Module) -> set[str]:
    """Returns the names that a module defines."""
    found = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {each.id for each in targets if isinstance(each, ast.Name)}
    return found


def path_of(module: str) -> pathlib.Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def test_no_module_is_in_a_circle():
    graphlib.TopologicalSorter(import_graph()).prepare()  # CycleError names the circle


def test_no_room_imports_one_above_it():
    """Rooms are the files and folders at a package's top."""
    graph = import_graph()
    for package in ("pipeline", "tasks", "trainer", "vocab"):
        rooms: dict[str, set[str]] = {}
        for module, imported in graph.items():
            if module.startswith(f"{package}.") and not is_annex(module):
                name = module.split(".")[1]
                below = {each.split(".")[1] for each in imported if each.startswith(f"{package}.")}
                rooms.setdefault(name, set()).update(below - {name})
        graphlib.TopologicalSorter(rooms).prepare()


def test_no_file_is_named_for_nothing():
    names = {path.name for path in modules()}
    assert not names & {"utils.py", "helpers.py", "common.py", "misc.py"}


COMMANDS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in modules()
    if '__name__ == "__main__"' in path.read_text()
)
HELP = """
import contextlib, io, json, runpy, sys
sys.path.insert(0, "")
shown = {}
for command in sys.argv[1:]:
    sys.argv, out = [command, "--help"], io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        runpy.run_module(command, run_name="__main__", alter_sys=True)
    shown[command] = [out.getvalue(), sorted({name.split(".")[0] for name in sys.modules})]
print(json.dumps(shown))
"""


def test_every_help_imports_next_to_nothing():
    # One process shows all, each with the modules that it and those before it have imported.
    command = [sys.executable, "-W", "ignore::RuntimeWarning:runpy", "-c", HELP, *COMMANDS]
    done = completed(command)
    assert done.returncode == 0, done.stderr
    light = {
        *sys.stdlib_module_names,
        "sitecustomize",  # of Debian's Python
        *PACKAGES,
        "palimpsest_home",
        "google",
        "google_crc32c",
        "numpy",
    }
    for name, (shown, imported) in json.loads(done.stdout).items():
        assert shown.startswith("usage: "), name
        foreign = {each for each in imported if not each.startswith("_")} - light
        assert not foreign, f"{name} --help imports {foreign}"
    assert {"vocab.train", "pipeline.build", "trainer.pretrain", "trainer.evaluate"} <= {*COMMANDS}


def test_help_answers_in_under_a_second():
    # Of processor time: the machine may be busy with something else.
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "trainer.pretrain", "--help"]
    done = completed(command)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1
