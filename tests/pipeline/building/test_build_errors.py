"""A user's mistake gives one line on stderr, exit code 2 and no file that a later run trusts."""

import json
import os
import shutil
import subprocess

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.reading import sources
from tests.support import in_process
from tests.support.parameters import slow_unless

TASK = "python_docs_span_corruption"


@pytest.fixture
def refused(flags, tmp_path):
    """Returns a function that runs the command, checks its failure, and returns the error line."""

    def run(*more: str, cache_dir=None, finished_shards=False) -> str:
        folder = cache_dir or tmp_path / "cache"
        done = in_process.run("pipeline.build", *flags(folder, *more))
        assert done.returncode == 2, (done.stdout, done.stderr)
        (line,) = [line for line in done.stderr.splitlines() if not line.startswith("building ")]
        assert line.startswith("python -m pipeline.build: error: ")
        assert "Traceback" not in done.stdout
        for name in ("manifest.json", "COMPLETED"):
            assert not (folder / TASK / name).exists()
        if not finished_shards:
            assert not list(folder.glob("*/*.receipt-*"))
        return line

    return run


@pytest.fixture
def parquet(tmp_path):
    """Returns (path, spec) of a file with four row groups of text that hardly compresses."""
    texts = [f"document {n} says {os.urandom(200).hex()}" for n in range(1000)]
    path = tmp_path / "corpus.parquet"
    pq.write_table(pa.table({"text": texts}), path, row_group_size=250, compression="zstd")
    return path, f"--corpus=parquet:{path}?validation=0"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--worker_count=2"], "unknown flag --worker_count (did you mean"),
        (["--task=rlm_span_corruptio"], "did you mean rlm_span_corruption?"),
        (["--corpus=json:FOLDER/a.jsonl?column=body"], "no column body; it has text"),
        (["--corpus=text:FOLDER/nothing*.txt"], "no file matches"),
        (["--corpus=parquet:FOLDER/a.jsonl"], "cannot be read"),
        (["--extra_ids=0"], "needs up to 28 sentinels"),
        (["--vocabulary=FOLDER/none"], "no vocabulary at"),
        (["--runner=PrismRunner"], "unknown --runner=PrismRunner: it is "),
        (["--runner=slurm"], "on Slurm, give each task of an array --part=K/N"),
        (["--task=seqio:mine"], "seqio_cache_tasks, then adopt its folder"),
        (["--task=span_coruption"], "did you mean span_corruption?"),
        (["--corpus=text:FOLDER/a.tar::b.txt"], "of an archive, all files are read"),
        (["--corpus=text:gs://bucket/a.tar::b.txt"], "chains of URLs are not read"),
    ],
)
def test_a_mistake_is_named(refused, tmp_path, given, says):
    (tmp_path / "a.jsonl").write_text('{"text": "words"}\n')
    assert says in refused(*(flag.replace("FOLDER", str(tmp_path)) for flag in given))


def test_empty_corpus(refused, tmp_path):
    (tmp_path / "blank.jsonl").write_text('{"text": ""}\n{"text": "  "}\n')
    line = refused(f"--corpus=json:{tmp_path}/blank.jsonl?validation=0", finished_shards=True)
    assert "empty corpus" in line


@pytest.mark.parametrize("workers", slow_unless({1}, [1, 2]))
def test_parquet_damaged_inside(refused, parquet, workers, tmp_path):
    path, corpus = parquet
    data = bytearray(path.read_bytes())
    begin = pq.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    data[begin + 100 : begin + 2000] = bytes(1900)
    path.write_bytes(data)
    line = refused(corpus, f"--workers={workers}", finished_shards=True)
    assert f"{path} cannot be read" in line


def test_a_file_in_place_of_the_folder(refused, tmp_path):
    (tmp_path / "file").touch()
    line = refused(cache_dir=tmp_path / "file")
    assert f"{tmp_path}/file" in line


def test_all_reasons_of_faulty_documents_are_named(refused, tmp_path):
    lines = [b'{"text": "good"}'] * 3 + [b'{"text": " "}'] * 9
    lines += [b"{", b'{"text": null}', b'{"text": 5}', b'{"id": 5}', b'{"text": "\xff"}', b"{"]
    (tmp_path / "bad.jsonl").write_bytes(b"\n".join(lines))
    line = refused(f"--corpus=json:{tmp_path}/bad.jsonl?validation=0", finished_shards=True)
    share, _, reasons = line.partition(" of the documents are faulty (")
    assert share.endswith("66.7%")
    assert sorted(reasons.partition("), more")[0].split(", ")) == sorted(
        ["2 invalid JSON", "1 null", "1 not a string", "1 missing column", "1 invalid UTF-8"]
    )


def test_raising_the_limit_keeps_finished_shards(refused, tmp_path, build, capsys):
    lines = [json.dumps({"text": None if n % 3 == 0 else "good " * 200}) for n in range(1500)]
    (tmp_path / "bad.jsonl").write_text("\n".join(lines))
    corpus = f"--corpus=json:{tmp_path}/bad.jsonl?validation=0"
    refused(corpus, finished_shards=True)
    folder = tmp_path / "cache" / TASK
    finished = {
        path.name.replace("receipt", "tfrecord").removesuffix(".json")
        for path in folder.glob("*.receipt-*")
    }
    before = {name: (folder / name).stat().st_ino for name in finished}
    assert before
    capsys.readouterr()
    build(tmp_path / "cache", corpus, "--max_quarantined=0.4")
    out = capsys.readouterr().out
    assert f"kept {len(before)} finished pieces" in out or "read 0.0 MB" in out
    assert before == {name: (folder / name).stat().st_ino for name in finished}


@pytest.fixture
def mounted(tmp_path):
    """Returns a function that mounts a small file system; skips if that is not permitted."""
    folders = []

    def mount(options: str):
        folder = tmp_path / "mounted"
        folder.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting takes root")
        folders.append(folder)
        return folder

    yield mount
    for folder in folders:
        subprocess.run(["umount", str(folder)], check=True)


def test_full_disk(refused, mounted):
    folder = mounted("size=600k")
    line = refused(cache_dir=folder, finished_shards=True)
    assert "the disk is full" in line
    assert not list(folder.glob("*/.partial-*"))


def test_read_only_disk(refused, mounted):
    line = refused(cache_dir=mounted("size=1m,ro"))
    assert "read-only" in line


def test_folder_without_write_permission(refused, tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o500)
    assert "permission denied" in refused()


def test_a_bug_keeps_its_traceback(flags, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "read", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        in_process.run("pipeline.build", *flags(tmp_path))
