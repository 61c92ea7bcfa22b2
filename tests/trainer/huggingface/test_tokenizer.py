"""Tests that tokenizer.json gives SentencePiece's ids, on ordinary and on awkward text."""

import io
import random
import unicodedata
from pathlib import Path

import pytest
import sentencepiece

from tasks import vocabulary
from tasks.reading import sources
from tasks.terminal.command_line import UserError
from tasks.vocabulary import NORMAL
from tests.support import unigram_laws
from tests.support.small_tokenizers import without_sentinels
from trainer.huggingface import tokenizer
from vocab.train import add_sentinels

pytestmark = pytest.mark.torch

TEXTS = Path(__file__).parents[2] / "pipeline" / "tokenizer" / "texts.txt"
AWKWARD = r"""
  two  spaces |\ttab\r\n|\u00a0no\u00a0break\u202f|\u3000wide\u3000|a\u0085b
zero\u200bwidth\u200djoiner\ufeffmark\u00adsoft|a\u0001b\u0007c|\u2028line\u2029paragraph
\ufb01 \ufb03 \u2460 \u00bd \u2121 \uff71 \uff76\uff9e
\ufdfa \uff21\uff42 \u338f \u212b \u2126 \u0149 \u01c6|\uff5e
e\u0301 e\u0323\u0302 \u03b1\u0313\u0301 \u1fb3|\u00bd\u0301|\u0301a|\ufe0f\ufb01|\u0323\ufdfa
\u304b\u3099 \u306f\u309a \u1100\u1161\u11a8|\u0915\u093c \u0958 \u0e01\u0e47 \u0e33|\u0651\u064e
\u05e9\u05bc\u05c1 \u05e9\u05c1\u05bc|\U0001f468\u200d\U0001f469\u200d\U0001f467
\U0001f1f7\U0001f1f4 \u2764\ufe0f|1\ufe0f\u20e3 \U0001d518 \U0001f44b\U0001f3fd
x\u2581y|\u2581x|x\u2581|\ud7ff\ue000\U0010ffff
====----....|aaaaaaaaaaaaaa|<extra_id|<extra_id_0|extra_id_0>
< pad >|<0x4|\u0130i \u0131I \u00df \u1e9e \u017f
"""
AWKWARD = [
    "",
    " ",
    *AWKWARD.encode("ascii").decode("unicode_escape").strip("\n").replace("|", "\n").split("\n"),
]


def lines_of_text(count: int) -> list[str]:
    """Returns lines of Python's documentation and of eleven languages, plain and distorted.

    Distorted lines are decomposed, fullwidth, or have random signs inserted.
    """
    chance = random.Random(5)
    corpus = sources.resolve(sources.parse("python_docs"))
    plain: list[str] = []
    for piece in corpus.pieces:
        for _, batch in sources.read(corpus, piece):
            for text in batch.column("text").to_pylist():
                plain += (text or "").splitlines()
        if len(plain) > count:
            break
    plain = plain[: count // 2]
    foreign = TEXTS.read_text().splitlines()
    signs = "\u200d\u200b\u00a0\u3000\t ①👍\ufe0f\u00ad½～<>▁"

    def distort(line: str) -> str:
        form = chance.choice(["NFC", "NFD", "NFKC", "NFKD"])
        letters = list(unicodedata.normalize(form, line))
        for _ in range(chance.randrange(4)):
            letters.insert(chance.randrange(len(letters) + 1), chance.choice(signs))
        if chance.random() < 0.2:
            letters = [chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in letters]
        return "".join(letters)

    distorted = [
        distort(chance.choice(foreign if chance.random() < 0.7 else plain))
        for _ in range(count - len(plain) - len(AWKWARD))
    ]
    return plain + distorted + AWKWARD


def train(lines=1500, **settings) -> vocabulary.Vocabulary:
    """Returns a small vocabulary, trained by SentencePiece on the lines above."""
    model, given = io.BytesIO(), iter(lines_of_text(lines))
    settings = {"vocab_size": 800, "character_coverage": 0.99, **settings}
    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "minloglevel": 2, "num_threads": 1}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=given, model_writer=model, **ids, **settings
    )
    return vocabulary.from_bytes(add_sentinels(model.getvalue(), 100))


