"""Texts that the vocabulary cannot spell are counted, named, and refused above a limit."""

import io
import json
import random
import unicodedata

import numpy as np
import pytest
import sentencepiece

from pipeline import build
from pipeline.building import lost_text
from pipeline.tokenizer import tokenize
from tasks.cache.manifest import CacheManifest
from tasks.terminal.command_line import UserError
from tasks.vocabularies.sentencepiece_model import SPACE
from tasks.vocabulary import load
from tests.support import small_tokenizers

TEXTS = [f"the {colour} house number {n} stands near the gate" for n in range(40)
         for colour in ("red", "old")]  # fmt: skip


@pytest.fixture(scope="module")
def english(tmp_path_factory):
    """Returns the path of a vocabulary that spells small letters and digits alone."""
    return small_tokenizers.t5(tmp_path_factory.mktemp("english") / "english", TEXTS, 60)


def run(tmp_path, english, texts, *more, task="lm"):
    build_texts(tmp_path, english, texts, *more, task=task)
    return CacheManifest.load(f"{tmp_path}/cache/mine_{task}")


def build_texts(tmp_path, english, texts, *more, task="lm"):
    path = tmp_path / "a.jsonl"
    tmp_path.mkdir(exist_ok=True)
    rows = [{"text": text} if isinstance(text, str) else text for text in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = f"json:{path}?validation=0" + "&inputs=q&targets=a" * (task == "supervised")
    build.main([f"--task={task}", "--name=mine", f"--corpus={corpus}", f"--vocabulary={english}",
                "--extra_ids=0", f"--cache_dir={tmp_path}/cache", *more])  # fmt: skip


def test_a_vocabulary_that_spells_all_says_nothing(tmp_path, english, capsys):
    manifest = run(tmp_path, english, TEXTS)
    assert manifest.total("train", "unknown_tokens") == 0
    assert "unknown" not in capsys.readouterr().out


def test_a_few_unknown_tokens_are_counted_and_named(tmp_path, english, capsys):
    manifest = run(tmp_path, english, [*TEXTS, "{a} {b}\nQ " * 8])
    unknown = manifest.total("train", "unknown_tokens")
    out = capsys.readouterr().out
    assert unknown == 8 * 5
    share = unknown / manifest.total("train", "text_tokens")
    assert [line.split() for line in out.splitlines() if line.startswith("unknown tokens")] == [
        ["unknown", "tokens", f"{share:.2%}"]
    ]
    assert f"warning: {share:.1%} of the text's tokens are unknown" in out
    assert "cannot spell '{', '}', 'Q', line ends, which become spaces" in out


def test_a_large_share_is_refused(tmp_path, english):
    texts = ["красный дом стоит у ворот"] * 9
    with pytest.raises(UserError, match=r"100.0% of the texts hold .* spell 'о', .*max_"):
        run(tmp_path, english, texts)
    assert not (tmp_path / "cache" / "mine_lm" / "COMPLETED").exists()
    run(tmp_path, english, texts, "--max_unknown=1")
    assert (tmp_path / "cache" / "mine_lm" / "COMPLETED").exists()


def test_both_sides_of_pairs_count(tmp_path, english):
    pairs = [{"q": "the red house", "a": '{"colour": 1}'}] * 9
    with pytest.raises(UserError, match=r"cannot spell '\"', '{', 'c', ':', '}'"):
        run(tmp_path, english, pairs, task="supervised")


def test_runs_of_lost_characters_count_with_their_bytes(tmp_path, english, capsys):
    """One unknown token stands for all of them."""
    texts = [*TEXTS, *(f"the house {'数' * 60}" for _ in range(40))]
    with pytest.raises(UserError, match=r"6\d\.\d% of the text's bytes become unknown .*'数'"):
        run(tmp_path, english, texts)
    lost = run(tmp_path, english, texts, "--max_unknown=1").splits["train"][0].lost
    assert lost == {"text bytes": 40 * 60 * 3, "text tokens": 40}
    assert "text in them" in capsys.readouterr().out


LONG = "the red house number stands near the gate " * 9


@pytest.mark.parametrize("target", ["да1", '{"e": "red"}', "\n    да1"])
def test_each_side_counts_for_itself(tmp_path, english, target, capsys):
    pairs = [{"q": LONG, "a": target}] * 9
    with pytest.raises(UserError, match=r"\d\d\.\d% of the targets' (bytes|tokens)"):
        run(tmp_path, english, pairs, task="supervised")
    run(tmp_path, english, pairs, "--max_unknown=1", task="supervised")
    rows = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert {"unknown tokens, targets", "text in them, targets"} <= {*rows}
    assert "unknown tokens, inputs" not in rows


def test_targets_without_letters_hold_unknown_tokens_alone(tmp_path, english):
    pairs = [{"q": LONG, "a": "да"}] * 9 + [{"q": LONG, "a": "да old"}] * 9
    found = run(tmp_path, english, pairs, "--max_unknown=1", task="supervised")
    assert found.splits["train"][0].lost["targets documents"] == 9


@pytest.mark.parametrize(
    ("flags", "lost"),
    [
        (("--max_inputs=100", "--too_long=split"), 3 * 40 * 9),
        (("--max_inputs=70", "--too_long=cut"), 0),
        (("--max_inputs=1000", "--too_long=cut"), 3 * 40 * 9),
        ((), 3 * 40 * 9),
    ],
)
def test_long_pairs_count_as_they_are_kept(tmp_path, english, flags, lost):
    pairs = [{"q": LONG + "数" * 40, "a": "the gate"}] * 9
    found = run(tmp_path, english, pairs, "--max_unknown=1", *flags, task="supervised")
    (shard,) = found.splits["train"]
    assert (shard.lost or {}).get("inputs bytes", 0) == lost
    whole = len(pairs[0]["q"].encode()) * 9
    assert (shard.pairs.inputs_bytes == whole) == bool(lost)
    if lost:
        with pytest.raises(UserError, match=r"\d\d\.\d% of the inputs' bytes"):
            run(tmp_path / "again", english, pairs, *flags, task="supervised")


def test_a_cut_before_the_known_text_keeps_what_is_lost(tmp_path, english):
    pairs = [{"q": "数" * 120 + " " + LONG, "a": "the gate"}] * 9
    flags = ("--max_unknown=1", "--max_inputs=20", "--too_long=cut")
    (shard,) = run(tmp_path, english, pairs, *flags, task="supervised").splits["train"]
    assert shard.lost["inputs bytes"] == 9 * 360
    assert 9 * 360 < shard.pairs.inputs_bytes < 9 * 420


@pytest.mark.parametrize(
    ("letters", "text", "signs"),
    [
        ("e", "ｅ" * 60, 1),  # full width: three bytes become one
        ("가각", unicodedata.normalize("NFD", "가각 " * 30), 1),
        ("e", f"e{' ' * 200}e", 1),
        ("e", "☃, ☃ . ☃ ! " * 3, 9),
    ],
)
def test_what_normalisation_changes_is_not_lost(tmp_path, letters, text, signs):
    texts = [f"{letter} {letter} , . !" for letter in letters] * 9
    vocabulary = small_tokenizers.t5(tmp_path / "small", texts, 60)
    made = [text if "☃" in text else f"{text} ☃"] * 9
    with pytest.raises(UserError, match=r"cannot spell '☃'\. A model"):
        run(tmp_path, vocabulary, made, "--max_unknown=0")
    (shard,) = run(tmp_path, vocabulary, made, "--max_unknown=1").splits["train"]
    assert shard.lost["text bytes"] == 9 * signs * len("☃".encode())


@pytest.mark.parametrize("text", ["한국어 문장을 읽고 쓰는 모델입니다", "ﷺ ﷺ ﷺ"])
def test_text_that_normalisation_lengthens_is_lost_once(tmp_path, english, text):
    words = small_tokenizers.bert(tmp_path / "words", ["the old house"] * 9)
    for number, vocabulary in enumerate((english, words)):
        folder = tmp_path / str(number)
        (shard,) = run(folder, vocabulary, [text] * 9, "--max_unknown=1").splits["train"]
        assert 0 < shard.lost["text bytes"] <= 9 * len(text.encode()) == shard.text_bytes
        with pytest.raises(UserError, match=f"cannot spell '{text[0]}'|100.0% of the texts"):
            run(tmp_path / f"again{number}", vocabulary, [text] * 9)


def test_parts_that_a_list_leaves_out_do_not_count(tmp_path, english):
    pairs = [{"q": LONG + "数" * 120, "a": "the gate"}, *[{"q": "the old house", "a": "a"}] * 9]
    flags = ("--max_inputs=16", "--too_long=split", "--max_unknown=1")
    (whole,) = run(tmp_path, english, pairs, *flags, task="supervised").splits["train"]
    assert whole.lost["inputs bytes"] == 360
    ids = [f"a.jsonl:0#part{number}" for number in range(2, 99)]
    (tmp_path / "ids").write_text("\n".join(ids) + "\n")
    again = (*flags, f"--exclude={tmp_path}/ids")
    (left,) = run(tmp_path / "left", english, pairs, *again, task="supervised").splits["train"]
    assert left.documents == 10 < whole.documents
    assert "inputs bytes" not in (left.lost or {})
    assert left.pairs.inputs_bytes < whole.pairs.inputs_bytes - 360


def test_word_pieces_lose_words_and_not_accents(tmp_path):
    texts = ["the cafe is near", "the old house"] * 9
    vocabulary = small_tokenizers.bert(tmp_path / "small", texts)
    texts = ["thé café is  neár the ☃ ☃"] * 9
    (shard,) = run(tmp_path, vocabulary, texts, "--max_unknown=1").splits["train"]
    assert shard.lost == {"text bytes": 9 * 6, "text tokens": 18}


def test_a_small_limit_holds(tmp_path, english):
    texts = [*TEXTS * 9, "the red house}"]
    with pytest.raises(UserError, match=r"more than --max_unknown=0\.0:"):
        run(tmp_path, english, texts, "--max_unknown=0")
    run(tmp_path, english, texts)


@pytest.mark.parametrize(("indent", "says"), [("    ", True), ("", False)])
def test_indented_lines_that_become_spaces_are_named(tmp_path, english, capsys, indent, says):
    run(tmp_path, english, [*TEXTS, f"the house\n{indent}number near\nthe gate"])
    assert ("warning: texts have indented lines" in capsys.readouterr().out) == says


@pytest.mark.parametrize("symbol", ["<s>", "the red house number", "house\u2581", "é"])
@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc"])
def test_lost_text_is_measured_as_the_library_normalises_it(tmp_path, rule, symbol):
    """Also where a user-defined symbol, which combines with nothing, is before a mark."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, normalization_rule_name=rule,
        vocab_size=40, hard_vocab_limit=False, minloglevel=2, user_defined_symbols=[symbol],
    )  # fmt: skip
    (tmp_path / "a.model").write_bytes(model.getvalue())
    loaded = load(str(tmp_path / "a.model"))
    measure = tokenize.Tokenizer(loaded).normalised_bytes
    assert measure
    spaces = [chr(point) for point in range(0x10000) if chr(point).isspace()]
    draw = random.Random(0)
    letters = [*"aé数ﬁ½\u0301\u200b\u2581\U0001f600\x01 ", "red house", "\x01\x7f" * 9, "\x1c" * 18]
    letters += [symbol, f"{symbol}\u0301"]
    for _ in range(200):
        text = "".join(draw.choices(spaces + 3 * letters, k=draw.randrange(1, 30)))
        raw = np.frombuffer(text.encode(), np.uint8)
        words = loaded.codec.normalize(text).replace(SPACE, " ").split()
        for way in (measure, None):
            found = lost_text._normalised(raw, loaded, way)
            assert found == len("".join(words).encode()), repr(text)
