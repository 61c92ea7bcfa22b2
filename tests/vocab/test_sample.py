"""The sample that a vocabulary is trained on."""

import random

from hypothesis import given
from hypothesis import strategies as st

from vocab import sample

DOCUMENTS = [(f"id{i}", f"document number {i} " * (1 + i % 7)) for i in range(3000)]


def kept(documents, limit, seed=0):
    found = sample.Sample(limit, seed)
    for id, text in documents:
        found.add(id, text)
    assert found.bytes == sum(len(passage.encode()) for passage in found.passages())
    assert found.bytes <= limit
    return found


def test_the_sample_does_not_depend_on_the_order():
    shuffled = random.Random(0).sample(DOCUMENTS, len(DOCUMENTS))
    ours = kept(DOCUMENTS, 20_000)
    assert ours.passages() == kept(shuffled, 20_000).passages()
    assert ours.bytes > 19_000
    assert ours.seen == len(DOCUMENTS)
    assert ours.passages() != kept(DOCUMENTS, 20_000, seed=1).passages()


def test_the_sample_covers_the_whole_corpus():
    numbers = [int(text.split()[2]) for text in kept(DOCUMENTS, 30_000).passages()]
    for start in range(0, 3000, 500):
        share = sum(start <= number < start + 500 for number in numbers) / len(numbers)
        assert 0.08 < share < 0.26


def test_equal_passages_are_kept_or_left_together():
    documents = [(f"id{i % 20}", f"text {i % 20:02}") for i in range(200)]
    for limit in range(100, 1600, 70):
        found = kept(documents, limit).passages()
        assert found == kept(sorted(documents), limit).passages()
        assert {found.count(passage) for passage in found} <= {10}


def test_a_sample_with_room_keeps_everything():
    ours = kept(DOCUMENTS, 10**9)
    assert sorted(ours.passages()) == sorted(text.strip() for _, text in DOCUMENTS)


@given(st.text(st.sampled_from("ab.\n €"), max_size=300).map(lambda text: text * 60))
def test_passages_are_short_and_lose_nothing(text):
    found = list(sample.passages(text))
    assert all(0 < len(passage) <= sample.PASSAGE_CHARACTERS for passage in found)
    assert "".join("".join(found).split()) == "".join(text.split())


def test_passages_end_where_lines_or_sentences_do():
    lines = "a line of text.\n" * 1000
    assert all(passage.endswith("text.") for passage in sample.passages(lines))
    sentences = "One more sentence. " * 1000
    assert all(passage.endswith("sentence.") for passage in sample.passages(sentences))
    words = "word " * 5000
    assert {word for passage in sample.passages(words) for word in passage.split()} == {"word"}
