"""Files in a bucket: complete or absent despite faults, and one-line errors."""

import dataclasses
import hashlib
import random

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tasks.reading import sources
from tasks.storage import files
from tasks.storage.retries import Unreachable
from tasks.terminal.command_line import UserError
from tests.support.processes import started
from tests.support.servers.gcs import FAULTS, GcsServer

FOLDER = "gs://bucket/folder"


@pytest.mark.google
def test_files_are_written_and_removed_despite_faults(in_bucket, tmp_path):
    chance = random.Random(5)
    # gcsfs would cut a small file at its multipart boundary.
    contents = [b"", b"one\r", b"a\n--==0==\nb", chance.randbytes(6 << 20)]
    with GcsServer(faults=0.25, seed=1) as gcs:
        in_bucket(gcs)
        for number, data in enumerate(contents):
            path = f"{FOLDER}/sub/{number}"
            assert not files.exists(path)
            files.write_bytes(path, data)
            assert files.exists(path)
            assert files.size(path) == len(data)
            assert files.read_bytes(path) == data
            with files.open_read(path) as file:
                assert file.seek(3) == 3
                assert file.read() == data[3:]
            files.copy(path, f"{FOLDER}/copy")
            assert gcs.read("folder/copy") == data
            files.rename(path, f"{FOLDER}/renamed")
            assert gcs.names() == ["folder/copy", "folder/renamed"]
            files.remove(f"{FOLDER}/renamed")
            files.remove(f"{FOLDER}/renamed")
        assert files.list_names(FOLDER) == ["copy"]
        assert files.list_names(f"{FOLDER}/none") == []
        with pytest.raises(FileNotFoundError):
            files.read_bytes(f"{FOLDER}/none")
        with pytest.raises(FileNotFoundError):
            files.open_read(FOLDER)
        assert set(gcs.counts()) == {"", *FAULTS}


@pytest.mark.google
def test_the_object_of_a_folder_is_not_listed_in_it(gcs):
    gcs.store.put("bucket", "folder/", b"", {}, {})
    assert files.list_names(FOLDER) == []
    files.write_bytes(f"{FOLDER}/a", b"")
    assert files.list_names(FOLDER) == ["a"]
    files.write_bytes(f"{FOLDER}2/b/c", b"c")
    assert files.list_tree(f"{FOLDER}2/") == {"b/c": 1}
    files.remove_all(FOLDER)
    assert gcs.names() == ["folder2/b/c"]
    files.remove_all(f"{FOLDER}2/b/c")
    files.remove_all(FOLDER)
    assert gcs.names() == []
    assert files.list_tree(FOLDER) == {}


@pytest.mark.google
def test_an_unfinished_file_is_not_visible(gcs):
    def fail():
        with files.atomic_write(f"{FOLDER}/a") as file:
            file.write(bytes(6 << 20))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert gcs.names() == []


@pytest.mark.google
def test_files_of_other_writers_are_visible_at_once(gcs):
    files.write_bytes(f"{FOLDER}/a", b"1")
    assert files.list_names(FOLDER) == ["a"]
    gcs.store.put("bucket", "folder/b", b"2", {}, {})
    assert files.list_names(FOLDER) == ["a", "b"]
    assert files.exists(f"{FOLDER}/b")


@pytest.mark.google
def test_a_file_that_changes_while_it_is_read_is_an_error(gcs):
    files.write_bytes(f"{FOLDER}/a", bytes(10 << 20))
    with files.open_read(f"{FOLDER}/a") as file:
        assert file.read(1) == b"\0"
        gcs.store.put("bucket", "folder/a", bytes(9 << 20), {}, {})
        gcs.faults = 1.0
        gcs.fault = lambda: "500" if len(gcs.requests) % 20 else ""
        file.seek(9 << 20)
        with pytest.raises(UserError, match=r"folder/a has changed .*had 10,485,760 bytes"):
            file.read()


@pytest.mark.google
@pytest.mark.parametrize(
    ("server", "bucket", "message"),
    [
        ({}, "none", "there is no bucket none: make it with"),
        ({"denied": ["bucket"]}, "bucket", "permission denied .*role storage.objectUser"),
        ({"needs_token": True}, "bucket", "no credentials, or expired ones: run `gcloud auth"),
    ],
)
@pytest.mark.parametrize(
    "act",
    [
        files.exists,
        files.read_bytes,
        files.list_names,
        files.open_read,
        lambda path: files.write_bytes(path, b"x"),
        lambda path: files.write_bytes(path, bytes(6 << 20)),
        lambda path: sources.resolve(sources.parse(f"text:{path}/*.txt")),
    ],
)
def test_a_permanent_error_says_what_to_do(in_bucket, act, server, bucket, message):
    with GcsServer(**server) as gcs:
        in_bucket(gcs)
        with pytest.raises(Unreachable, match=message):
            act(f"gs://{bucket}/folder/file")
        assert gcs.names() == []


