"""Folders in which Orbax cannot write checkpoints are refused, wherever their letters stand."""

import pytest

from tasks.terminal.command_line import UserError
from trainer.checkpoints import metadata


@pytest.mark.parametrize("name", ["a[1]", "b]", "a*", "a?", "a\\b"])
def test_a_folder_with_letters_of_patterns_is_refused(name, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="checkpoints need a path without") as caught:
        metadata.check_folder(f"{name}/run", "--model_dir")
    assert str(caught.value).startswith(f"--model_dir={name}/run: ")
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    with pytest.raises(UserError) as caught:
        metadata.check_folder("run", "--output")
    assert str(caught.value).startswith(f"--output=run, which is {tmp_path}/{name}/run: ")
    metadata.check_folder(str(tmp_path / "run"), "--output")
    metadata.check_folder("gs://bucket/run", "--output")
