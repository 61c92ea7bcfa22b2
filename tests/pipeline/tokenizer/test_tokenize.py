"""The fast tokenizer returns SentencePiece's ids for any model and text, including ties."""

import io
import pathlib
import random

import numpy as np
import pyarrow as pa
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2

from pipeline.tokenizer import fast_tokenizer, tokenize, trie
from tasks import vocabulary
from tasks.reading import stdlib_docs
from tasks.terminal.command_line import UserError
from tests.support.processes import started

# Training options of SentencePiece by name; tests/laboratory/tokenizers.py draws more.
MODELS = {
    "unigram": {},
    "bytes": {"byte_fallback": True, "character_coverage": 0.98},
    "bpe": {"model_type": "bpe"},
    "bpe_bytes": {"model_type": "bpe", "byte_fallback": True, "character_coverage": 0.98},
}
TEXTS = pathlib.Path(__file__).with_name("texts.txt")


def corpus() -> list[str]:
    lines = TEXTS.read_text().splitlines()
    return lines + [line for text in stdlib_docs.documents().values() for line in text.splitlines()]


@pytest.fixture(scope="module")
def models() -> dict[str, bytes]:
    lines = [line for line in corpus() if line.strip()]
    sample = random.Random(0).sample(lines, 3000) + TEXTS.read_text().splitlines()
    trained = {}
    for name, options in MODELS.items():
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sample), model_writer=model, vocab_size=2000, pad_id=0,
            eos_id=1, unk_id=2, bos_id=-1, hard_vocab_limit=False, num_threads=2, minloglevel=2,
            **options,
        )  # fmt: skip
        trained[name] = model.getvalue()
    return trained


def changed(model: bytes, change) -> bytes:
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    change(proto)
    return proto.SerializeToString()


def both(model: bytes):
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return fast_tokenizer.from_model(model, processor), processor


def assert_equal(fast, processor, texts: list[str]) -> None:
    tokens, lengths = fast.encode(pa.array(texts, pa.large_string()))
    ends = np.cumsum(lengths)
    for text, begin, end in zip(texts, ends - lengths, ends, strict=True):
        assert tokens[begin:end].tolist() == processor.encode(text), text[:200]


@pytest.mark.processes
@pytest.mark.parametrize("name", MODELS)
def test_real_text(models, name):
    fast, processor = both(models[name])
    lines = corpus()
    texts = ["\n".join(lines[start : start + 50]) for start in range(0, 20000, 50)]
    assert_equal(fast, processor, texts)
    # Far into a document the float32 score is coarse and decides ties.
    assert_equal(fast, processor, ["\n".join(texts), "\n".join(texts[::-1])])
    assert fast.refused == 0


_loaded: dict[str, tuple] = {}


def both_of(models, name):
    if name not in _loaded:
        _loaded[name] = both(models[name])
    return _loaded[name]


@pytest.mark.parametrize("name", ["unigram", "bytes", "bpe"])
def test_long_texts_without_a_space(models, name):
    fast, processor = both(models[name])
    generator = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyzșțăâî中文字"
    texts = ["a" * 100_000, "".join(generator.choices(letters, k=200_000)), "ab" * 30_000 + "🇷🇴"]
    assert_equal(fast, processor, texts)
    # BPE would take quadratic time, so SentencePiece encodes it.
    assert (fast.refused > 0) == (name == "bpe")


def test_zero_bytes_without_normalisation_take_linear_time(models):
    def plain(proto):
        proto.normalizer_spec.precompiled_charsmap = b""

    fast, processor = both(changed(models["unigram"], plain))
    assert_equal(fast, processor, ["\0" * 5000 + "a", "\0a\0\0b"])
    tokens, _ = fast.encode(pa.array(["\0" * 2_000_000]))  # hours if in quadratic time
    assert tokens.tolist() == processor.encode("\0")


@pytest.mark.parametrize("name", ["unigram", "bytes", "bpe"])
def test_a_small_memo_forgets(models, name, monkeypatch):
    monkeypatch.setattr(fast_tokenizer, "_MEMO_BYTES", 1 << 14)
    fast, processor = both(models[name])
    assert_equal(fast, processor, corpus()[:3000])
    assert_equal(fast, processor, corpus()[:3000][::-1])


