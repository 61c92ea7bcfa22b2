"""`palimpsest COMMAND`: every command by name, what --help lists."""

import importlib
import pathlib
import subprocess
import sys

import pytest

from palimpsest.__main__ import main, named, page
from palimpsest.commands import COMMANDS, GROUPS, command, summary
from tasks.terminal import extras
from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tests.support.extending import example

ROOT = pathlib.Path(__file__).parents[2]


def ended(*words):
    with pytest.raises(SystemExit) as end:
        main(words)
    return end.value.code


def test_every_command_has_a_name():
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for package in ("palimpsest", "pipeline", "tasks", "trainer", "vocab")
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__main__.py"
        if '__name__ == "__main__"' in path.read_text()
    }
    assert set(COMMANDS.values()) == modules


def test_a_command_is_a_dataclass_of_flags_and_a_line_of_words():
    for module in COMMANDS.values():
        assert isinstance(command(module), Command)
        line = summary(module)
        assert line.endswith(".")
        assert sys.modules[module].__doc__.startswith(line)


def test_the_list_fits_a_screen():
    lines = page().splitlines()
    assert len(lines) <= 45
    assert all(any(line.split("  ")[1:2] == [name] or f" {name} " in line for line in lines)
               for name in COMMANDS)  # fmt: skip
    assert page("vocab ").count("\n  vocab ") == sum(name[:6] == "vocab " for name in COMMANDS)
    filled = {group for group, commands in GROUPS.items() if commands}
    assert filled <= {line.rstrip(":") for line in lines}


def test_words_name_a_command():
    assert named(["vocab", "train", "--corpus=a"]) == ("vocab train", ["--corpus=a"])
    for name in COMMANDS:
        assert named([*name.replace("_", "-").split(), "--a=1"]) == (name, ["--a=1"])
    assert named(["verify", "a cache"]) == ("verify", ["a cache"])
    assert named(["--help"]) == ("", ["--help"])


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--help"], 0, "pretrain"),
        ([], 0, "pretrain"),
        (["vocab"], 0, "vocab train"),
        (["verify", "--help"], 0, "usage: palimpsest verify --cache=DIR"),
        (["verify", "--cach=a"], 2, "palimpsest verify: error: unknown flag --cach"),
        (["pretain"], 2, "palimpsest: error: unknown command pretain (did you mean pretrain?)"),
        (["vocab", "trian"], 2, "(did you mean vocab train?)"),
        (["--version"], 0, f"palimpsest-lm {extras.version()}\n"),
    ],
)
def test_the_program(words, code, says, capsys):
    assert ended(*words) == code
    assert says in "".join(capsys.readouterr())


def test_a_module_is_a_command(tmp_path, monkeypatch, capsys):
    (tmp_path / "count_documents.py").write_text(example("A command"))
    (tmp_path / "a.txt").write_text("One document.\n" * 7)
    build = ["--task=lm", "--name=mine", f"--corpus=text:{tmp_path}/a.txt", "--vocabulary=bytes"]
    assert ended("build", *build, f"--cache_dir={tmp_path}") == 0
    monkeypatch.syspath_prepend(tmp_path)
    main = importlib.import_module("count_documents").main
    capsys.readouterr()
    main([f"--cache={tmp_path}/mine_lm"])
    assert capsys.readouterr().out == "7\n"
    with pytest.raises(UserError, match="lower --at_least"):
        main([f"--cache={tmp_path}/mine_lm", "--at_least=1000000"])


def test_a_reader_may_leave_before_the_end():
    run = subprocess.Popen(
        [sys.executable, "-m", "palimpsest", "pretrain", "--help=all"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    run.stdout.close()
    assert (run.stderr.read(), run.wait()) == (b"", 128 + 13)


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_the_list_and_the_version_import_no_command(word):
    code = f"import sys; sys.argv[1:] = [{word!r}]; from palimpsest.__main__ import main\n"
    code += "try: main()\nexcept SystemExit: print(*sys.modules, file=sys.stderr)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    loaded = set(run.stderr.split())
    assert "palimpsest.commands" in loaded
    assert not loaded & {*COMMANDS.values(), "numpy", "fsspec"}
