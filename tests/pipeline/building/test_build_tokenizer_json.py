"""Builds with a tokenizer.json: both engines write the same bytes, and the build names them."""

import re

import pytest

from tasks.cache.manifest import CacheManifest
from tests.support import small_tokenizers
from tests.support.corpora import write_json

TASK = "small_lm"
ODD = ["e\u0301 ünï çödé — 日本 🇷🇴", "a\x00b", "it spells <|endoftext|> and [SEP]", "\u200b"]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "documents.jsonl"
    corpus = write_json(path, small_tokenizers.documents(76) + ODD)
    return ["--name=small", "--task=lm", f"--corpus={corpus}", "--max_quarantined=0.1"]


@pytest.mark.parametrize("kind", ["gpt2", "bert", "byte"])
def test_both_engines_write_the_same_bytes(kind, small, build, checksums, tmp_path, capsys):
    path = small_tokenizers.KINDS[kind](tmp_path / kind, small_tokenizers.documents(30))
    flags = [*small, f"--vocabulary={path}"]
    expected = checksums(build(tmp_path / "slow", "--tokenizer=library", *flags).parent / TASK)
    assert "audited" not in capsys.readouterr().out
    folder = build(tmp_path / "fast", *flags).parent / TASK
    assert checksums(folder) == expected
    library = "NumPy" if kind == "byte" else "Hugging Face's tokenizers"
    found = rf"tokenized 80 texts; audited [1-9]\d* against {library}"
    out = capsys.readouterr().out
    assert re.search(found, out), out
    assert "will be left" not in out
    assert CacheManifest.load(str(folder)).software["tokenizers"]


def test_a_build_says_at_its_start_what_it_leaves_to_the_library(small, build, tmp_path, capsys):
    path = small_tokenizers.unigram(tmp_path / "unigram", small_tokenizers.documents(30))
    build(tmp_path / "cache", *small, f"--vocabulary={path}")
    out = capsys.readouterr().out
    reason = "Hugging Face's tokenizers: its model is Unigram, but its normalizer NFKC\n"
    assert f"all texts will be left to {reason}" in out
    assert f"all texts were left to {reason}" in out
