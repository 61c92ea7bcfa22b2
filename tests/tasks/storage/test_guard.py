"""A guarded write never replaces or deletes what another writer has finished."""

import pytest

from tasks.storage import files, store
from tasks.storage.store import Store
from tasks.terminal.command_line import UserError

URL = "gs://bucket/x"
SMALL, LARGE = b"abc", bytes(6 << 20)  # in one request, and in blocks


def written(path, data, guard):
    with files.atomic_write(path, guard=guard) as file:
        file.write(data)


def test_local_files(tmp_path):
    asked = []
    guard = files.Guard(lambda: asked.append(1))
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    written(first, SMALL, guard)
    written(second, SMALL, guard)
    assert len(asked) == 2
    files.write_bytes(second, b"another writer's")
    guard.take_back()
    assert files.list_names(str(tmp_path)) == ["second"]
    guard.remove(second)
    guard.remove(second)  # there is none
    assert not files.exists(second)


def test_a_refused_write_leaves_nothing(tmp_path):
    def refuse():
        raise UserError("no")

    guard = files.Guard(refuse)
    files.write_bytes(str(tmp_path / "there"), SMALL)
    for act in (lambda path: written(path, b"", guard), guard.remove):
        with pytest.raises(UserError, match="no"):
            act(str(tmp_path / "there"))
    assert files.read_bytes(str(tmp_path / "there")) == SMALL
    assert files.list_names(str(tmp_path)) == ["there"]


@pytest.mark.google
@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("there", [True, False])
def test_an_object_that_changed_after_the_check_is_checked_again(gcs, data, there, monkeypatch):
    monkeypatch.setattr(store, "_BLOCK_BYTES", 1 << 20)
    checks = []

    def check():
        checks.append(1)
        if len(checks) == 1:
            files.write_bytes(URL, b"another writer's")

    if there:
        files.write_bytes(URL, b"before")
    guard = files.Guard(check)
    written(URL, data, guard)
    assert len(checks) == 2
    assert files.read_bytes(URL) == data
    guard.take_back()
    assert not files.exists(URL)


@pytest.mark.google
def test_an_object_of_another_writer_stays(gcs):
    def overtaken():
        files.write_bytes(URL, b"another writer's")
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        written(URL, SMALL, files.Guard(overtaken))
    guard = files.Guard(lambda: None)
    written(URL, SMALL, guard)
    files.write_bytes(URL, b"another writer's")
    guard.take_back()
    assert files.read_bytes(URL) == b"another writer's"
    generation = files.generation(URL)
    Store(URL).remove(str(int(generation) - 1))
    assert files.exists(URL)
    guard.remove(URL)
    assert not files.exists(URL)


@pytest.mark.google
def test_the_same_bytes_of_another_writer_stay(gcs):
    guard = files.Guard(lambda: files.write_bytes(URL, SMALL))
    written(URL, SMALL, guard)
    guard.take_back()
    assert files.read_bytes(URL) == SMALL
