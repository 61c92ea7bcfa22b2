"""Runs that follow a real build, with SIGKILLs of the build, of the run and of both."""

import argparse
import os
import re
import shutil
import signal

import pytest
from pyarrow import parquet

from tests.laboratory.comparing import run_differences
from tests.laboratory.followed import Pair
from tests.laboratory.sample import sample
from tests.support.servers.gcs import GcsServer
from tests.trainer.conftest import assert_one_line, command, shard_bytes_of

pytestmark = pytest.mark.processes

TASK, STEPS, SHARDS = "rlm_span_corruption", 60, 24


@pytest.fixture(scope="session")
def make_pair(many_shards, text_cache):
    """Returns a function that makes a pair in a folder; `settings` are the run's."""
    pairs = []

    def made(folder, *settings, corpus=many_shards):
        flags = argparse.Namespace(
            task=TASK, preset="t5_1_1_tiny", steps=STEPS, corpus=f"text:{corpus}",
            vocabulary=text_cache.parents[1] / "vocabulary",
            shard_bytes=shard_bytes_of(many_shards),
        )  # fmt: skip
        settings = ["--batch_size=32", "--data.follow_shards=2", *settings]
        pairs.append(Pair(flags, settings, folder, ["--row_tokens=100"]))
        return pairs[-1]

    yield made
    for each in pairs:
        each.kill()


@pytest.fixture(scope="module")
def finished(make_pair, tmp_path_factory):
    """The same run on the finished cache."""
    pair = make_pair(tmp_path_factory.mktemp("finished"))
    pair.build.start()
    pair.build.finish()
    pair.run.start()
    pair.run.finish()
    assert "waiting" not in pair.run.output()
    assert pair.build.shards("train") == SHARDS
    return pair


@pytest.fixture
def pair(make_pair, tmp_path):
    return make_pair(tmp_path / "pair")


def killed_while_followed(pair, shards=2):
    """Starts both and kills the build with some shards finished; the run waits and says so."""
    pair.start()
    pair.wait_until(lambda: pair.build.shards("train") >= shards, "shards")
    pair.build.end(signal.SIGKILL)
    assert pair.build.shards("train") < SHARDS
    resume = f"python -m pipeline.build --task={TASK} --cache_dir={pair.build.cache.parent} …"
    pair.wait_until(lambda: resume in pair.run.output(), "the run to say so")


def build_again(pair, *flags):
    """Builds with further flags, to the end; returns what was printed."""
    pair.build.start(*flags)
    pair.build.finish()
    return pair.build.output()


def assert_stopped(pair, finished, *says):
    """Asserts that the run has ended with one line, its updates saved, those of the old plan.

    Returns:
      The last step.
    """
    assert_one_line(pair.run.wait().code, pair.run.output(), *says)
    step = pair.run.step()
    assert pair.run.checkpoint() == step > 0
    assert updates(pair) == updates(finished)[:step]
    # Nor does it go on with the other plan.
    pair.run.start()
    output = "the cache of rlm_span_corruption has changed", "another --model_dir"
    assert_one_line(pair.run.wait().code, pair.run.output(), *output)
    assert pair.run.step() == step
    return step


def updates(pair):
    """Returns the metrics of the updates."""
    return [line for line in pair.run.lines() if line["split"] == "train"]


def documents(cache, split, shard):
    """Returns the ids of the documents of a shard."""
    (path,) = cache.glob(f"{split}.documents-{shard:05d}-*")
    return parquet.read_table(path, columns=["id"]).column("id").to_pylist()


@pytest.mark.slow
def test_kills_of_builds_and_runs_leave_no_trace(text_cache, many_shards, tmp_path):
    words = (
        *("--task=rlm_span_corruption", "--kills=4", "--steps=60", f"--corpus=text:{many_shards}"),
        f"--shard_bytes={shard_bytes_of(many_shards)}",
        f"--vocabulary={text_cache.parents[1]}/vocabulary",
    )
    code, counts, output = sample(tmp_path, "followed", *words)
    assert code == 0, output
    assert counts["kills"] >= 4
    assert any("waiting for" in what for what in counts)


