"""Tests palimpsest vocab train_tokenizer: what it writes, twice the same, and its refusals."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from tasks import vocabulary
from tasks.storage import lock
from tasks.terminal.command_line import UserError
from tests.support import small_tokenizers
from tests.support.corpora import write_json
from tests.support.parameters import slow_unless
from tests.support.words import changed
from tests.vocab.test_weighting import A, B, size
from tests.vocab.test_weighting import corpora as corpora
from vocab import train as sentencepiece
from vocab.annexes.training_tokenizers import train_tokenizer
from vocab.weighting import Corpora

ROOT = pathlib.Path(__file__).parents[4]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "documents.jsonl"
    return write_json(path, small_tokenizers.documents(200))


def made(corpus, output, kind, *flags):
    usual = (f"--kind={kind}", f"--corpus={corpus}", f"--output={output}", "--vocab_size=400")
    train_tokenizer.main(changed(*usual, *flags))
    return vocabulary.load(str(output))


@pytest.mark.torch
@pytest.mark.parametrize(
    ("kind", "flags"), [("byte_bpe", ()), ("wordpiece", ()), ("wordpiece", ("--cased",))]
)
def test_transformers_reads_what_is_written(kind, flags, corpus, tmp_path, capsys):
    from transformers import AutoTokenizer

    loaded = made(corpus, tmp_path / "made", kind, *flags, "--extra_ids=7")
    printed = capsys.readouterr().out
    assert "407 ids: 400 pieces, 7 sentinels" in printed
    task = {"byte_bpe": "span_corruption", "wordpiece": "masked_lm"}[kind]
    assert f"next: python -m pipeline.build --task={task} --name=mine --corpus=" in printed
    assert f"--vocabulary={tmp_path / 'made'} --cache_dir=cache\n" in printed
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
    command = [sys.executable, "-m", "palimpsest", "vocab", "train_tokenizer", "--kind=byte_bpe"]
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
        (("--extra_ids=3",), "made with other settings: extra_ids"),
        (("--extra_ids=-1",), "must be 0 or more"),
        (("--cased",), "has no effect with --kind=byte_bpe"),
    ):
        with pytest.raises(UserError, match=says):
            made(corpus, tmp_path / "made", "byte_bpe", *flags)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    with pytest.raises(UserError, match="holds other files"):
        made(corpus, tmp_path / "other", "byte_bpe")
    with pytest.raises(UserError, match=r"the corpus yields .* pieces; use more text"):
        made(corpus, tmp_path / "large", "wordpiece", "--vocab_size=90000")
    assert not (tmp_path / "large").exists()
    with pytest.raises(UserError, match="the corpus yields 259 pieces; give 259 or more"):
        made(corpus, tmp_path / "small", "byte_bpe", "--vocab_size=100")


# Ends its own process before the file of a number gets its name.
_KILLED = """
import os, signal, sys
from vocab.annexes.training_tokenizers import train_tokenizer
replace, left = os.replace, [int(sys.argv[1])]
def replaced(*paths):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*paths)
os.replace = replaced
train_tokenizer.main(sys.argv[2:])
"""


@pytest.mark.parametrize("number", slow_unless({3}, {1, 2, 3, 4}))
def test_a_killed_one_begins_again(number, corpus, tmp_path):
    made(corpus, tmp_path / "whole", "byte_bpe")
    flags = ["--kind=byte_bpe", f"--corpus={corpus}", f"--output={tmp_path}/killed"]
    command = [sys.executable, "-c", _KILLED, str(number), *flags, "--vocab_size=400"]
    assert subprocess.run(command, cwd=ROOT).returncode == -signal.SIGKILL
    left = {path.name for path in (tmp_path / "killed").iterdir()}
    assert lock.LOCK in left
    assert "manifest.json" not in left
    assert len(left) == 1 + number
    made(corpus, tmp_path / "killed", "byte_bpe")
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_two_at_once_are_refused_and_so_is_a_folder_of_transformers(corpus, tmp_path):
    output = tmp_path / "output"
    output.mkdir()
    with lock.held(str(output), "command", "--output"):
        for train in (train_tokenizer.main, sentencepiece.main):
            flags = ["--kind=byte_bpe"] if train == train_tokenizer.main else []
            with pytest.raises(UserError, match=r"another command is writing .*output: process"):
                train([*flags, f"--corpus={corpus}", f"--output={output}"])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (output / name).write_text("mine")
    with pytest.raises(UserError, match="holds other files"):
        made(corpus, output, "byte_bpe")
    assert set(contents(output).values()) == {b"mine"}


def test_tokenizers_are_trained_on_repeated_texts(corpora, tmp_path):
    options = train_tokenizer.Options(train_tokenizer.BYTE_BPE, 300, 2)
    parts = {"a": corpora("a", A), "b": corpora("b", B)}
    weighted = Corpora(parts, {"a": 3.0 * size(A), "b": 1.0 * size(B)})
    repeated = corpora("both", A * 3 + B)
    ours = train_tokenizer.train(options, weighted, str(tmp_path / "weighted"))
    theirs = train_tokenizer.train(options, repeated, str(tmp_path / "repeated"))
    assert ours.model == theirs.model
    texts = list(train_tokenizer._texts(corpora("many", [str(n) for n in range(3000)]), 1.25))
    assert len(texts) == pytest.approx(3750, abs=100)
    assert set(texts) == {str(n) for n in range(3000)}