@pytest.mark.google
def test_an_unreachable_store_is_retried_and_then_named(in_bucket, monkeypatch):
    monkeypatch.setenv("PALIMPSEST_RETRY_SECONDS", "0")
    with GcsServer(faults=1.0) as gcs:
        in_bucket(gcs)
        with pytest.raises(UserError, match=r"gs://bucket/folder/a cannot be reached"):
            files.exists(f"{FOLDER}/a")
    assert len(gcs.requests) > 5


def test_without_gcsfs_a_command_says_what_to_install():
    code = (
        "import runpy, sys; sys.modules['gcsfs'] = None; sys.argv[1:] = ['--cache=gs://bucket/a']\n"
        "runpy.run_module('pipeline.verify', run_name='__main__', alter_sys=True)"
    )
    done = started("-c", code)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "[gcp]'" in done.stderr


@pytest.mark.google
def test_a_corpus_in_a_bucket_is_known_by_its_checksums(gcs):
    for number in range(2):
        files.write_bytes(f"{FOLDER}/{number}.txt", b"one\ntwo\n")
    corpus = sources.resolve(sources.parse(f"text:{FOLDER}/*.txt?validation=0"))
    texts = [
        text
        for piece in corpus.pieces
        for _, batch in sources.read(corpus, piece)
        for text in batch.column("text").to_pylist()
    ]
    assert texts == ["one", "two"] * 2
    again = sources.parse(f"text:{FOLDER}/*.txt?validation=0")
    files.write_bytes(f"{FOLDER}/0.txt", b"one\ntwo\n")  # another object of the same bytes
    assert sources.resolve(again).record == corpus.record
    files.write_bytes(f"{FOLDER}/0.txt", b"one\nTWO\n")
    assert sources.resolve(again).record != corpus.record
    with pytest.raises(UserError, match="has changed since the corpus was listed"):
        list(sources.read(corpus, corpus.pieces[0]))
    with pytest.raises(UserError, match=rf"{FOLDER} is a folder: name its files"):
        sources.resolve(sources.parse(f"text:{FOLDER}"))
    with pytest.raises(UserError, match="no file matches"):
        sources.resolve(sources.parse(f"text:{FOLDER}/*.json"))


def whole(corpus):
    """Returns the first piece of a corpus of one file, as large as the file."""
    (piece, *_) = corpus.pieces
    (part,) = piece.parts
    return dataclasses.replace(piece, parts=(dataclasses.replace(part, stop=part.file.bytes),))


@pytest.mark.google
def test_an_object_that_is_overwritten_while_it_is_read(gcs):
    """It would else be read half and half, as it keeps its size."""
    old, new = (
        b"".join(b"%s %0100d\n" % (word, n) for n in range(200_000)) for word in (b"a", b"b")
    )
    gcs.store.put("bucket", "folder/a.txt", old, {}, {})
    corpus = sources.resolve(sources.parse(f"text:{FOLDER}/a.txt?validation=0"))
    batches = sources.read(corpus, whole(corpus), batch_documents=1024)
    next(batches)
    gcs.store.put("bucket", "folder/a.txt", old, {}, {})  # the same bytes again
    assert sum(batch.num_rows for _, batch in batches) == 200_000 - 1024

    batches = sources.read(corpus, whole(corpus), batch_documents=1024)
    next(batches)
    gcs.store.put("bucket", "folder/a.txt", new, {}, {})
    with pytest.raises(UserError, match="has changed since the corpus was listed"):
        list(batches)


class _Tagged(MemoryFileSystem):
    """A store with etags and without generations, as S3."""

    protocol = "tagged"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("tagged://", "memory://"))

    def info(self, path, **options):
        found = super().info(path, **options)
        if found["type"] == "file":
            found["ETag"] = hashlib.md5(self.cat_file(path)).hexdigest()
        return found


def test_a_file_of_a_store_without_generations_is_compared_after_every_range():
    fsspec.register_implementation("tagged", _Tagged, clobber=True)
    fs = fsspec.filesystem("tagged")
    fs.pipe("/overwritten/a.txt", b"old\n" * 5_000_000)
    try:
        corpus = sources.resolve(sources.parse("text:tagged://overwritten/a.txt"))
        batches = sources.read(corpus, whole(corpus))
        next(batches)
        fs.pipe("/overwritten/a.txt", b"new\n" * 5_000_000)
        with pytest.raises(UserError, match="has changed since the corpus was listed"):
            list(batches)
    finally:
        fs.rm("/overwritten", recursive=True)
