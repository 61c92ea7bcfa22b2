"""A damaged plan.json never costs finished shards, nor lets shards of another plan pass as ours."""

import json
import os
import shutil

import pytest

from tasks.cache.manifest import CacheManifest
from tasks.storage import files
from tasks.terminal.command_line import UserError
from tests.support.damage import replaced, truncate

TASK = "python_docs_span_corruption"


@pytest.fixture
def unfinished(cache, tmp_path):
    copy = tmp_path / TASK
    shutil.copytree(cache, copy)
    for name in ("COMPLETED", "manifest.json", "train.receipt-00003-of-00008.json"):
        (copy / name).unlink()
    return copy


def empty(path):
    path.write_text("")


DAMAGES = [
    replaced('"packing"', '"packing'),
    replaced('"vocabulary"', '"vocabulasy"'),
    replaced('"row_tokens": 568', '"row_tokens": 569'),
    *(empty, truncate, os.unlink),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_same_command_goes_on(build, cache, unfinished, checksums, capsys, damage):
    before = {path.name: path.stat().st_ino for path in unfinished.glob("*.tfrecord-*")}
    damage(unfinished / "plan.json")
    build(unfinished.parent)
    assert "1 to do" in capsys.readouterr().out
    assert checksums(unfinished) == checksums(cache)
    after = {path.name: path.stat().st_ino for path in unfinished.glob("*.tfrecord-*")}
    redone = {name for name in before if before[name] != after[name]}
    assert redone == {f"{split}.tfrecord-00003-of-00008" for split in ("train", "validation")}


@pytest.mark.parametrize("damage", DAMAGES)
def test_another_command_is_refused(build, unfinished, checksums, damage):
    damage(unfinished / "plan.json")
    before = checksums(unfinished)
    with pytest.raises(UserError, match=r"make a different plan.* in another --cache_dir"):
        build(unfinished.parent, "--row_tokens=569")
    assert checksums(unfinished) == before


@pytest.mark.parametrize("damage", [truncate, empty])
def test_plan_and_manifest_damaged(build, cache, tmp_path, checksums, damage):
    copy = tmp_path / TASK
    shutil.copytree(cache, copy)
    damage(copy / "plan.json")
    damage(copy / "manifest.json")
    build(tmp_path)
    assert checksums(copy) == checksums(cache)


def test_caches_of_earlier_versions_are_refused(build, unfinished, checksums):
    """They have no file that tells their plan a second time."""
    next(unfinished.glob(".plan-*")).unlink()
    before = checksums(unfinished)
    with pytest.raises(UserError, match=r"from a version before 0\.2\.0 .*: choose another"):
        build(unfinished.parent)
    assert checksums(unfinished) == before


def test_nothing_finished(build, cache, unfinished, checksums):
    for path in (*unfinished.glob("*.receipt-*"), *unfinished.glob(".plan-*")):
        path.unlink()
    truncate(unfinished / "plan.json")
    build(unfinished.parent)
    assert checksums(unfinished) == checksums(cache)


def test_a_changed_number_in_a_manifest_is_noticed(build, cache, tmp_path, checksums):
    copy = tmp_path / TASK
    shutil.copytree(cache, copy)
    manifest = copy / "manifest.json"
    value = json.loads(manifest.read_text())
    shard = value["splits"]["train"][0]
    # Still the tokens of as many rows, so that no number contradicts another.
    shard["tokens"] += 1
    manifest.write_bytes(files.json_bytes(value))
    with pytest.raises(UserError, match=r"manifest\.json is not what was written: restore"):
        CacheManifest.load(str(copy))
    del value["sha256"]
    manifest.write_bytes(files.json_bytes(value))
    with pytest.raises(UserError, match=r"manifest\.json is not what was written: restore"):
        CacheManifest.load(str(copy))
    build(tmp_path)
    assert checksums(copy) == checksums(cache)
