"""Compiled code that is missing or damaged is an error in one line."""

import pytest

from pipeline.native import build, library
from tasks.terminal.command_line import UserError


def test_code_that_is_missing_or_damaged(tmp_path, monkeypatch):
    system, processor = build.machine()
    levels = build.LEVELS.get(processor, (build.ANY,))
    names = [build.file_name(system, processor, level) for level in levels]
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setattr(
        build, "file_name", lambda system, processor, level: names[levels.index(level)]
    )
    with pytest.raises(UserError, match=f"{tmp_path} has no compiled code for {system}"):
        library.path.__wrapped__()
    for name in names:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match=f"{names[-1]} cannot be loaded.* delete it"):
        library.path.__wrapped__()
