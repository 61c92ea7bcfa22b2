"""A run that follows a takedown gets nothing of an older build, which goes on beside it."""

import re
from collections import Counter

import pytest

from tests.pipeline.building.test_old_builds import FOLDER, LISTED, TASK, assert_taken_down, stream
from tests.pipeline.building.test_old_builds import build as build
from tests.pipeline.building.test_old_builds import runner as runner
from trainer.annexes.following import building_cache

pytestmark = pytest.mark.processes


@pytest.mark.google
def test_a_run_that_follows_gets_no_shard_of_an_older_build(build, runner, gcs, tmp_path):
    build(cache_dir="gs://bucket/old")
    old = {name.partition("/")[2]: gcs.read(name) for name in gcs.names("old/")}
    read = Counter()

    def look(number):
        # Files of the old build, as if it had been stopped after its last look at the plan.
        names = gcs.names(f"cache/{TASK}/")
        for name in old.keys() - {each.partition("/")[2] for each in names}:
            if "-of-" in name:
                gcs.store.put("bucket", f"cache/{name}", old[name], {}, {})
        followed = building_cache.opened(FOLDER)
        for split, count in followed.manifest.plan.shards.items():
            known = [n for n in range(1, count + 1) if followed.look(split, n)]
            shards = followed.manifest.splits[split]
            assert len(shards) == len(known) == number
            names = [name for shard in shards for name in shard.files if ".tfrecord-" in name]
            read.update(re.findall("<(d[0-9]+)>", stream(FOLDER, names)))

    runner.before = look
    build(f"--exclude={tmp_path}/ids")
    assert read
    assert not read.keys() & set(LISTED)
    assert_taken_down(build, tmp_path)
