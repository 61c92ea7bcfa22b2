"""The words counted are the words that SentencePiece's trainers would see."""

import io
from collections import Counter
from hashlib import blake2b

import numpy as np
import pyarrow as pa
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks import vocabulary
from tasks.reading import stdlib_docs
from tasks.terminal.command_line import UserError
from tests.support.counted_words import passages, words_of
from vocab import learn, protos, word_splitter
from vocab.count import Counts


def splitter(*symbols, name="nmt_nfkc", keep=False):
    return word_splitter.Splitter(word_splitter.normaliser(name, keep, symbols), symbols, keep)


def counted(splitter, texts, limit=1 << 40):
    """Returns the words' counts, and the bytes of text of every batch of `limit` bytes."""
    counter, found, sizes = splitter.counter(), Counter(), []

    def take():
        words, counts, hashes, size = counter.take()
        sizes.append(size)
        digests = (blake2b(word.encode(), digest_size=8).digest() for word in words.to_pylist())
        assert hashes.tolist() == list(map(int.from_bytes, digests))
        assert len(set(hashes.tolist())) == len(words)
        found.update(dict(zip(words.to_pylist(), counts.tolist(), strict=True)))

    for _ in counter.add(pa.array(texts, pa.large_string()), limit):
        take()
    take()
    return found, sizes


SYMBOLS = ("<s>", "<s><t>", "世", "\n", "\n\n", "ab")
SPLITTERS = [
    splitter(),
    splitter("<s>", "<s><t>", "世", name="nmt_nfkc_cf"),
    splitter(*SYMBOLS, name="nfkc_cf", keep=True),
    splitter(*SYMBOLS, name="identity", keep=True),
    splitter(name="identity"),
]
PARTS = st.one_of(
    st.characters(exclude_categories=["Cs"]),
    st.sampled_from([*SYMBOLS, *word_splitter._NEVER, *" .▁!aZé́ＡﬁＫ가ก々ʰ₂\u3000\x01\x7f", ". "]),
    st.sampled_from("ab<世🙂").map(lambda character: character * 300),
)


@settings(max_examples=60)
@given(st.lists(PARTS, max_size=20).map("".join), st.integers(1, 50))
@pytest.mark.parametrize("splitter", SPLITTERS)
def test_counts_equal_those_of_regular_expressions_and_sentencepiece(splitter, text, times):
    texts = [text * (times if len(text) < 200 else 1), "", text]
    found, sizes = counted(splitter, texts)
    assert found == Counter(words_of(splitter, texts))
    assert sizes == [sum(len(text.encode()) for text in texts)]


@pytest.mark.parametrize("word", ["{}", "a-rather-long-word-number-{}"])
def test_any_number_of_distinct_words_is_counted(word):
    words = [word.format("abcdefghij"[i % 10] + f"ñ{i:06}é") for i in range(40_000)]
    found, _ = counted(SPLITTERS[4], [" ".join(words), "", " ".join(words[::2])])
    assert found == Counter(words_of(SPLITTERS[4], [" ".join(words), " ".join(words[::2])]))


HALF = word_splitter.PASSAGE_CHARACTERS // 2
# A mark that ends just before, at or after the earliest place where a passage may end.
EDGES = [
    "é" * (HALF - place) + mark + weaker * HALF
    for mark, weaker in (("\n", ". é"), (". ", " é"), (" ", "aé"))
    for place in range(4)
]


def check_passages(document):
    expected = [len(each.encode()) for each in passages(document)]
    _, sizes = counted(SPLITTERS[4], [document], limit=1)  # each passage fills a batch
    assert sizes == [*expected, 0]


@given(st.text(st.sampled_from("ab.\n €é") | st.sampled_from("b€é"), max_size=200))
def test_passages_end_at_lines_sentences_or_spaces(text):
    check_passages(text * 60)


@pytest.mark.parametrize("document", EDGES, ids=range(len(EDGES)))
def test_passages_end_in_their_second_half(document):
    check_passages(document)
    first = len(next(passages(document)).encode())
    assert counted(SPLITTERS[4], [document], limit=first)[1][0] == first


def test_a_vocabulary_with_bare_spaces_is_refused():
    proto = protos.proto_of(splitter().model)
    proto.normalizer_spec.escape_whitespaces = False
    bare = word_splitter.Splitter(proto.SerializeToString(), (), False)
    with pytest.raises(UserError, match=r"--extend: .*: its spaces are not escaped"):
        bare.counter()


