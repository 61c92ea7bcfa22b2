"""`palimpsest pretrain --corpus`: a build and a run that follows it, by one command."""

import pathlib
import signal
import sys
import time

import pytest

from palimpsest.annexes.recipes import from_corpus
from tests.support.processes import launched, started
from tests.trainer.conftest import assert_one_line
from trainer.checkpoints import metadata

TEXTS = [f"line {n} of a text about {n % 7} boats and {n % 5} seas" for n in range(400)]
RUN = ("--preset=t5_1_1_tiny", "--batch_size=8", "--train_steps=6", "--lengths.inputs", "32")
BUILD = ("--name=mine", "--task=span_corruption", "--vocabulary=bytes", "--extra_ids=100")


@pytest.fixture
def words(tmp_path):
    (tmp_path / "corpus.txt").write_text("\n".join(TEXTS))
    return [f"--corpus=text:{tmp_path}/corpus.txt", *BUILD, *RUN, "--lengths.targets=16"]


def placed(folder: pathlib.Path):
    return [f"--cache_dir={folder / 'cache'}", "--model_dir", str(folder / "model")]


def made_in(folder):
    """Returns the bytes of a cache's files and the checksums of the last checkpoint's arrays."""
    cache = folder / "cache" / "mine_span_corruption"
    files = {p.name: p.read_bytes() for p in cache.rglob("*") if p.is_file()}
    return files, metadata.newest(str(folder / "model"))[1][metadata.CHECKSUMS]


@pytest.mark.processes
def test_one_command_makes_what_two_make_and_survives_a_kill(tmp_path, words):
    one, two = tmp_path / "one", tmp_path / "two"
    command = ["-m", "palimpsest", "pretrain", *words]
    process = launched([sys.executable, *command, *placed(one)])
    time.sleep(4)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    done = started(*command, *placed(one))
    assert done.returncode == 0, done.stderr
    corpus, run = words[0], [*RUN, "--lengths.targets=16"]
    # The window of 32 inputs: 34 tokens.
    where = f"--cache_dir={two / 'cache'}"
    build = started("-m", "palimpsest", "build", corpus, *BUILD, "--row_tokens=34", where)
    assert build.returncode == 0, build.stderr
    task = "--task=mine_span_corruption"
    alone = started("-m", "palimpsest", "pretrain", task, *run, *placed(two), "--follow")
    assert alone.returncode == 0, alone.stderr
    assert made_in(one) == made_in(two)


@pytest.mark.processes
def test_the_run_stops_if_the_build_fails(tmp_path, words):
    corpus = f"--corpus=json:{tmp_path}/none.jsonl"
    done = started("-m", "palimpsest", "pretrain", corpus, *words[1:], *placed(tmp_path))
    assert done.returncode == 2
    assert "none.jsonl" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--train_stepz=3", "unknown flag --train_stepz (did you mean --train_steps?)"),
        ("--shard_bytez=3", "unknown flag --shard_bytez (did you mean --shard_bytes?)"),
        ("--preset=t5_1_1_tin", "t5_1_1_tiny"),
        ("--dry_run", "--dry_run is of builds alone"),
        ("--processes.count=2", "on every host"),
        ("--lengths.inputs=x", "--lengths.inputs=x"),
        ("--print_config=values", "--print_config: leave it out beside --corpus"),
        ("--follow=false", "--follow: leave it out beside --corpus"),
        ("--following.on", "--following.on: leave it out beside --corpus"),
    ],
)
def test_a_mistake_is_found_before_the_build(tmp_path, words, word, message, capsys):
    name = word.partition("=")[0]
    words.remove("32")
    words[words.index("--lengths.inputs")] += "=32"
    kept = [each for each in words if each.partition("=")[0] != name]
    with pytest.raises(SystemExit) as end:
        from_corpus.main.start([*kept, word, *placed(tmp_path)], "palimpsest pretrain")
    assert_one_line(end.value.code, capsys.readouterr().err, message)
    assert not (tmp_path / "cache").exists()


def test_values_with_the_names_of_flags_are_not_refused(tmp_path, words, monkeypatch):
    monkeypatch.setattr(from_corpus, "_started", lambda *_: None)
    monkeypatch.setattr(from_corpus, "_followed", lambda *_: 0)
    words.remove("--name=mine")
    words += ["--name", "part", "--dry_run=false", f"--cache_dir={tmp_path}/cache"]
    assert from_corpus.run(from_corpus.Flags(words=(*words, "--model_dir", "follow"))) == 0
