"""A file that is written again while it is read never gives documents to the old file's plan."""

import os

import pytest

from tasks.reading import opening, sources
from tasks.terminal.command_line import UserError
from tests.support.corpora import encoded, known

OLD, NEW = "old text\n" * 50_000, "new text\n" * 50_000


def in_place(path, text):
    path.write_text(text)


def by_rename(path, text):
    (path.parent / "aside").write_text(text)
    os.replace(path.parent / "aside", path)


def rewrite(path, how, text, state=None):
    """Writes a file as `rsync --times` does, which sets back the time of writing."""
    state = state or path.stat()
    how(path, text)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


@pytest.fixture
def path(tmp_path):
    (tmp_path / "a.txt").write_text(OLD)
    return tmp_path / "a.txt"


def resolved(path, document="line"):
    return sources.resolve(sources.parse(f"text:{path}?document={document}&validation=0"))


def texts(corpus, pieces=None):
    for piece in pieces or corpus.pieces:
        for _, batch in sources.read(corpus, piece, 1000):
            yield from batch.column("text").to_pylist()


@pytest.mark.parametrize("how", [in_place, by_rename])
def test_a_file_written_again_with_its_old_time_is_not_read(path, how):
    corpus = resolved(path)
    rewrite(path, how, NEW)
    with pytest.raises(UserError, match=r"a\.txt was written again since the corpus was listed"):
        next(texts(corpus))


@pytest.mark.parametrize("how", [in_place, by_rename])
def test_a_piece_during_which_a_file_is_written_again_fails(path, how):
    corpus = resolved(path)
    found = texts(corpus)
    next(found)
    state = path.stat()
    rewrite(path, how, NEW)
    with pytest.raises(UserError, match="was written again"):
        list(found)
    rewrite(path, how, OLD, state)
    assert set(texts(corpus)) == {"old text"}  # its checksum is the plan's


def test_a_file_written_again_and_given_back_during_a_piece_fails(path):
    found = texts(resolved(path))
    next(found)
    rewrite(path, in_place, NEW)
    rewrite(path, in_place, OLD)
    with pytest.raises(UserError, match="was written again"):
        list(found)


def test_a_copy_elsewhere_and_new_permissions_are_the_same_file(path, monkeypatch):
    """Another machine has its own inodes; each process computes the checksum once per file."""
    corpus = resolved(path)
    rewrite(path, by_rename, OLD)
    path.chmod(0o600)
    read = []
    usual = opening.files.sha256
    monkeypatch.setattr(opening.files, "sha256", lambda each: read.append(each) or usual(each))
    assert len(list(texts(corpus))) == 50_000
    assert read == [str(path)]
    assert len(corpus.pieces) == 7


def test_a_file_written_again_while_it_is_listed_is_named(path, monkeypatch):
    usual = opening.files.sha256

    def slow(each):
        digest = usual(each)
        rewrite(path, in_place, NEW)
        return digest

    monkeypatch.setattr("tasks.reading.listers.files.sha256", slow)
    with pytest.raises(UserError, match="was written again"):
        resolved(path)


@pytest.mark.parametrize("form", known("json", "parquet", "arrow", "csv"))
def test_every_format_notices(tmp_path, form):
    rows = [{"id": f"{n}", "text": "old text"} for n in range(2000)]
    path = tmp_path / "a"
    path.write_bytes(encoded(form, rows))
    corpus = sources.resolve(sources.parse(f"{form}:{path}?validation=0"))
    assert set(texts(corpus)) == {"old text"}
    found = texts(corpus)
    next(found)
    state = path.stat()
    path.write_bytes(path.read_bytes().replace(b"old", b"new"))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    with pytest.raises(UserError, match=r"was written again|is corrupt|cannot be read"):
        list(found)
    with pytest.raises(UserError, match="was written again"):
        list(texts(corpus))
