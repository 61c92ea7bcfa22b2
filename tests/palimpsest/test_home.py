"""The commands find their own packages beside files that have the packages' names."""

import os
import re
import sys
import zipfile

import pytest

import palimpsest_home
from tasks import registry
from tasks.terminal.command_line import UserError
from tests.support.processes import ROOT, completed, started


@pytest.fixture
def theirs(tmp_path):
    """Returns a folder with a file of each name, which no command may run."""
    for name in palimpsest_home.PACKAGES:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py was run')\n")
    return tmp_path


@pytest.mark.processes
@pytest.mark.parametrize("by", ["current folder", "PYTHONPATH"])
@pytest.mark.parametrize("name", ["tasks.py", "tasks/__init__.py"])
def test_files_with_names_of_our_packages_are_not_run(tmp_path, monkeypatch, name, by):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("raise SystemExit('tasks was run')\n")
    # Ours comes from the end of the path, as from site-packages.
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}" if by == "PYTHONPATH" else str(ROOT))
    words = ("--preset=t5_1_1_tiny", "--task=c4_span_corruption", "--model_dir=m")
    cwd = tmp_path if by == "current folder" else "/"
    done = started("-m", "trainer.pretrain", *words, "--print_config", cwd=cwd)
    assert (done.returncode, done.stderr) == (0, "")
    assert "c4_span_corruption" in done.stdout


CONSOLE = (
    "import sys; sys.path += [{root!r}]; from palimpsest_home import main; "
    "sys.argv[0] = 'palimpsest'; main()"
)


def console(*words, cwd):
    """Runs the console script, where files of the current folder come first."""
    program = CONSOLE.format(root=str(ROOT))
    return completed([sys.executable, "-c", program, *words], cwd=cwd)


def test_the_console_script_runs_none_of_them(theirs):
    done = console("verify", "--help", cwd=theirs)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: palimpsest verify")


def test_other_programs_import_their_own(theirs):
    for words in (("-c", "import tasks"), ("trainer.py",)):
        assert started(*words, cwd=theirs).stderr.endswith(".py was run\n")


def test_a_program_with_tasks_of_its_own_is_told_so(tmp_path):
    (tmp_path / "tasks.py").touch()
    code = f"import tasks, sys; sys.path += [{str(ROOT)!r}]; import palimpsest"
    done = started("-c", code, cwd=tmp_path)
    said = done.stderr.splitlines()[-1]
    assert said.startswith(f"ImportError: {tmp_path}/tasks.py was imported as tasks, which is")


def test_a_package_lists_the_commands(tmp_path):
    done = started("-m", "trainer", cwd=tmp_path)
    assert done.stdout.startswith("usage: palimpsest COMMAND")


@pytest.mark.processes
def test_children_find_ours(theirs):
    """Stages of a recipe, a spawned process of a vocabulary, and workers of a build."""
    (theirs / "a.txt").write_text("A line of text.\n" * 1000)
    (theirs / "it.toml").write_text(
        '[corpus.a]\ncorpus = "text:a.txt"\n'
        "[vocabulary]\nvocab_size = 18\nworkers = 2\n"
        '[cache.mine]\ntask = "lm"\nworkers = 2\nshard_bytes = 4000\n'
    )
    done = console("run", "it.toml", cwd=theirs)
    assert done.returncode == 0, done.stderr


def test_a_checkout_in_the_current_folder_comes_first(tmp_path):
    """Whatever its version: one from before `palimpsest_home`, too."""
    for name in palimpsest_home.PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "tasks/new.py").write_text("print('of this checkout')\n")
    assert started("-m", "tasks.new", cwd=tmp_path).stdout == "of this checkout\n"


