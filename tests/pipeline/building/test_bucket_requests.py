"""In a bucket, a build lists its folder instead of asking for each shard by itself."""

import pytest

from benchmarks import bucket_requests

pytestmark = pytest.mark.processes

SHARDS = 50


@pytest.fixture(scope="module")
def steps():
    """Returns a dict: step of a build -> number of requests by kind."""
    import fsspec

    usual = fsspec.config.conf.get("gcs")
    try:
        with pytest.MonkeyPatch.context() as patch, bucket_requests.GcsServer() as gcs:
            for name, value in gcs.environment().items():
                patch.setenv(name, value)
            rows = bucket_requests.steps(gcs, SHARDS)
    finally:
        fsspec.config.conf.pop("gcs", None)
        if usual:
            fsspec.config.conf["gcs"] = usual
        forget_the_server()
    return {
        step: dict(zip(bucket_requests.KINDS, map(int, counts), strict=True))
        for _, step, _, *counts in rows
    }


def forget_the_server():
    import gcsfs

    gcsfs.GCSFileSystem.clear_instance_cache()


@pytest.mark.parametrize("step", ["survey", "invalidate"])
def test_nothing_there(steps, step):
    counts = steps[f"{step}, nothing there"]
    assert sum(counts.values()) <= 6, counts


@pytest.mark.parametrize("step", ["survey, all finished", "a look of the monitor"])
def test_finished_shards(steps, step):
    """Each receipt is read once; sizes come with the listing."""
    counts = steps[step]
    assert counts["read"] == SHARDS
    assert counts["list"] <= 4
    assert counts["look up"] <= 1


def test_receipts_are_deleted_once(steps):
    counts = steps["invalidate, all finished"]
    assert counts["delete"] == SHARDS + 2
    assert sum(counts.values()) <= SHARDS + 6, counts