def test_a_build_that_fails_ends_the_trials(text_cache, tmp_path):
    words = ("--corpus=text:/nowhere.txt", f"--vocabulary={text_cache.parents[1]}/vocabulary")
    code, _, output = sample(tmp_path, "followed", *words)
    assert code == 2
    assert re.search("a build ended with 2: .*nowhere", output), output


@pytest.mark.google
@pytest.mark.slow
def test_a_run_in_a_bucket_follows_a_build_there(finished, pair):
    with GcsServer(faults=0.02, seed=3) as gcs:
        env = os.environ | gcs.environment()
        cache = "--cache_dir=gs://bucket/cache"
        pair.run.start(cache, env=env)
        pair.build.start(cache, env=env)
        pair.build.finish()
        pair.run.finish()
    assert "waiting for the plan of gs://bucket/cache" in pair.run.output()
    assert run_differences(finished.run.folder, pair.run.folder) == []


@pytest.mark.slow
def test_a_followed_run_is_explained_and_evaluated(finished):
    pytest.importorskip("trainer.annexes.comparing")
    shown = command(
        "trainer.annexes.comparing.explain",
        f"--model_dir={finished.run.folder}",
        "--step=1",
        "--row=0",
    )
    assert shown.returncode == 0, shown.stderr
    shown = command("trainer.evaluate", f"--model_dir={finished.run.folder}")
    assert shown.returncode == 0, shown.stderr


@pytest.mark.slow
def test_an_extension_under_a_waiting_run_is_named(finished, make_pair, many_shards, tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    shutil.copy(many_shards, corpus)
    pair = make_pair(tmp_path / "pair", corpus=f"{corpus}/*.txt")
    killed_while_followed(pair)
    shutil.copy(many_shards, corpus / "b.txt")
    build_again(pair, "--extend")
    assert_stopped(
        pair, finished,
        f"{pair.build.cache} now holds a cache with a different plan", "--extend added 1 file(s)",
        "train another --model_dir",
    )  # fmt: skip


@pytest.mark.slow
def test_a_changed_corpus_is_refused_and_the_run_goes_on(
    finished, make_pair, many_shards, tmp_path
):
    corpus = tmp_path / "a.txt"
    shutil.copy(many_shards, corpus)
    pair = make_pair(tmp_path / "pair", corpus=corpus)
    killed_while_followed(pair)
    with corpus.open("a") as file:
        file.write("one line more\n")
    pair.build.start()
    errors = "holds a cache of this corpus as it was before (1 changed: ", "restore the files"
    assert_one_line(pair.build.wait().code, pair.build.output(), *errors)
    assert pair.run.running
    shutil.copy(many_shards, corpus)
    build_again(pair)
    pair.run.finish()
    assert run_differences(finished.run.folder, pair.run.folder) == []


@pytest.mark.slow
@pytest.mark.parametrize(("split", "shard"), [("train", 4), ("validation", 0)])
def test_a_takedown_of_a_finished_cache_under_a_run_is_named(
    split, shard, finished, make_pair, tmp_path
):
    evaluated = 50
    pair = make_pair(tmp_path / "pair", f"--evaluation.every_steps={evaluated}")
    build_again(pair)
    pair.run.start()
    # Before the first evaluation, and with most shards not opened yet.
    pair.wait_until(lambda: pair.run.step() >= 2, "updates")
    pair.run.signal_group(signal.SIGSTOP)
    stopped = pair.run.step()
    ids, listed = tmp_path / "ids.txt", documents(pair.build.cache, split, shard)[:3]
    ids.write_text("\n".join(listed))
    build_again(pair, f"--exclude={ids}")
    pair.run.signal_group(signal.SIGCONT)
    step = assert_stopped(
        pair, finished, f"{pair.build.cache} now holds a cache with a different plan",
        "a takedown: ", f"with {len(listed)} entries", "train another --model_dir",
    )  # fmt: skip
    assert step == evaluated if split == "validation" else stopped < step < evaluated