def test_words_are_normalised_and_cut_between_letters_and_signs():
    counts, _ = counted(splitter(), ["The  ｆｕｌｌ word, a\tword. don't", "世界、你好。"])
    assert counts == {
        "▁The": 1, "▁full": 1, "▁word": 2, ",": 1, "▁a": 1, ".": 1, "▁don": 1, "'": 1, "t": 1,
        "▁世界、你好。": 1,
    }  # fmt: skip
    assert counted(splitter(name="nmt_nfkc_cf"), ["The THE the"])[0] == {"▁the": 3}


def test_words_are_cut_at_symbols():
    counts, _ = counted(splitter("<s>", "<s><t>"), ["a<s>b <s><t>c"])
    assert counts == {"▁a": 1, "b": 1, "▁": 1, "c": 1}


def test_runs_of_spaces_belong_to_the_word_after_them():
    splits = splitter("\n", "\t", name="identity", keep=True)
    counts, _ = counted(splits, ["if x:\n    y  \n"])
    assert counts == {"if": 1, "▁x": 1, ":": 1, "▁▁▁▁y": 1, "▁▁": 1}


def test_long_words_are_cut():
    counts, _ = counted(splitter(), ["ก" * 1000])
    longest = word_splitter.LONGEST_WORD
    assert sorted(map(len, counts)) == [1001 - 3 * longest, longest, 256]
    assert sum(len(word) * count for word, count in counts.items()) == 1001


def raw_model(texts, **options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, normalization_rule_name="nmt_nfkc",
        max_sentence_length=1 << 20, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
        **options,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def counted_model(texts, **options):
    counts, _ = counted(splitter(), texts)
    order = sorted(counts, key=lambda word: (-counts[word], word))
    numbers = np.array([counts[word] for word in order], np.int64)
    plain = dict.fromkeys(("byte_fallback", "split_digits", "allow_whitespace_only_pieces"), False)
    settings = {**plain, "max_sentencepiece_length": 16, **options}
    found = learn.learn(settings, Counts(pa.array(order, pa.large_string()), numbers, 1.0, {}))
    return sentencepiece.SentencePieceProcessor(model_proto=found)


def pieces(processor):
    return [processor.id_to_piece(i) for i in range(processor.get_piece_size())]


MIXED = [
    "Ein Wort, zwei Wörter; „drei“ µ-Wörter (vier). 5,5 ºC!",
    "Καλημέρα κόσμε, τι κάνεις; Γεια!",
    "Привет, мир! Как дела? 2024-й год.",
    "שלום, עולם! مرحبا، بالعالم. नमस्ते, दुनिया। สวัสดี,ชาวโลก",
    "东京、大阪。「コーヒー」をください!한국어, 만세!",
]


def test_bpe_learns_the_same_merges_from_words_as_from_text():
    # BPE counts pairs and never rounds, so equal merges show that the cuts change nothing.
    texts = [*list(stdlib_docs.documents().values())[:150], *MIXED * 20]
    texts = [line for text in texts for line in text.splitlines() if line.strip()]
    options = {"model_type": "bpe", "vocab_size": 1200, "character_coverage": 1.0}
    assert pieces(counted_model(texts, **options)) == pieces(raw_model(texts, **options))


@pytest.mark.processes
def test_a_unigram_model_from_words_is_as_good_as_one_from_text():
    documents = [text for text in stdlib_docs.documents().values() if len(text) < 8000]
    held, seen = documents[::10], [text for i, text in enumerate(documents) if i % 10]
    seen = [line for text in seen for line in text.splitlines() if line.strip()]
    options = {"model_type": "unigram", "vocab_size": 4000, "character_coverage": 0.9995}
    ours, theirs = counted_model(seen, **options), raw_model(seen, **options)
    # The counted model has no normaliser, so both get text as nmt_nfkc normalises it.
    held = [" ".join(text.split()) for text in held]
    spaced = ["▁" + text.replace(" ", "▁") for text in held]

    def measures(processor, texts):
        ids = [token for text in texts for token in processor.encode(text)]
        likelihood = sum(processor.get_score(i) for i in ids if i != vocabulary.UNK_ID)
        return len(ids), likelihood

    tokens, likelihood = measures(ours, spaced)
    raw_tokens, raw_likelihood = measures(theirs, held)
    assert tokens < 1.01 * raw_tokens
    assert likelihood > 1.01 * raw_likelihood
