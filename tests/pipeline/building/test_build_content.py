"""Contents of a cache: every document once, lineage, counts; stock seqio reads it."""

import errno
import gc
import json
import sys

import pytest

from pipeline import verify
from pipeline.building import write
from tasks.cache.manifest import CacheManifest
from tasks.terminal.command_line import UserError
from tasks.vocabulary import EOS_ID, load
from tests.laboratory import oracle
from tests.laboratory.texts import Read
from tests.support import small_tokenizers
from tests.support.corpora import write_json
from tests.support.plain_records import read_rows


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--packing=best_fit", "--row_tokens=100"],
        ["--packing=best_fit", "--separator=eos"],
        ["--separator=eos", "--row_tokens=33"],
    ],
)
def test_every_document_is_there_once_and_counted(
    build, cache, tmp_path, documents, vocabulary, more
):
    folder = build(tmp_path, *more) if more else cache
    manifest = CacheManifest.load(str(folder))
    plan = manifest.plan
    assert more or plan.row_tokens == 568
    assert manifest.software["sentencepiece"]
    reads = [Read(name, "", (text.encode(),)) for name, text in documents.items()]
    rules = oracle.Rules(oracle.encoder(str(vocabulary), False), 1 << 20, validation=0.1)
    end = EOS_ID if plan.separator == "eos" else None
    layout = oracle.Layout(plan.packing, plan.row_tokens, end, oracle.unknown(str(vocabulary)))
    oracle.check(folder, oracle.expected(reads, rules), layout)


@pytest.mark.parametrize("choice", ["keep", "text"])
def test_pairs_may_spell_sentinels(build, tmp_path, vocabulary, choice):
    from vocab.train import add_sentinels

    model = (vocabulary / "sentencepiece.model").read_bytes()
    (tmp_path / "with.model").write_bytes(add_sentinels(model, 100))
    pairs = [{"a": f"some text {n}", "b": "<extra_id_0> some <extra_id_1>"} for n in range(3)]
    lines = [json.dumps(pair) for pair in [*pairs, {"a": "plain", "b": "text"}]]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    flags = [
        *("--task=supervised", "--name=x"),
        *(f"--vocabulary={tmp_path}/with.model", "--extra_ids=0"),
        f"--corpus=json:{tmp_path}/pairs.jsonl?inputs=a&targets=b&validation=0",
    ]
    with pytest.raises(
        UserError, match=r"contains a sentinel.*--sentinels=keep \(pairs\) or --sen"
    ):
        build(tmp_path / "without", *flags)
    build(tmp_path / "cache", *flags, f"--sentinels={choice}")
    folder = tmp_path / "cache" / "x_supervised"
    manifest, loaded = CacheManifest.load(str(folder)), load(str(folder))
    (shard,) = manifest.splits["train"]
    name = {"keep": "kept sentinels", "text": "sentinels as text"}[choice]
    assert (shard.documents, shard.edits, shard.dropped) == (4, {name: 3}, {})
    (path,) = folder.glob("train.tfrecord-*")
    targets = [row["targets"] for row in read_rows(path.read_bytes())]
    first = loaded.first_sentinel
    sentinels = [[loaded.size - 1 - each for each in ids if each >= first] for ids in targets]
    assert sorted(sentinels) == ([[], [0, 1], [0, 1], [0, 1]] if choice == "keep" else [[]] * 4)
    assert verify.main([f"--cache={folder}"]) == 0


def test_a_special_token_in_a_text_is_named_or_kept_as_text(build, tmp_path):
    folder = small_tokenizers.KINDS["bert"](tmp_path / "bert", small_tokenizers.documents(100))
    texts = ["some text", "it is [MASK] here", "more of it"]
    flags = [
        f"--corpus={write_json(tmp_path / 'some.jsonl', texts)}?validation=0",
        *(f"--vocabulary={folder}", "--extra_ids=100", "--max_quarantined=0.5"),
    ]
    left_out = build(tmp_path / "cache", *flags)
    assert CacheManifest.load(str(left_out)).dropped("train") == {
        "contains the special token [MASK]": 1
    }
    (path,) = left_out.glob("*.quarantine-*")
    (line,) = map(json.loads, path.read_text().splitlines())
    assert line["value"] == {"token": "[MASK]", "character": 6}
    kept = build(tmp_path / "kept", *flags, "--special_tokens=text")
    (shard,) = CacheManifest.load(str(kept)).splits["train"]
    assert (shard.documents, shard.edits) == (3, {"special tokens as text": 1})
    assert verify.main([f"--cache={kept}"]) == 0


def test_a_shard_that_cannot_be_written_leaves_nothing(cache, tmp_path, monkeypatch):
    """Even the Parquet writer is closed, which would otherwise print an error when deleted."""
    ignored = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    plan = CacheManifest.load(str(cache)).plan
    with pytest.raises(OSError, match="full"), write.ShardWriter(str(tmp_path), plan, "train", 0):
        monkeypatch.setattr(write._HashedFile, "write", full)
    gc.collect()
    assert not ignored
    assert not list(tmp_path.iterdir())


def full(self, data):
    if self._file:
        raise OSError(errno.ENOSPC, "the disk is full")
    return len(data)
