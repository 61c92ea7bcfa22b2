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


@pytest.mark.parametrize("by", ["current folder", "PYTHONPATH"])
@pytest.mark.parametrize(
    "words", [("-m", "trainer.pretrain"), ("-um", "pipeline.verify"), ("-Xutf8", "-mpalimpsest")]
)
def test_files_with_our_names_are_not_run(theirs, monkeypatch, words, by):
    if by == "PYTHONPATH":
        monkeypatch.setenv("PYTHONPATH", str(theirs))
    done = started(*words, "--help", cwd=theirs if by == "current folder" else "/")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")


def test_other_programs_import_their_own(theirs, monkeypatch):
    for mark in ("", str(ROOT)):  # also those that one of our commands starts
        monkeypatch.setenv("_PALIMPSEST_HOME", mark)
        for words in (("-c", "import tasks"), ("trainer.py",)):
            assert started(*words, cwd=theirs).stderr.endswith(".py was run\n")


def test_other_programs_run_in_a_folder_that_is_gone(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    shell = f"cd {gone}; rmdir {gone}; {sys.executable} -c 'print(1)'"
    done = completed(["sh", "-c", shell])
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_a_package_lists_the_commands(tmp_path):
    done = started("-m", "trainer", cwd=tmp_path)
    assert done.stdout.startswith("usage: palimpsest COMMAND")


@pytest.mark.processes
def test_workers_find_ours(theirs):
    (theirs / "a.txt").write_text("A line of text.\n" * 50)
    done = started(
        "-m", "pipeline.build", "--task=lm", "--name=mine", "--corpus=text:a.txt",
        "--vocabulary=bytes", "--cache_dir=cache", "--workers=2", cwd=theirs,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_checkout_in_the_current_folder_comes_first(tmp_path):
    """Whatever its version: one from before `palimpsest_home`, too."""
    for name in palimpsest_home.PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "tasks/new.py").write_text("print('of this checkout')\n")
    assert started("-m", "tasks.new", cwd=tmp_path).stdout == "of this checkout\n"


@pytest.mark.parametrize(
    ("words", "module"),
    [
        ("-m trainer.plan --m x", "trainer.plan"),
        ("-IBm a", "a"),
        ("-W ignore -X utf8 -Wdefault -m a", "a"),
        ("-c -m a", ""),
        ("- -m a", ""),
        ("script.py -m a", ""),
        ("", ""),
        ("-m", ""),
        ("--check-hash-based-pycs never -m a", "a"),
    ],
)
def test_the_module_of_a_command_line(words, module):
    assert palimpsest_home.module_of(["python", *words.split()]) == module


OWN = """
from tasks.objectives import Lengths, span_corruption
from tasks.task import TaskSpec
TASKS = (TaskSpec("own_task", "", span_corruption(), Lengths(64, 18)),)
"""


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
    words = ("--task=own_task", f"--task_module={module}", "--print_config")
    assert refusal(tmp_path, *words) == ""


NEIGHBOUR = "import neighbour\n"


def refusal(folder, *words):
    """Returns what trainer.pretrain writes to stderr in a folder."""
    usual = ("--preset=t5_1_1_tiny", "--model_dir=m")
    return started("-m", "trainer.pretrain", *usual, *words, cwd=folder).stderr


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


def test_a_wheel_has_pages_corpus_licences_and_the_line_that_starts_this(tmp_path):
    pytest.importorskip("hatchling")
    build = "import sys; from hatchling import build; build.build_wheel(sys.argv[1])"
    completed([sys.executable, "-c", build, tmp_path], check=True)
    (wheel,) = tmp_path.glob("palimpsest_lm-*.whl")
    data = [*ROOT.glob("tasks/pages/*.*"), *ROOT.glob("tasks/reading/files/*")]
    inside = [str(path.relative_to(ROOT)) for path in data]
    assert "tasks/reading/files/python_docs.jsonl.gz" in inside
    with zipfile.ZipFile(wheel) as archive:
        for path in ("palimpsest_home.py", "palimpsest_home.pth", *inside):
            assert archive.read(path) == (ROOT / path).read_bytes()
        licences = [name for name in archive.namelist() if ".dist-info/licenses/" in name]
        assert sorted(name.rpartition("/")[2] for name in licences) == [
            "LICENSE",
            "python_docs.LICENSE.txt",
        ]


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
    found = started("-m", "pipeline.inspect", "--help", env={**os.environ, **own})
    assert found.returncode == 0, found.stderr