OWN = """
from tasks.objectives import Lengths, span_corruption
from tasks.task import TaskSpec
TASKS = (TaskSpec("own_task", "", span_corruption(), Lengths(64, 18)),)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("module", "file"),
    [
        ("tasks", "tasks.py"),
        ("tasks", "tasks/__init__.py"),
        ("tasks.py", "tasks.py"),
        ("./tasks.py", "tasks.py"),
        ("sub/vocab.py", "sub/vocab.py"),
        ("mine", "mine.py"),
        ("sub/mine.py", "sub/mine.py"),
        ("sub/json.py", "sub/json.py"),
        ("sub/my.dotted.py", "sub/my.dotted.py"),
        ("trainer.mine", "trainer/mine.py"),
        ("experiments.mine", "experiments/mine.py"),
    ],
)
def test_a_users_module(tmp_path, module, file):
    """It is the file that is named, beside another of its name, and finds its neighbours."""
    (tmp_path / "mine.py").write_text("raise SystemExit('the wrong file')")
    place = tmp_path / file
    place.parent.mkdir(exist_ok=True)
    (place.parent / "__init__.py").touch()
    neighbour = place.parents[1] if place.name == "__init__.py" else place.parent
    (neighbour / "neighbour.py").touch()
    place.write_text(OWN if "." in module and not module.endswith(".py") else NEIGHBOUR + OWN)
    words = ("--preset=t5_1_1_tiny", "--model_dir=m", "--task=own_task", "--print_config")
    done = console("pretrain", *words, f"--task_module={module}", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


NEIGHBOUR = "import neighbour\n"


@pytest.mark.parametrize(
    ("module", "text", "says"),
    [
        ("./none.py", None, "there is no file ./none.py"),
        ("trainer", None, "there is no file trainer.py or trainer/__init__.py"),
        ("./mine", "", "pass the name of a Python module, or its file, such as ./mine.py"),
        ("", None, "pass the name of a Python module"),
        ("nowhere", None, "No module named 'nowhere'"),
        ("mine", "\n1 / 0", "cannot be imported: ZeroDivisionError: division by zero (FOLDER/mine"),
        ("mine", "def (", "cannot be imported: SyntaxError: invalid syntax (mine.py, line 1)"),
        ("mine", "import t5.data", "cannot be imported: No module named 't5': pip install t5"),
        ("mine", "raise SystemExit(3)", "cannot be imported: SystemExit: 3 (FOLDER/mine.py:1)"),
        ("mine", "TASKS = 5", "TASKS must be a tuple of TaskSpec"),
        ("mine", "TASKS = (5,)", "TASKS must be a tuple of TaskSpec"),
    ],
)
def test_a_users_module_that_cannot_be_used(tmp_path, monkeypatch, module, text, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError, match=re.escape(says.replace("FOLDER", str(tmp_path)))):
        registry.tasks(module) if module else registry.load(module)


def test_a_wheel_has_what_is_no_python(tmp_path):
    pytest.importorskip("hatchling")
    build = "import sys; from hatchling import build; build.build_wheel(sys.argv[1])"
    completed([sys.executable, "-c", build, tmp_path], check=True)
    (wheel,) = tmp_path.glob("palimpsest_lm-*.whl")
    data = [*ROOT.glob("tasks/annexes/pages/*.*"), *ROOT.glob("tasks/reading/files/*")]
    files = {str(path.relative_to(ROOT)): path for path in data}
    assert "tasks/reading/files/python_docs.jsonl.gz" in files
    files |= {
        f"palimpsest/annexes/recipes/files/{path.name}": path
        for path in ROOT.glob("recipes/*.toml")
    }
    with zipfile.ZipFile(wheel) as archive:
        for name, path in {"palimpsest_home.py": ROOT / "palimpsest_home.py", **files}.items():
            assert archive.read(name) == path.read_bytes()
        names = archive.namelist()
    assert {name for name in names if name.startswith("palimpsest/annexes/recipes/files")} <= {
        *files
    }
    assert not [name for name in names if name.endswith(".pth")]
    licences = [name.rpartition("/")[2] for name in names if ".dist-info/licenses/" in name]
    assert sorted(licences) == ["LICENSE", "python_docs.LICENSE.txt"]


def test_a_users_module_may_change_the_directory(tmp_path, monkeypatch):
    (tmp_path / "wandering.py").write_text("import os\nos.chdir('/')\nTASKS = ()\n")
    monkeypatch.chdir(tmp_path)
    before = sys.path[:]
    assert registry.load("wandering").TASKS == ()
    assert sys.path == before


def test_a_folder_of_a_user_with_the_name_of_a_package(tmp_path):
    (tmp_path / "tasks/mine").mkdir(parents=True)
    (tmp_path / "tasks/mine/sub.py").write_text("TASKS = ()\n")
    for name, says in (("sub", "()"), ("other", "there is no file tasks/mine/other.py")):
        loads = (
            "from tasks import registry\n"
            f"try: print(registry.load('tasks.mine.{name}').TASKS)\n"
            "except Exception as error: print(error)"
        )
        assert says in completed([sys.executable, "-c", loads], cwd=tmp_path, check=True).stdout


def test_a_child_of_a_command_with_a_users_file_starts(tmp_path):
    """Finding any first module must not import another one on the way."""
    (tmp_path / "mine.py").write_text("TASKS = ()\n")
    own = {"_PALIMPSEST_OWN_FILE": f"{tmp_path}/mine.py"}
    found = started("-m", "pipeline.verify", "--help", env={**os.environ, **own})
    assert found.returncode == 0, found.stderr