def test_scores_that_nearly_tie(models):
    """Pieces differ in score by less than float32 can resolve at a long document's score."""

    def flatten(proto):
        generator = random.Random(2)
        for piece in proto.pieces:
            if piece.type == piece.NORMAL:
                piece.score = -3.0 * len(piece.piece) + generator.choice([0, 1e-6, -1e-6, 3e-5])

    fast, processor = both(changed(models["unigram"], flatten))
    lines = corpus()[:8000]
    assert_equal(fast, processor, [*lines[:500], "\n".join(lines)])
    # The memo alone would be wrong here: the same words are cut differently in one document.
    whole = processor.encode("\n".join(lines))
    assert whole != [token for line in lines for token in processor.encode(line)]


def test_a_word_far_into_a_document(models):
    """Only the score before the word makes its memo uncertain: no other word sums it up."""

    def few(proto):
        del proto.pieces[3:]
        scores = {"\u2581": -3, "a": -3, "b": -3, "c": -3, "x": -3, "\u2581x": -3}
        for piece, score in {**scores, "ab": -4, "bc": -4.002}.items():
            proto.pieces.add(piece=piece, score=score)

    fast, processor = both(changed(models["unigram"], few))
    texts = ["abc", *("x " * count + "abc" for count in range(20_000, 40_000, 1_000))]
    assert len({tuple(processor.encode(text)[-3:]) for text in texts}) == 2
    assert_equal(fast, processor, texts)


_BESIDE = (
    "e\u0301",
    ".e\u0301",
    " \u0308",
    "\u0308",
    "ș",
    "…",
    "\0",
    "\u2581",
    "\u3000",
    "中文",
    "",
)


def plain_texts(count: int) -> list[str]:
    """Returns long runs of plain words, amid characters that normalisation may change."""
    draw = random.Random(3)
    words = sorted({word for line in corpus() if line.isascii() for word in line.split()})
    gaps = (" ", " ", " ", "  ", "\n", "\n    ", "\t", "", ". ", " (", "x" * 70, "-" * 40)

    def run() -> str:
        drawn = draw.choices(words, k=draw.randrange(60))
        return "".join(word + draw.choice(gaps) for word in drawn) + draw.choice(_BESIDE)

    return ["".join(run() for _ in range(draw.randrange(1, 8))) for _ in range(count)]