KINDS = {
    "t5": {},
    "byte_fallback": {"byte_fallback": True},
    "nfkc_cf": {"normalization_rule_name": "nfkc_cf"},
    "kept_whitespace": {"normalization_rule_name": "identity", "add_dummy_prefix": False,
        "remove_extra_whitespaces": False, "byte_fallback": True},
    "symbols": {"user_defined_symbols": ["<code>", "::", "=="]},
    "bpe": {"model_type": "bpe"},
    "bpe_byte_fallback": {"model_type": "bpe", "byte_fallback": True},
}  # fmt: skip


def load(folder, words, *roles):
    """Returns the tokenizer as loaded by transformers."""
    from transformers import AutoTokenizer

    tokenizer.write(str(folder), words, *roles)
    return AutoTokenizer.from_pretrained(folder)


def cost(words, ids) -> float:
    """Returns the score of a segmentation; special pieces score like unknown characters."""
    scores = [words.processor.get_score(int(token)) for token in ids]
    kinds = words.ids.kinds
    least = min(words.processor.get_score(n) for n, kind in enumerate(kinds) if kind == NORMAL)
    return sum(
        score if kinds[token] == NORMAL else least - 10
        for token, score in zip(ids, scores, strict=True)
    )


def check(folder, words, texts, ties: float):
    """Asserts that ids equal SentencePiece's, up to a share of `ties` with the same score."""
    theirs = load(folder, words)
    match = tokenizer.compare(theirs, words, texts)
    assert match.texts == len(texts)
    assert match.ties == len(match.different)
    for text in match.different:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        expected = words.encode([text])[0].tolist()
        assert abs(cost(words, ids) - cost(words, expected)) < 1e-3, ascii(text)
    assert len(match.different) <= ties * len(texts)
    return match


@pytest.mark.parametrize("kind", ["t5", "byte_fallback", "kept_whitespace", "bpe"])
def test_ids_equal_those_of_sentencepiece(tmp_path, kind):
    check(tmp_path, train(**KINDS[kind]), lines_of_text(2000), ties=0.005)


@pytest.mark.parametrize("name", ["ties", "bytes"])
def test_an_export_follows_exact_sums_where_segmentations_nearly_tie(tmp_path, name):
    words = vocabulary.from_bytes(unigram_laws.MODELS[name])
    theirs = load(tmp_path, words)
    for text in unigram_laws.TEXTS:
        normal = words.codec.normalize(text)
        exact = unigram_laws.encode(words.model, normal, unigram_laws.EXACT)
        assert theirs(text, add_special_tokens=False)["input_ids"] == exact, text[:60]
    # Over the last, long text, SentencePiece's rounding adds up to more than a tie.
    match = tokenizer.compare(theirs, words, unigram_laws.TEXTS)
    assert (len(match.different), match.ties) == (3, 2)


SYMBOLS = ["\t", "\n", "\u00a0", "\u200b", "…", "①", "½", "㈱", "［＃］", "<code>", "@"]


