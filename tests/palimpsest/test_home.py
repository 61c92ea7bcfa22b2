"""The commands find their own packages beside files that have the packages' names."""

import sys
import zipfile

import pytest

import palimpsest_home
from tasks import registry
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


def test_other_programs_import_their_own(theirs):
    for words in (("-c", "import tasks"), ("trainer.py",)):
        assert started(*words, cwd=theirs).stderr.endswith(".py was run\n")


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
    for name in ("palimpsest_home.py", "tasks/__init__.py", "tasks/new.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
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
    ],
)
def test_the_module_of_a_command_line(words, module):
    assert palimpsest_home.module_of(["python", *words.split()]) == module


OWN = """
from tasks.objectives import Lengths, span_corruption
from tasks.task import TaskSpec
TASKS = (TaskSpec("own_task", "", span_corruption(), Lengths(64, 18)),)
"""


@pytest.mark.parametrize("module", ["tasks", "./tasks.py", "sub/mine.py", "mine"])
def test_a_users_module(tmp_path, module):
    file = tmp_path / module
    file = file if module.endswith(".py") else file.with_suffix(".py")
    file.parent.mkdir(exist_ok=True)
    file.write_text(OWN)
    done = started(
        "-m", "trainer.pretrain", "--preset=t5_1_1_tiny", "--model_dir=m", "--print_config",
        "--task=own_task", f"--task_module={module}", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    wrong = ("-m", "trainer.pretrain", "--preset=t5_1_1_tiny", "--task_module=./none.py")
    assert "there is no file ./none.py" in started(*wrong, cwd=tmp_path).stderr


def test_a_wheel_has_the_pages_and_the_line_that_starts_this(tmp_path):
    pytest.importorskip("hatchling")
    build = "import sys; from hatchling import build; build.build_wheel(sys.argv[1])"
    completed([sys.executable, "-c", build, tmp_path], check=True)
    (wheel,) = tmp_path.glob("palimpsest_lm-*.whl")
    pages = [f"tasks/pages/{path.name}" for path in ROOT.glob("tasks/pages/*.*")]
    with zipfile.ZipFile(wheel) as archive:
        for path in ("palimpsest_home.py", "palimpsest_home.pth", *pages):
            assert archive.read(path) == (ROOT / path).read_bytes()


def test_a_users_module_may_change_the_directory(tmp_path, monkeypatch):
    (tmp_path / "wandering.py").write_text("import os\nos.chdir('/')\nTASKS = ()\n")
    monkeypatch.chdir(tmp_path)
    before = sys.path[:]
    assert registry.load("wandering").TASKS == ()
    assert sys.path == before
