"""The user's cache folder is the specification's, and what we keep there is bounded."""

import os

from tasks.storage import user_cache


def test_the_folder_is_that_of_the_specification(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert user_cache.folder("xla") == tmp_path / ".cache" / "palimpsest" / "xla"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert user_cache.folder() == tmp_path / "other" / "palimpsest"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored
    assert user_cache.folder() == tmp_path / ".cache" / "palimpsest"


def test_what_was_used_longest_ago_is_removed(tmp_path):
    for age, name in enumerate(("new", "used", "old")):
        (tmp_path / f"{name}.npz").write_bytes(bytes(100))
        os.utime(tmp_path / f"{name}.npz", (1000 - age, 1000 - age))
    os.utime(tmp_path / "old.npz", (2000, 0))  # read since
    (tmp_path / "other.txt").write_bytes(bytes(1000))
    user_cache.remove_oldest(tmp_path, "*.npz", 250)
    assert {path.name for path in tmp_path.iterdir()} == {"new.npz", "old.npz", "other.txt"}
    user_cache.remove_oldest(tmp_path / "none", "*", 1)  # no such folder