@pytest.mark.parametrize(
    "settings",
    [
        {"normalization_rule_name": "nmt_nfkc"},
        {"normalization_rule_name": "nmt_nfkc_cf"},
        {"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
        {"model_type": "bpe"},
    ],
)
def test_symbols_that_the_rules_change_are_found_as_written(tmp_path, settings):
    symbols = [*SYMBOLS, "<INTEGER>"]
    words = train(lines=600, user_defined_symbols=symbols, **settings)
    chance = random.Random(1)
    texts = ["wait...", "1", "1⁄2", "(株)", "[#]", "<integer> x", *lines_of_text(400)]
    for text in [text for text in texts if text.strip()]:
        place, symbol = chance.randrange(len(text) + 1), chance.choice(symbols)
        space = chance.choice(["", " "])
        texts.append(f"{text[:place]}{space}{symbol}{space}{text[place:]}")
        texts.append(symbol + text)
    check(tmp_path, words, texts, ties=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ids_equal_those_of_sentencepiece_on_10_000_lines(tmp_path, kind):
    # SentencePiece cuts an odd run of a sign whose pair is a symbol at any place.
    symbols = tuple(KINDS[kind].get("user_defined_symbols", ["\0"]))
    lines = [line for line in lines_of_text(10_000) if not line.strip().startswith(symbols)]
    words = train(lines=10_000, vocab_size=3000, **KINDS[kind])
    match = check(tmp_path, words, lines, 0.005)
    print(f"{kind}: {len(match.different)} of {match.texts} lines are segmented as well otherwise")


@pytest.fixture(scope="module")
def words():
    return train(user_defined_symbols=["<code>"])


def test_sentinels_descend_from_the_last_id(tmp_path, words):
    theirs = load(tmp_path, words)
    assert theirs.convert_tokens_to_ids("<extra_id_0>") == words.size - 1
    assert theirs.convert_tokens_to_ids("<extra_id_99>") == words.size - 100
    assert len(theirs) == words.size
    assert (theirs.pad_token_id, theirs.eos_token_id, theirs.unk_token_id) == (0, 1, 2)
    # A sentinel absorbs the space before it; text after it begins a word only after a space.
    before, after, inside = (words.encode([t])[0].tolist() for t in ("the", "of", "@of"))
    assert words.processor.id_to_piece(inside[0]) == "▁"
    last = words.size - 1
    assert theirs("the <extra_id_0> of").input_ids == [*before, last, *after, 1]
    assert theirs("the <extra_id_0>@of").input_ids == [*before, last, *inside[1:], 1]
    assert theirs("the<extra_id_1>").input_ids == [*before, last - 1, 1]
    assert theirs("the", "of").input_ids == [*before, 1, *after, 1]


def test_texts_of_models_without_an_encoder_are_those_of_training(tmp_path, words):
    theirs = load(tmp_path, words)
    text = "The function returns None."
    ids = theirs(text).input_ids
    assert theirs.decode(ids, skip_special_tokens=True) == text == words.decode(ids)
    theirs = load(tmp_path, words, tokenizer.Roles(begins="<pad>", ends=False))
    ids = theirs("the").input_ids
    assert ids == [0, *words.encode(["the"])[0]]
    # Id 0 must be attended to, so it is not the padding token.
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (0, 1, 1)
    # A generated text follows its prompt, so there must be no padding between them.
    assert theirs.padding_side == "left"


def test_an_encoder_s_text_is_that_of_training(tmp_path, words):
    roles = tokenizer.Roles(begins="<extra_id_1>", mask="<extra_id_0>")
    theirs = load(tmp_path, words, roles)
    last = words.size - 1
    before, after = (words.encode([text])[0].tolist() for text in ("the", "of"))
    assert theirs("the [MASK] of".replace("[MASK]", theirs.mask_token)).input_ids == [
        *(last - 1, *before, last, *after, 1)
    ]
    assert (theirs.mask_token_id, theirs.cls_token_id, theirs.sep_token_id) == (last, last - 1, 1)
    pair = theirs("the", "of")
    assert pair.input_ids == [last - 1, *before, 1, *after, 1]
    first = 2 + len(before)
    assert pair.token_type_ids == [0] * first + [1] * (len(pair.input_ids) - first)


def test_the_folder_names_a_class_of_transformers_4_and_5(words):
    """Transformers 4 knows no TokenizersBackend, and reads extra_special_tokens as a mapping."""
    for roles in (
        tokenizer.Roles(),
        tokenizer.Roles(begins="<pad>", ends=False),
        tokenizer.Roles(begins="<extra_id_1>", mask="<extra_id_0>"),
    ):
        written = tokenizer.tokenizer_config(words, roles)
        assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert "extra_special_tokens" not in written
        named = {value for name, value in written.items() if name.endswith("_token")}
        sentinels = {f"<extra_id_{number}>" for number in range(100)}
        assert {*written["additional_special_tokens"]} == sentinels - named


def test_sentinels_that_the_model_lacks_are_added_and_others_rejected(tmp_path, words):
    bare = vocabulary.from_bytes(without_sentinels(words.model), extra_ids=100)
    assert bare.size == words.size
    theirs = load(tmp_path, bare)
    assert tokenizer.compare(theirs, bare, ["the text <code> of"]).different == []
    # Only transformers reads a sentinel that follows the model's own pieces.
    spelled = "the text <extra_id_0> of"
    match = tokenizer.compare(theirs, bare, [spelled])
    assert (match.different, match.ties) == ([spelled], 0)
    theirs = load(tmp_path, words)
    longer = vocabulary.from_bytes(add_sentinels(without_sentinels(words.model), 101))
    with pytest.raises(UserError, match="the tokenizer gives <extra_id_0> the ids"):
        tokenizer.compare(theirs, longer, [])


def test_models_unknown_to_tokenizers_are_rejected():
    with pytest.raises(UserError, match="neither a unigram nor a BPE model"):
        tokenizer.tokenizer_json(train(model_type="char"))
    with pytest.raises(UserError, match="remove_extra_whitespaces without add_dummy_prefix"):
        tokenizer.tokenizer_json(train(add_dummy_prefix=False))
