"""Errors of engines in one line."""

import errno
import os
from types import SimpleNamespace

import pytest

from pipeline.building.options import Options
from pipeline.runners import engines, failures
from tasks.terminal.command_line import UserError


def test_this_machine_by_name():
    for name in ("FnApiRunner", "fnapi"):
        assert engines.chosen(Options("t", "v", "c", runner=name, workers=2)).is_local


def test_a_flag_of_another_engine(monkeypatch):
    def kind(flag):
        return SimpleNamespace(not_of=lambda given: [word for word in given if flag not in word])

    kinds = {"one": kind("address"), "other": kind("master")}
    monkeypatch.setattr(engines, "_kinds", lambda: kinds)
    options = Options("t", "v", "c", runner_flags=("--master=local", "--address=auto"))
    with pytest.raises(UserError, match="only --runner=other reads --master"):
        engines.chosen(options)


def test_errors_of_workers(tmp_path, monkeypatch):
    def full(piece):
        raise OSError(errno.ENOSPC, "No space left on device")

    def mistaken(piece):
        raise UserError('"it" is\nwrong')

    def run(work):
        with failures.job(True, lambda error: None):
            try:
                failures.Call(work, "/caches/task")(1)
            except failures.WorkerFailure as error:
                raise RuntimeError(f"of an engine: {error}\n\tat java") from None

    with pytest.raises(OSError, match="No space left") as error:
        run(full)
    assert (error.value.errno, error.value.filename) == (errno.ENOSPC, "/caches/task")
    with pytest.raises(UserError, match='"it" is wrong'):
        run(mistaken)
    # A worker's relative paths mean what they mean here.
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    call = failures.Call(lambda piece: {os.getcwd(): 1}, "")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert call(1) == {str(tmp_path): 1}
