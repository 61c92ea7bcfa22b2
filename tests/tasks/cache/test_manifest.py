"""A manifest that was damaged or edited is refused with one line that names what is wrong."""

import json
import re

import pytest

from pipeline.verification.cache import verify
from tasks.cache.manifest import CacheManifest, FileEntry, Plan, Shard, as_json, sealed, shard_file
from tasks.terminal.command_line import UserError
from tasks.vocabulary import VocabularyRecord


def shard(index: int, dropped=None) -> Shard:
    kinds = ("tfrecord", "rows", "documents", *(("quarantine",) if dropped else ()))
    entries = {shard_file("train", kind, index, 3): FileEntry(10, "0" * 64) for kind in kinds}
    return Shard(entries, 3, 250, 7, 900, dropped or {}, 243, 100, 1)


@pytest.fixture
def value():
    corpus = {
        "spec": "json:*.jsonl",
        "files": [{"name": "a"}, {"name": "b"}],
        "generations": [1, 1],
    }
    record = VocabularyRecord("0" * 64, 500, 0, 100)
    plan = Plan("task", corpus, record, "concat", 100, "eos", {"train": 3})
    manifest = CacheManifest(plan, {"train": (shard(0), shard(1, {"null": 2}), shard(2))}, {})
    return json.loads(json.dumps(as_json(manifest)))


def edit(*path, to):
    def change(value):
        *above, last = path
        for key in above:
            value = value[key]
        value[last] = to

    return change


def drop(*path):
    def change(value):
        *above, last = path
        for key in above:
            value = value[key]
        del value[last]

    return change


def shards(change):
    return lambda value: value["splits"].update(train=change(value["splits"]["train"]))


FIRST = ("splits", "train", 0)
NAME = "train.tfrecord-00000-of-00003"
EDITS = {
    "unknown packing": (edit("plan", "packing", to="bestfit"), "packing is \"bestfit\""),
    "unknown separator": (edit("plan", "separator", to="bos"), "separator is \"bos\""),
    "row_tokens of zero": (edit("plan", "row_tokens", to=0), "row_tokens is 0, but must be"),
    "other row_tokens": (edit("plan", "row_tokens", to=10), "do not make 3 rows of 10"),
    "other format": (edit("plan", "format", to=7), "format 7"),
    "no vocabulary": (drop("plan", "vocabulary"), "the plan has no vocabulary"),
    "no sentinels": (drop("plan", "vocabulary", "sentinels"), "vocabulary has no sentinels"),
    "a flipped key": (lambda v: v["plan"].update(tasj=v["plan"].pop("task")), "has no task"),
    "a key more": (edit("plan", "speed", to=1), "\"speed\", which this version does not know"),
    "files as text": (edit("plan", "corpus", "files", to="ab"), "corpus.files is"),
    "a file without name": (edit("plan", "corpus", "files", 0, to={}), "each have a name"),
    "generations": (edit("plan", "corpus", "generations", to=[1]), "add up to 2 files"),
    "shards of plan": (edit("plan", "shards", "train", to=4), "its plan has {'train': 4}"),
    "no splits": (drop("splits"), "the manifest has no splits"),
    "splits as list": (edit("splits", to=[]), "splits is []"),
    "another split": (lambda v: v["splits"].update(test=[]), "shards, but its plan has"),
    "shard dropped": (shards(lambda all: all[1:]), "2} shards"),
    "shard doubled": (shards(lambda all: [all[0], all[0], all[2]]), "shard 1 lists the files of"),
    "shards reversed": (shards(lambda all: all[::-1]), "train shard 0 lists the files of"),
    "shard as number": (edit(*FIRST, to=1), "train shard 0 is 1"),
    "file renamed": (
        lambda v: v["splits"]["train"][0]["files"].update(
            {NAME.replace("tf", "tg"): v["splits"]["train"][0]["files"].pop(NAME)}
        ),
        "train shard 0 lists the files of",
    ),
    "file size": (edit(*FIRST, "files", NAME, "bytes", to=-10), f"bytes of {NAME} is -10"),
    "negative tokens": (edit(*FIRST, "tokens", to=-250), "tokens of train shard 0 is -250"),
    "rows as text": (edit(*FIRST, "rows", to="3"), "rows of train shard 0 is \"3\""),
    "rows as truth": (edit(*FIRST, "rows", to=True), "rows of train shard 0 is true"),
    "no rows": (drop(*FIRST, "rows"), "train shard 0 has no rows"),
    "more rows": (edit(*FIRST, "rows", to=4), "250 tokens, which do not make 4 rows of 100"),
    "more text": (edit(*FIRST, "text_tokens", to=251), "text_tokens 251, which can be at most 250"),
    "a longer row": (edit(*FIRST, "longest_row", to=101), "longest_row 101"),
    "dropped as text": (edit("splits", "train", 1, "dropped", "null", to="2"), "dropped null of"),
    "dropped emptied": (edit("splits", "train", 1, "dropped", to={}), "shard 1 lists the files of"),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_edits(value, tmp_path, name):
    change, what = EDITS[name]
    change(value)
    (tmp_path / "manifest.json").write_text(json.dumps(value))
    with pytest.raises(UserError, match=re.escape(what)) as found:
        CacheManifest.load(str(tmp_path))
    text = str(found.value)
    assert text.startswith(f"{tmp_path}/manifest.json: ")
    assert "\n" not in text
    # Files of the cache are missing too; what counts is that the manifest is named.
    faults = verify(str(tmp_path))[1]
    assert any(what in str(fault) for fault in faults if fault.file == "manifest.json")


def test_as_written(value, tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps(sealed(value)))
    manifest = CacheManifest.load(str(tmp_path))
    assert json.loads(json.dumps(as_json(manifest))) == value


@pytest.mark.parametrize("text", ["[]", "null", "1", '"x"', "{", ""])
def test_other_values(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"manifest.json"):
        CacheManifest.load(str(tmp_path))
    assert [fault.file for fault in verify(str(tmp_path))[1]] == ["manifest.json"]
