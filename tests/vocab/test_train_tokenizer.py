"""Tests vocab.train_tokenizer: what it writes, twice the same, and its refusals."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tasks import vocabulary
from tasks.terminal.command_line import UserError
from tests import small_tokenizers
from vocab import train_tokenizer

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "documents.jsonl"
    texts = small_tokenizers.documents(200)
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return f"json:{path}"


def made(corpus, output, kind, *flags):
    train_tokenizer.main(
        [f"--kind={kind}", f"--corpus={corpus}", f"--output={output}", "--vocab_size=400", *flags]
    )
    return vocabulary.load(str(output))


@pytest.mark.parametrize(
    ("kind", "flags"), [("byte_bpe", ()), ("wordpiece", ()), ("wordpiece", ("--cased",))]
)
def test_transformers_reads_what_is_written(kind, flags, corpus, tmp_path, capsys):
    from transformers import AutoTokenizer

    loaded = made(corpus, tmp_path / "made", kind, *flags, "--extra_ids=7")
    assert "407 ids: 400 pieces, 7 sentinels" in capsys.readouterr().out
    assert (loaded.size, loaded.record.sentinels, loaded.record.extra_ids) == (407, 7, 0)
    assert loaded.ids.id_of("<extra_id_0>") == 406
    theirs = AutoTokenizer.from_pretrained(tmp_path / "made")
    texts = ["The list is Sorted.", "naïve — x", "line\nline  two"]
    assert theirs(texts, add_special_tokens=False)["input_ids"] == [
        ids.tolist() for ids in loaded.encode(texts)
    ]
    assert theirs("a<extra_id_0>", add_special_tokens=False)["input_ids"][-1] == 406
    if kind == "byte_bpe":
        assert loaded.special == vocabulary.T5_IDS
        assert [loaded.decode(ids) for ids in loaded.encode(texts)] == texts
    else:
        assert loaded.special == vocabulary.SpecialIds(0, 3, 1, 2)
        upper = any(piece != piece.lower() for piece in loaded.ids.pieces[5:400])
        assert upper == bool(flags)


def test_the_same_bytes_again(corpus, tmp_path):
    here = made(corpus, tmp_path / "here", "byte_bpe")
    # Another process hashes strings otherwise and uses all cores.
    command = [sys.executable, "-m", "vocab.train_tokenizer", "--kind=byte_bpe"]
    command += [f"--corpus={corpus}", f"--output={tmp_path}/again", "--vocab_size=400"]
    environment = {**os.environ, "PYTHONHASHSEED": "7", "TOKENIZERS_PARALLELISM": "true"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    assert vocabulary.load(f"{tmp_path}/again").record == here.record


def test_a_finished_one_is_kept_and_others_are_not_touched(corpus, tmp_path):
    made(corpus, tmp_path / "made", "byte_bpe")
    path = tmp_path / "made" / "tokenizer.json"
    before = path.stat().st_mtime_ns
    made(corpus, tmp_path / "made", "byte_bpe")
    assert path.stat().st_mtime_ns == before
    for flags, says in (
        (("--extra_ids=3",), "holds another vocabulary"),
        (("--extra_ids=-1",), "must be 0 or more"),
        (("--cased",), "has no effect with --kind=byte_bpe"),
    ):
        with pytest.raises(UserError, match=says):
            made(corpus, tmp_path / "made", "byte_bpe", *flags)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    with pytest.raises(UserError, match="holds other files"):
        made(corpus, tmp_path / "other", "byte_bpe")
    with pytest.raises(UserError, match=r"the corpus makes .* pieces; use more text"):
        made(corpus, tmp_path / "large", "wordpiece", "--vocab_size=90000")
    assert not (tmp_path / "large").exists()
    with pytest.raises(UserError, match="the corpus makes 259 pieces; give 259 or more"):
        made(corpus, tmp_path / "small", "byte_bpe", "--vocab_size=100")
