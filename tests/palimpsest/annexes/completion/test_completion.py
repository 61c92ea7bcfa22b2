"""Completion of commands, flags and choices."""

import shutil
import subprocess
import sys

import pytest

from palimpsest.annexes.completion import completion
from tests.palimpsest.test_palimpsest import ROOT, ended


def test_a_shell_is_named(capsys):
    assert ended("completion") == 2
    assert "must be one of bash, zsh, fish" in capsys.readouterr().err
    assert ended("completion", "zsh") == 0
    assert "compdef" in capsys.readouterr().out


def test_candidates():
    assert completion.candidates("fish", "palimpsest pre") == ["pretrain "]
    assert "train " in completion.candidates("fish", "palimpsest vocab tr")
    assert completion.candidates("zsh", "palimpsest pretrain --model.dty") == ["--model.dtype="]
    assert completion.candidates("zsh", "palimpsest pretrain --model.dtype=b") == [
        "--model.dtype=bfloat16 "]  # fmt: skip
    assert completion.candidates("bash", "palimpsest pretrain --seed=1 --model.dtype=") == [
        "bfloat16 ", "float32 "]  # fmt: skip
    assert completion.candidates("zsh", "palimpsest build --cache-d") == ["--cache_dir="]
    assert completion.candidates("zsh", "palimpsest vo") == ["vocab "]
    assert completion.candidates("zsh", "palimpsest verify --he") == ["--help "]
    assert completion.candidates("bash", "palimpsest build --ver") == ["--verbose "]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_reads_its_script(shell):
    if not shutil.which(shell):
        pytest.skip(f"there is no {shell} here")
    run = subprocess.run(
        [shell, "-n"], input=completion.script(shell), capture_output=True, text=True
    )
    assert (run.returncode, run.stderr) == (0, "")


def test_bash_completes(tmp_path):
    program = tmp_path / "palimpsest"
    program.write_text(f'#!/bin/bash\ncd {ROOT} && exec {sys.executable} -m palimpsest "$@"\n')
    program.chmod(0o755)
    line = "palimpsest evaluate --st"
    code = f'{completion.script("bash")}\nCOMP_LINE="{line}" COMP_POINT={len(line)}\n_palimpsest\n'
    run = subprocess.run(
        ["bash", "-c", f'PATH={tmp_path}:$PATH\n{code}printf "<%s>" "${{COMPREPLY[@]}}"'],
        capture_output=True,
        text=True,
    )
    assert run.stdout == "<--steps=>", run.stderr
