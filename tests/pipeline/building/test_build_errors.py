"""A user's mistake gives one line on stderr, exit code 2 and no file that a later run trusts."""

import http.server
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.reading import sources
from tasks.terminal.command_line import UserError
from tests.support import in_process
from tests.support.parameters import slow_unless
from tests.support.processes import started

TASK = "python_docs_span_corruption"


@pytest.fixture
def refused(start, flags, tmp_path):
    """Returns a function that runs the command, checks its failure, and returns the error line.

    It runs in a process of its own if `alone` or if it needs an environment.
    """

    def run(
        *more: str, cache_dir=None, finished_shards=False, alone=False, **environment: str
    ) -> str:
        folder = cache_dir or tmp_path / "cache"
        if alone or environment:
            process = start(folder, *more, **environment)
            out, err = process.communicate(timeout=120)
            code = process.returncode
        else:
            done = in_process.run("pipeline.build", *flags(folder, *more))
            out, err, code = done.stdout, done.stderr, done.returncode
        assert code == 2, (out, err)
        (line,) = [line for line in err.splitlines() if not line.startswith("building ")]
        assert line.startswith("python -m pipeline.build: error: ")
        assert "Traceback" not in out
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


def test_unknown_flag(refused):
    assert "unknown flag --worker_count (did you mean" in refused("--worker_count=2", alone=True)


def test_unknown_task(refused):
    line = refused("--task=rlm_span_corruptio")
    assert "did you mean rlm_span_corruption?" in line


def test_missing_column(refused, parquet):
    line = refused(f"{parquet[1]}&column=body")
    assert "no column body" in line
    assert "it has text" in line


def test_no_files(refused, tmp_path):
    assert "no file matches" in refused(f"--corpus=text:{tmp_path}/nothing*.txt")


def test_empty_corpus(refused, tmp_path):
    (tmp_path / "blank.jsonl").write_text('{"text": ""}\n{"text": "  "}\n')
    line = refused(f"--corpus=json:{tmp_path}/blank.jsonl?validation=0", finished_shards=True)
    assert "empty corpus" in line


def test_not_parquet(refused, tmp_path):
    (tmp_path / "text.parquet").write_text("this is no parquet file, though it says so")
    assert "cannot be read" in refused(f"--corpus=parquet:{tmp_path}/text.parquet")


@pytest.mark.parametrize("workers", slow_unless({1}, [1, 2]))
def test_parquet_damaged_inside(refused, parquet, workers, tmp_path):
    path, corpus = parquet
    data = bytearray(path.read_bytes())
    begin = pq.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    data[begin + 100 : begin + 2000] = bytes(1900)
    path.write_bytes(data)
    line = refused(corpus, f"--workers={workers}", finished_shards=True, alone=workers == 2)
    assert f"{path} cannot be read" in line


def test_vocabulary_without_sentinels(refused):
    line = refused("--extra_ids=0")
    assert "needs up to 28 sentinels" in line
    assert "has 0" in line


def test_no_vocabulary(refused, tmp_path):
    assert "no vocabulary at" in refused(f"--vocabulary={tmp_path}/none")


def test_a_file_in_place_of_the_folder(refused, tmp_path):
    (tmp_path / "file").touch()
    line = refused(cache_dir=tmp_path / "file")
    assert f"{tmp_path}/file" in line


@pytest.mark.parametrize("runner", ["DirectRunner", "PrismRunner", "DaskRunner"])
def test_unsafe_runners(refused, runner):
    assert f"--runner={runner} is refused" in refused(f"--runner={runner}")


def test_multi_threading(refused):
    assert "loses elements silently" in refused("--direct_running_mode=multi_threading")


def test_too_many_bad_documents(refused, tmp_path, build):
    lines = [json.dumps({"text": None if n % 3 == 0 else "good"}) for n in range(90)]
    (tmp_path / "bad.jsonl").write_text("\n".join(lines))
    corpus = f"--corpus=json:{tmp_path}/bad.jsonl?validation=0"
    line = refused(corpus, finished_shards=True)
    assert "33.3% of the documents are faulty (30 null)" in line
    build(tmp_path / "cache", corpus, "--max_quarantined=0.4")


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


def test_private_corpus_without_token(refused):
    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(401)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        line = refused(
            "--task=rlm_span_corruption",
            "--corpus=hf:dumitrescustefan/rlm",
            HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}",
            HF_TOKEN="",
            HF_HUB_DISABLE_IMPLICIT_TOKEN="1",
        )
    finally:
        server.shutdown()
    assert "--corpus" in line
    assert "dumitrescustefan/rlm" in line


@pytest.mark.processes
def test_interrupted(start, tmp_path):
    process = start(tmp_path)
    while not list(tmp_path.glob("*/.partial-*.tfrecord-*")):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    (line,) = [line for line in err.splitlines() if not line.startswith("building ")]
    assert line == "python -m pipeline.build: interrupted; run the same command to resume"


def test_a_bug_keeps_its_traceback(flags, tmp_path):
    program = (
        "import sys, tasks.reading.sources; from pipeline.build import main;"
        "tasks.reading.sources.read = lambda *_: 1 / 0; main(sys.argv[1:])"
    )
    done = started("-c", program, *flags(tmp_path), cwd=pathlib.Path(__file__).parents[3])
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize("form", ["text", "json", "parquet"])
@pytest.mark.parametrize("change", ["cut short", "written again", "gone"])
def test_a_file_that_changes_while_it_is_read(tmp_path, form, change):
    """Otherwise documents after the end of the shorter file would silently be missing."""
    path = tmp_path / f"corpus.{form}"
    texts = [f"document {n} {os.urandom(300).hex()}" for n in range(3000)]
    if form == "parquet":
        pq.write_table(pa.table({"text": texts}), path, row_group_size=3000)
    else:
        lines = [json.dumps({"text": text}) if form == "json" else text for text in texts]
        path.write_text("\n".join(lines))
    corpus = sources.resolve(sources.parse(f"{form}:{path}?validation=0"))
    batches = sources.read(corpus, corpus.pieces[-1], batch_documents=10)
    next(batches)
    if change == "cut short":
        os.truncate(path, path.stat().st_size - 100)
    elif change == "written again":
        os.utime(path, ns=(1, 1))
    else:
        path.unlink()
    with pytest.raises(UserError, match=re.escape(str(path))):
        list(batches)
