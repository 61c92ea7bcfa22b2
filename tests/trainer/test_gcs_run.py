"""A run from a bucket into a bucket is that of this machine, with TensorFlow or without."""

import os

import pytest

import trainer.pretrain
from tests.support.cases import rows
from tests.support.processes import started
from tests.support.runs import TASK, losses, pretrain, state
from tests.support.servers.gcs import GcsServer
from tests.support.trees import assert_equal as assert_equal_trees
from tests.trainer.conftest import assert_one_line, command, ended

pytestmark = [pytest.mark.google, pytest.mark.processes]

STEPS = 4
# As on a machine that does not have it; else nothing is different.
WITHOUT_TENSORFLOW = """
import runpy, sys
sys.modules["tensorflow"] = None
module, *sys.argv[1:] = sys.argv[1:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def flags(cache, model_dir, steps=STEPS):
    every = ("--checkpoint.every_steps=2", "--evaluation.every_steps=4")
    return pretrain(cache, model_dir, f"--train_steps={steps}", *every)[3:]


def run(gcs, *arguments, expected=0, **environment):
    """Runs a module's command, without TensorFlow unless the server has TLS."""
    start = ["-m"] if gcs.context else ["-c", WITHOUT_TENSORFLOW]
    done = started(
        *start, *arguments, env=os.environ | gcs.environment() | environment, timeout=500
    )
    assert done.returncode == expected, done.stderr
    return done


def assert_equal(model_dir, alone):
    expected, found = losses(alone), losses(model_dir)
    # A run of fewer steps was evaluated at its end, too.
    assert {place: found[place] for place in expected} == expected
    assert_equal_trees(state(model_dir, STEPS), state(alone, STEPS))


@pytest.fixture(scope="module")
def alone(text_cache, tmp_path_factory):
    """The model directory of a run of this machine."""
    model_dir = tmp_path_factory.mktemp("alone") / "model"
    assert trainer.pretrain.main(flags(text_cache, model_dir)) == 0
    return model_dir


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"denied": ["bucket"]}, "permission denied"),
        ({"needs_token": True}, "no credentials"),
        (None, "there is no bucket"),
    ],
)
def test_a_bucket_that_refuses_is_one_line(in_bucket, text_cache, capsys, server, message):
    with GcsServer(**server or {}) as gcs:
        in_bucket(gcs)
        bucket = "bucket" if server else "other"
        found = ended("trainer.pretrain", flags(text_cache, f"gs://{bucket}/model"), capsys)
    assert_one_line(*found, f"gs://{bucket}", message)


@pytest.mark.slow
@pytest.mark.parametrize("tensorflow", [True, False])
def test_a_run_goes_on_in_a_bucket_by_either_client(text_cache, alone, tmp_path, tensorflow):
    with GcsServer(tls=tmp_path / "tls" if tensorflow else None) as gcs:
        gcs.store.fill(text_cache, "cache")
        for steps in (2, STEPS):
            given = flags("gs://bucket/cache", "gs://bucket/model", steps)
            run(gcs, "trainer.pretrain", *given)
        shown = run(gcs, "trainer.evaluate", "--model_dir=gs://bucket/model", "--checkpoints=all")
    # TensorFlow's client makes objects for folders, gcsfs does not.
    assert any(name.endswith("/") for name in gcs.names("model/")) == tensorflow
    assert_equal(gcs.store.fetch("model", tmp_path), alone)
    done = command("trainer.evaluate", f"--model_dir={alone}", "--checkpoints=all")
    assert shown.stdout == done.stdout


@pytest.mark.slow
def test_the_whole_way_in_a_bucket_is_that_of_this_machine(text_cache, tmp_path):
    texts = text_cache.parents[1]
    with GcsServer(faults=0.05, seed=5) as gcs:
        for path in texts.glob("*.txt"):
            gcs.store.put("bucket", f"{path.name}", path.read_bytes(), {}, {})
        for at, corpus in ((str(tmp_path / "here"), texts), ("gs://bucket/there", "gs://bucket")):
            run(gcs, "vocab.train", f"--corpus=text:{corpus}/*.txt?split=train", "--vocab_size=600",
                f"--output={at}/vocabulary")  # fmt: skip
            build = [f"--task={TASK}", f"--vocabulary={at}/vocabulary", f"--cache_dir={at}/cache",
                     "--row_tokens=100"]  # fmt: skip
            run(gcs, "pipeline.build", f"--corpus=text:{corpus}/*.txt?split=train", *build)
            run(gcs, "pipeline.verify", f"--cache={at}/cache/{TASK}")
            for module, *more in rows("ON_CACHES"):
                more = [each.format(folder=tmp_path) for each in more]
                run(gcs, module, f"--cache={at}/cache/{TASK}", *more)
            run(gcs, "trainer.pretrain", *flags(f"{at}/cache", f"{at}/model"))
            run(gcs, "trainer.evaluate", f"--model_dir={at}/model", "--checkpoints=all")
            for module, *more in rows("ON_RUNS"):
                run(gcs, module, f"--model_dir={at}/model", *more)
    assert sum(count for fault, count in gcs.counts().items() if fault) > 4
    here, there = tmp_path / "here", gcs.store.fetch("there", tmp_path)
    boards = {path.parent.name for path in there.glob("model/tensorboard/*/events.*")}
    assert boards == {"train", "validation"}
    found = {str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()}
    # They name the files of the corpus.
    apart = ("manifest.json", "plan.json")
    for path in here.rglob("*"):
        name = str(path.relative_to(here))
        if path.name.startswith(".plan-"):
            continue  # named after the plan
        if path.is_file() and "checkpoint_" not in name and "tensorboard" not in name:
            assert name in found
            if not name.startswith("model") and path.name not in apart:
                assert (there / name).read_bytes() == path.read_bytes(), name
    assert_equal(there / "model", here / "model")
    assert (there / "model/evaluation.json").read_text() == (
        here / "model/evaluation.json"
    ).read_text()
