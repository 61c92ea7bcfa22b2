"""Four processes, as the hosts of a pod, from a cache in a bucket to a model in it."""

import os
import signal
import time

import pytest

from tasks.cache.manifest import CacheManifest
from tests.support.runs import free_port, losses, start, state
from tests.support.servers.gcs import GcsServer
from tests.support.servers.gcs_store import Store
from tests.support.trees import assert_close, assert_equal
from tests.trainer.conftest import command
from tests.trainer.engine.test_processes import assert_near, pretrain
from trainer.config.from_flags import build_config
from trainer.engine.processes import EXIT_LOST
from trainer.setup import prepare

STEPS, EVERY, HOSTS, BATCH = 12, 5, 4, 8
CACHE, MODEL = "gs://bucket/cache", "gs://bucket/model"
FLAGS = ("--evaluation.every_steps=0", "--data.threads=1", "--data.prefetch=1")

pytestmark = [pytest.mark.google, pytest.mark.slow]


@pytest.fixture(scope="module")
def cache(text_cache, tmp_path_factory):
    """The folder of a cache of many shards."""
    folder = tmp_path_factory.mktemp("many")
    size = sum(path.stat().st_size for path in text_cache.parents[1].glob("*.txt"))
    made = command(
        "pipeline.build", "--task=python_docs_span_corruption",
        f"--corpus=text:{text_cache.parents[1]}/*.txt?split=train",
        f"--vocabulary={text_cache.parents[1]}/vocabulary", f"--cache_dir={folder}",
        "--row_tokens=100", f"--shard_bytes={size // 40}",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    return folder / "python_docs_span_corruption"


@pytest.fixture
def store(cache):
    """A bucket with the cache."""
    return bucket(cache)


def bucket(cache):
    store = Store("bucket")
    store.fill(cache, "cache")
    return store


class Pod:
    """Hosts that make one run, each with a way of its own to the one bucket."""

    def __init__(self, store, steps, hosts=HOSTS, **options):
        self.store = store
        self.servers = [GcsServer(store, **options) for _ in range(hosts)]
        port = free_port()
        self.processes = []
        for index, server in enumerate(self.servers):
            server.__enter__()
            flags = [
                f"--processes.coordinator=localhost:{port}",
                f"--processes.count={hosts}",
                f"--processes.index={index}",
                "--processes.timeout_seconds=30",
            ]
            given = [f"--train_steps={steps}", f"--batch_size={BATCH}", *FLAGS]
            arguments = pretrain(CACHE, MODEL, *given, *(flags if hosts > 1 else []))
            self.processes.append(start(arguments, env=os.environ | server.environment()))

    def wait_for(self, name):
        """Returns when the object is in the bucket."""
        while name not in self.store.buckets["bucket"]:
            for process in self.processes:
                assert process.poll() is None, process.communicate()
            time.sleep(0.1)

    def end(self):
        """Returns (exit codes, what was said on stderr) when all have ended."""
        said = [process.communicate(timeout=300)[1] for process in self.processes]
        for server in self.servers:
            server.__exit__()
        return [process.returncode for process in self.processes], said


@pytest.fixture(scope="module")
def together(cache, tmp_path_factory):
    """(model directory, hosts' servers) of four that nothing disturbed."""
    store = bucket(cache)
    pod = Pod(store, STEPS)
    codes, said = pod.end()
    assert codes == [0] * HOSTS, said
    return store.fetch("model", tmp_path_factory.mktemp("together")), pod.servers


def test_four_hosts_make_the_run_of_one(store, together, tmp_path):
    pod = Pod(store, STEPS, hosts=1)
    codes, said = pod.end()
    assert codes == [0], said
    alone = store.fetch("model", tmp_path)
    expected, found = losses(alone), losses(together[0])
    assert found.keys() == expected.keys()
    assert len(found) == STEPS
    assert_near(found, expected)
    assert_close(state(alone, STEPS), state(together[0], STEPS), rtol=1e-7, atol=1e-3)


def test_a_host_reads_the_shards_of_its_rows_alone(cache, together):
    arguments = pretrain(cache, "unused", f"--train_steps={STEPS}", f"--batch_size={BATCH}")
    data = prepare(*build_config("t5_1_1_tiny", arguments[4:])).data
    windows = data.sources[0].maker.windows
    shards = len(CacheManifest.load(str(cache)).splits["train"])
    assert shards > 20
    for host, door in enumerate(together[1]):
        asked = {request.object for request in door.requests}
        read = {name for name in asked if name.startswith("cache/train.tfrecord")}
        # A batch is made while another waits to be taken.
        wanted = [
            {
                "cache/" + place.path.rpartition("/")[2]
                for window in data.batches(host, HOSTS).places(step).windows
                for place in windows.where(int(window))
            }
            for step in range(STEPS + 3)
        ]
        assert set().union(*wanted[:STEPS]) <= read <= set().union(*wanted)
        assert len(read) < shards


def test_one_is_killed_and_all_go_on_to_the_same_bits(store, together, tmp_path):
    pod = Pod(store, 1_000_000)
    pod.wait_for(f"model/checkpoint_{EVERY}/commit_success.txt")
    pod.processes[2].send_signal(signal.SIGKILL)
    codes, said = pod.end()
    assert codes == [EXIT_LOST, EXIT_LOST, -signal.SIGKILL, EXIT_LOST]
    assert "process 2" in said[0].splitlines()[-1]

    # As if it had been killed at once: a run of fewer steps has to come to its end.
    for name in list(store.buckets["bucket"]):
        if name.startswith("model/checkpoint_") and f"/checkpoint_{EVERY}/" not in name:
            del store.buckets["bucket"][name]
    codes, said = Pod(store, STEPS, faults=0.05, seed=7).end()
    assert codes == [0] * HOSTS, said
    again = store.fetch("model", tmp_path)
    assert losses(again) == losses(together[0])
    assert_equal(state(again, STEPS), state(together[0], STEPS))
