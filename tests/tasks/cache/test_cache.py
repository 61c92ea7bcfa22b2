"""A cache is found under its parent folder and opened with its vocabulary."""

import pytest

from tasks import vocabulary
from tasks.cache.cache import Cache, find_cache
from tasks.cache.manifest import MANIFEST, PLAN, sealed
from tasks.storage import files
from tasks.terminal.command_line import UserError
from tests.support import small_tokenizers

NAME = "python_docs_span_corruption"


@pytest.fixture
def folder(tmp_path):
    cache = tmp_path / "caches" / NAME
    cache.mkdir(parents=True)
    small_tokenizers.t5(cache / "sentencepiece", ["one two three four five six seven"] * 20, 40)
    record = vocabulary.load(str(cache), extra_ids=10).record
    plan = {
        "task": NAME, "corpus": {}, "packing": "concat", "row_tokens": 8, "separator": "none",
        "shards": {}, "format": 1, "vocabulary": vars(record),
    }  # fmt: skip
    files.write_json(str(cache / MANIFEST), sealed({"plan": plan, "splits": {}, "software": {}}))
    return tmp_path / "caches"


def test_a_cache_is_found_by_its_parent_or_itself(folder):
    cache = str(folder / NAME)
    assert find_cache(cache, NAME) == cache
    assert find_cache(str(folder), NAME) == cache
    assert find_cache(str(folder), "python_docs_ul2", [NAME]) == cache
    with pytest.raises(UserError, match=f"it holds {NAME}"):
        find_cache(str(folder), "rlm_prefix_lm")


def test_a_finished_cache_is_found_without_listing_its_files(folder, monkeypatch):
    monkeypatch.delattr(files, "list_names")
    assert find_cache(str(folder), NAME) == str(folder / NAME)


def test_an_opened_cache_has_its_manifest_and_vocabulary(folder):
    cache = Cache.open(str(folder / NAME))
    expected = vocabulary.load(cache.folder, extra_ids=10)
    assert cache.manifest.plan.vocabulary == expected.record
    assert cache.ids == expected.ids
    assert cache.ids.pieces == expected.ids.pieces


def test_an_unfinished_cache_is_rejected(tmp_path):
    with pytest.raises(UserError, match="holds no cache"):
        Cache.open(str(tmp_path))
    (tmp_path / PLAN).write_text("{}")
    with pytest.raises(UserError, match="is unfinished"):
        Cache.open(str(tmp_path))
