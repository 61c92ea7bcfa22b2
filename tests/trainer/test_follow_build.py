"""Runs that follow a real build, with SIGKILLs of the build, of the run and of both."""

import argparse
import os
import random
import subprocess
import sys
import time

import pytest

from tasks.terminal.process_group import ProcessGroup
from tests.gcs_server import GcsServer
from tests.trainer.conftest import command
from trainer import chaos

TASK, STEPS, SECONDS = "rlm_span_corruption", 60, 300


@pytest.fixture(scope="module")
def corpus(text_cache, tmp_path_factory):
    """A text corpus of 24 shards of each split."""
    folder = tmp_path_factory.mktemp("corpus")
    words = (text_cache.parents[1] / "train.txt").read_text().split()
    generator = random.Random(1)
    with (folder / "a.txt").open("w") as file:
        for _ in range(9000):
            begin = generator.randrange(len(words) - 40)
            file.write(" ".join(words[begin : begin + generator.randrange(5, 40)]) + "\n")
    return folder / "a.txt"


class Pair:
    """A build and a run that follows it, each in processes of its own."""

    def __init__(self, corpus, vocabulary, folder):
        self.cache, self.folder = folder / "cache", folder
        self._build = [
            *(sys.executable, "-m", "pipeline.build", f"--task={TASK}", f"--corpus=text:{corpus}"),
            *(f"--vocabulary={vocabulary}", f"--cache_dir={self.cache}", "--row_tokens=100"),
            f"--shard_bytes={corpus.stat().st_size // 24 + 1}",
        ]
        flags = argparse.Namespace(
            preset="t5_1_1_tiny", task=TASK, cache_dir=str(self.cache), steps=STEPS
        )
        settings = ["--follow", "--data.follow_shards=2", "--batch_size=32"]
        self.run = chaos.Subject(flags, settings, folder / "model")

    def build(self):
        self.builder = ProcessGroup(self._build, self.folder / "build.log")

    def finish_build(self):
        self.builder.wait(SECONDS)
        assert self.builder.exit_code == 0, self.builder.output()

    def receipts(self):
        return len(list((self.cache / TASK).glob("train.receipt-*")))

    def steps(self):
        return max((line["step"] for line in self.run.lines()), default=0)

    def wait(self, condition):
        end = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < end, self.run.process.output()
            time.sleep(0.01)


@pytest.fixture(scope="module")
def finished(corpus, text_cache, tmp_path_factory):
    """The same run on the finished cache."""
    pair = Pair(corpus, text_cache.parents[1] / "vocabulary", tmp_path_factory.mktemp("finished"))
    pair.build()
    pair.finish_build()
    pair.run.start()
    pair.run.finish()
    assert "waiting" not in pair.run.process.output()
    return pair


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["nothing", "build", "run", "both"])
def test_a_followed_run_equals_the_run_on_the_finished_cache(
    killed, finished, corpus, text_cache, tmp_path
):
    pair = Pair(corpus, text_cache.parents[1] / "vocabulary", tmp_path)
    pair.run.start()  # before there is a plan
    pair.wait(lambda: "waiting for the plan of" in pair.run.process.output())
    pair.build()
    if killed in ("build", "both"):
        pair.wait(lambda: pair.receipts() >= 3)
        pair.builder.kill()
        assert pair.receipts() < 24
        resume = f"python -m pipeline.build --task={TASK} --cache_dir={pair.cache} …"
        pair.wait(lambda: resume in pair.run.process.output())
    if killed == "run":
        pair.wait(lambda: pair.run.checkpoint() > 0)
    if killed in ("run", "both"):
        pair.run.process.kill()
        pair.run.start()
    if killed in ("build", "both"):
        pair.build()
    pair.finish_build()
    pair.run.finish()
    assert chaos.differences(finished.run, pair.run, STEPS) == []


@pytest.mark.slow
def test_a_run_in_a_bucket_follows_a_build_there(finished, corpus, text_cache, tmp_path):
    with GcsServer(faults=0.02, seed=3) as gcs:
        pair = Pair(corpus, text_cache.parents[1] / "vocabulary", tmp_path)
        env = os.environ | gcs.environment()
        cache = "--cache_dir=gs://bucket/cache"
        pair.run.start(cache, env=env)
        built = subprocess.run([*pair._build, cache], env=env, capture_output=True, text=True)
        assert built.returncode == 0, built.stderr
        pair.run.finish()
    assert "waiting for the plan of gs://bucket/cache" in pair.run.process.output()
    assert chaos.differences(finished.run, pair.run, STEPS) == []


@pytest.mark.slow
def test_a_followed_run_is_explained_and_evaluated(finished):
    shown = command("trainer.explain", f"--model_dir={finished.run.folder}", "--step=1", "--row=0")
    assert shown.returncode == 0, shown.stderr
    shown = command("trainer.evaluate", f"--model_dir={finished.run.folder}")
    assert shown.returncode == 0, shown.stderr