@pytest.mark.parametrize("removes", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_plain_text_beside_other_characters(models, name, removes):
    def spaces(proto):
        proto.normalizer_spec.remove_extra_whitespaces = removes

    assert_equal(*both(changed(models[name], spaces)), plain_texts(300))


@pytest.mark.parametrize("name", ["unigram", "bpe"])
def test_pieces_that_join_letters_and_signs(models, name):
    def join(proto):
        for number, piece in enumerate(("C+", "n'", "e.", "(s", "o.", "'t")):
            proto.pieces.add(piece=piece, score=-0.5 - number)

    made = changed(models[name], join)
    texts = [text.replace("t ", "n't ").replace("s ", "C+ ") for text in plain_texts(100)]
    assert_equal(*both(made), texts)
    proto = sentencepiece_model_pb2.ModelProto.FromString(made)
    ids = sentencepiece.SentencePieceProcessor(model_proto=made).encode("\n".join(texts))
    assert {proto.pieces[number].piece for number in ids} >= {"C+", "e.", "o."}


@pytest.mark.parametrize("name", ["unigram", "bpe"])
def test_a_piece_with_a_line_end_before_a_space(models, name):
    def lines(proto):
        proto.normalizer_spec.precompiled_charsmap = b""
        for piece in ("\n\u2581", "\n"):
            proto.pieces.add(piece=piece, score=-0.5)

    assert_equal(*both(changed(models[name], lines)), ["some\n words", "\n ".join("abcdef" * 30)])


@pytest.mark.parametrize("name", ["unigram", "bpe"])
def test_a_letter_after_a_sign_combines_with_what_follows(models, name):
    """The letter alone would begin a word; as part of é it does not."""

    def join(proto):
        proto.pieces.add(piece=".é", score=-0.5)

    plain = "some plain words " * 30
    texts = [f"{plain}{'o' * count}.e\u0301 {plain}" for count in range(64)]
    assert_equal(*both(changed(models[name], join)), texts)


def test_unused_pieces(models):
    def unused(proto):
        for number in range(300, 1500, 7):
            proto.pieces[number].type = proto.pieces[number].UNUSED

    fast, processor = both(changed(models["unigram"], unused))
    assert_equal(fast, processor, corpus()[:5000])
    with pytest.raises(fast_tokenizer.Unsupported, match="unused pieces"):
        both(changed(models["bpe"], unused))


def test_control_pieces_that_text_may_hold(models):
    """SentencePiece takes a control piece for a normal one of the same text."""

    def control(text):
        def change(proto):
            proto.pieces.add(piece=text, score=0, type=proto.pieces[0].CONTROL)

        return change

    normal = sentencepiece.SentencePieceProcessor(model_proto=models["bpe"]).id_to_piece(700)
    for text in ("q", normal):
        with pytest.raises(fast_tokenizer.Unsupported, match="control piece"):
            both(changed(models["bpe"], control(text)))
    fast, processor = both(changed(models["bpe"], control("never so")))
    assert_equal(fast, processor, corpus()[:100])


def test_tables_are_cached_and_repaired(models, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    both(models["unigram"])
    (kept,) = (tmp_path / "palimpsest").iterdir()
    whole = kept.read_bytes()
    monkeypatch.setattr(fast_tokenizer, "_pieces", None)  # making the tables again would fail
    assert_equal(*both(models["unigram"]), corpus()[:100])
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torn = whole.replace(b"{'descr'", b"('descr'")  # NumPy raises what Python's tokenize does
    halves = whole[: len(whole) // 2], whole[:-30], b""
    for damaged in (*halves, whole.replace(b"trie", b"tree"), torn):
        kept.write_bytes(damaged)
        assert_equal(*both(models["unigram"]), corpus()[:100])
        assert kept.read_bytes() == whole
    both(models["bpe"])
    assert len(list((tmp_path / "palimpsest").iterdir())) == 2


def test_unsupported_models_are_left_to_sentencepiece(models, tmp_path):
    def word(proto):
        proto.trainer_spec.model_type = proto.trainer_spec.WORD

    loaded = vocabulary.from_bytes(changed(models["unigram"], word))
    tokenizer = tokenize.Tokenizer(loaded)
    assert "neither unigram nor BPE" in tokenizer.refusal
    tokens, _ = tokenizer.encode(pa.array(["a b", "c"]))
    assert tokens.tolist() == [*loaded.processor.encode("a b"), *loaded.processor.encode("c")]
    assert tokenizer.documents == {"encoded": 2, "left to the library": 2, "audited": 0}


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_slices_and_empty_arrays(models, kind):
    fast, processor = both_of(models, "unigram")
    texts = pa.array(["one", "", "two three", " ", "four"], kind)
    for array in (texts, texts[1:4], texts[2:2], pa.array([], kind)):
        tokens, lengths = fast.encode(array)
        expected = [processor.encode(text) for text in array.to_pylist()]
        assert lengths.tolist() == [len(ids) for ids in expected]
        assert tokens.tolist() == [token for ids in expected for token in ids]


@pytest.mark.parametrize("engine", tokenize.ENGINES)
def test_both_engines_count_and_agree(models, engine):
    loaded = vocabulary.from_bytes(models["unigram"])
    tokenizer = tokenize.Tokenizer(loaded, engine)
    texts = corpus()[:4000]
    tokens, lengths = tokenizer.encode(pa.array(texts))
    assert tokens.tolist() == [token for text in texts for token in loaded.processor.encode(text)]
    assert tokenizer.documents["encoded"] == len(texts) == len(lengths)
    if engine == tokenize.FAST:
        size = sum(len(text.encode()) for text in texts)
        assert 0 < tokenizer.documents["audited"] < len(texts) / 20
        assert tokenizer._audited <= size / 256 + max(map(len, texts))


def test_long_texts_are_audited_by_their_beginning(models, monkeypatch):
    loaded = vocabulary.from_bytes(models["unigram"])
    tokenizer = tokenize.Tokenizer(loaded)
    texts = ["short", "\n".join(corpus()[:9000]), "last"]
    assert len(texts[1]) > 4 * tokenize._AUDITED_BYTES
    given = []
    monkeypatch.setattr(
        loaded.processor, "encode", lambda texts, **_: given.extend(texts) or real(texts)
    )
    real = sentencepiece.SentencePieceProcessor(model_proto=loaded.model).encode
    tokens, _ = tokenizer.encode(pa.array(texts))
    assert tokens.tolist() == [token for text in texts for token in real(text)]
    assert sum(map(len, given)) <= tokenize._AUDITED_BYTES
    assert tokenizer.documents["audited"] == 2


def test_the_audit_stops_at_a_difference(models, monkeypatch):
    tokenizer = tokenize.Tokenizer(vocabulary.from_bytes(models["unigram"]))
    tokenizer.encode(pa.array(["sound"]))
    real = tokenizer._fast.encode

    def wrong(texts):
        tokens, lengths = real(texts)
        tokens[0] += 1
        return tokens, lengths

    monkeypatch.setattr(tokenizer._fast, "encode", wrong)
    tokenizer._seen = tokenizer._audited = 0
    with pytest.raises(UserError, match=r"differs from SentencePiece on the text 'one text'"):
        tokenizer.encode(pa.array(["one text"]))


keys = st.dictionaries(
    st.binary(min_size=1, max_size=6).map(lambda key: bytes(1 + byte % 254 for byte in key)),
    st.integers(0, 2**24 - 2),
    max_size=200,
)


def longest_key(nodes: np.ndarray, data: bytes) -> tuple[int, int]:
    """Reads a trie as pipeline/native/trie.h describes it: (bytes, value) of the longest key."""
    node, found = int(nodes[0]), (0, -1)
    for place, byte in enumerate(data):
        node = int(nodes[(node >> 32) ^ byte])
        if node & 0xFF != byte:
            break
        if node >> 8 & 0xFFFFFF:
            found = place + 1, (node >> 8 & 0xFFFFFF) - 1
    return found


@given(keys, st.binary(max_size=40))
def test_trie(pairs, text):
    built = trie.build(pairs.items())
    text = bytes(byte % 254 for byte in text) + b"".join(pairs)[:40]
    for at in range(len(text)):
        found = [key for key in pairs if text.startswith(key, at)]
        longest = max(found, key=len, default=b"")
        expected = (len(longest), pairs[longest]) if longest else (0, -1)
        assert longest_key(built, text[at:]) == expected


@pytest.mark.processes
def test_a_machine_without_a_cache_for_compiled_code():
    """Every process compiles, instead of failing at import."""
    code = (
        "import numba.core.caching as caching\n"
        "def unwritable(*_): raise OSError('read-only')\n"
        "for name in dir(caching):\n"
        "    kind = getattr(caching, name)\n"
        "    if hasattr(kind, 'ensure_cache_path'): kind.ensure_cache_path = unwritable\n"
        "import numpy as np\n"
        "from tasks.cache import loops\n"
        "assert not loops.rows_at.stats.cache_path\n"
        "print(loops.rows_at(np.zeros(1, np.int64), np.zeros(1, np.int64))[0] == 0)\n"
    )
    done = started("-c", code)
    assert done.stdout == "True\n", done.stderr


def test_a_nul_does_not_lead_from_a_leaf_of_the_trie_back_to_its_root():
    made = trie.build([(b"a", 0), (b"bc", 1)])
    assert longest_key(made, b"a\0bc") == (1, 0)
    assert longest_key(made, b"\0bc") == (0, -1)
    assert longest_key(trie.build([]), b"\0bc") == (0, -1)


def test_a_nul_between_two_characters_in_one_segment(models):
    """A segment holds a NUL where the hashed set of pairs errs on both of its sides."""
    characters = [chr(point) for point in range(0x4E00, 0x5E00)]

    def add(proto):
        known = {piece.piece for piece in proto.pieces}
        for character in characters:
            if character not in known:
                proto.pieces.add(piece=character, score=-9.0)
            proto.pieces.add(piece=character + chr(ord(character) + 1), score=-15.0)

    fast, processor = both(changed(models["unigram"], add))
    pairs = fast._tables["pairs"]

    def hit(left, right):
        """Returns whether the set has a pair, by the hash of pipeline/native/cuts.h."""
        mixed = (left * 0x9E3779B97F4A7C15 + right) % 2**64
        mixed = ((mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9) % 2**64 >> 20
        return bool(int(pairs[(mixed >> 6) % len(pairs)]) >> mixed % 64 & 1)

    before = [character for character in characters if hit(ord(character), 0)][:10]
    after = [character for character in characters if hit(0, ord(character))][:10]
    assert before
    assert after
    assert_equal(fast, processor, [f"{a}\0{b}" for a in before for b in after])
