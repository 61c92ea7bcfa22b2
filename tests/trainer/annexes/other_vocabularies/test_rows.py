"""Rows for another vocabulary: by piece, by role, by number, by id_map.json."""

import numpy as np
import pytest

from tasks import vocabulary
from tasks.terminal.command_line import UserError
from tests.support import small_tokenizers
from trainer.annexes.other_vocabularies import rows
from trainer.annexes.other_vocabularies.rows import NONE, by_map, by_piece

PADDING = 5


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    lines = " ".join(small_tokenizers.documents(60)).splitlines()
    return {
        kind: vocabulary.load(make(folder / kind, lines), 10).ids
        for kind, make in small_tokenizers.KINDS.items()
    }


def line(found, token):
    return [row for row in found.sources[token].tolist() if row != NONE]


def text(ids, token):
    found = ids.texts[token]
    return found if isinstance(found, bytes) else found.encode()


@pytest.mark.parametrize("kind", small_tokenizers.KINDS)
def test_the_same_vocabulary_keeps_its_rows(kind, loaded):
    ids = loaded[kind]
    same = by_piece(ids, ids, ids.size + PADDING, ids.size + PADDING)
    assert same.unchanged
    assert (same.carried, same.spelled, same.others, same.dropped) == (ids.size, 0, 0, 0)
    more = by_piece(ids, ids, ids.size + 2, ids.size + PADDING)
    assert more.begins_equal
    assert not more.unchanged
    # Rows of padding are those of the old padding, in turn.
    found = [line(more, ids.size + number)[0] - ids.size for number in range(PADDING)]
    assert found == [0, 1, 0, 1, 0]
    none = by_piece(ids, ids, ids.size, ids.size + 1)
    assert line(none, ids.size) == []


@pytest.mark.parametrize("old", small_tokenizers.KINDS)
@pytest.mark.parametrize("new", small_tokenizers.KINDS)
def test_every_row_is_made_of_the_pieces_that_spell_it(old, new, loaded):
    before, after = loaded[old], loaded[new]
    found = by_piece(before, after, before.size, after.size)
    assert line(found, after.special.eos) == [before.special.eos]
    assert line(found, after.special.start) in ([before.special.start], [before.special.eos])
    for number in range(10):  # sentinels
        assert line(found, after.size - 1 - number) == [before.size - 1 - number]
    special = set(vars(after.special).values())
    checked = 0
    for token in range(min(after.first_sentinel, len(after.pieces))):
        spelled = line(found, token)
        if token in special or not text(after, token) or after.kinds[token] in (2, 3, 5):
            continue
        joined = b"".join(text(before, row) for row in spelled)
        wanted = text(after, token)
        assert not spelled or joined.strip(b" ") == wanted.strip(b" "), (token, wanted, joined)
        checked += bool(spelled)
    assert checked > 0
    assert found.carried + found.spelled + found.others == after.size


def test_marks_of_spaces_and_of_inner_pieces_are_the_same_text(loaded):
    gpt2, llama, bert = (loaded[kind] for kind in ("gpt2", "llama", "bert"))
    found = by_piece(gpt2, llama, gpt2.size, llama.size)
    assert line(found, llama.find("▁the")) == [gpt2.find("Ġthe")]
    inner = next(each for each in llama.pieces if len(each) > 1 and each in gpt2.pieces)
    assert line(found, llama.find(inner)) == [gpt2.find(inner)]
    assert line(found, llama.find("<0x41>")) == [gpt2.find("A")]
    found = by_piece(bert, gpt2, bert.size, gpt2.size)
    assert line(found, gpt2.find("Ġthe")) == [bert.find("the")]
    inner = next(each for each in gpt2.pieces if len(each) > 1 and f"##{each}" in bert.pieces)
    assert line(found, gpt2.find(inner)) == [bert.find(f"##{inner}")]
    # Case is kept: a vocabulary without it has no row for this piece.
    assert line(found, gpt2.find("A")) == []


def test_a_new_piece_is_spelled_by_the_fewest_and_longest_first(loaded):
    class Pieces(rows._Pieces):
        def __init__(self, *texts):
            super().__init__((rows._Piece(row, each, 1), each.encode())
                             for row, each in enumerate(texts))  # fmt: skip

    pieces = Pieces("a", "b", "ab", "abc", "c", "bc", "cab")
    assert pieces.spelling(b"abcab") == [3, 2]
    assert pieces.spelling(b"abab") == [2, 2]
    assert pieces.spelling(b"aabc") == [0, 3]
    assert pieces.spelling(b"abcbc") == [3, 5]
    assert pieces.spelling(b"abx") is None


def test_a_byte_spells_only_what_no_other_piece_does():
    old = ["<0x61>", "<0x7A>", "a", "b"]
    kinds, texts = [6, 6, 1, 1], [b"a", b"z", b"a", b"b"]
    pieces = rows._Pieces(
        (rows._Piece(row, name, kind), text)
        for row, (name, kind, text) in enumerate(zip(old, kinds, texts, strict=True))
    )
    assert pieces.spelling(b"abz") == [2, 3, 1]


def test_a_map_moves_rows_and_names_what_is_wrong(loaded):
    ids = loaded["llama"]
    id_map = [
        *range(ids.first_sentinel - 3), None, None, None, *range(ids.first_sentinel, ids.size),
    ]  # fmt: skip
    found = by_map(id_map, ids, ids.size, ids.size)
    assert (found.carried, found.dropped) == (ids.size - 3, 3)
    token = ids.first_sentinel - 1  # spelled by its byte
    spelled = b"".join(text(ids, row) for row in line(found, token))
    assert spelled == text(ids, token)
    assert line(found, token) != [token]
    for wrong, words in (
        ([0, 0], "two old ids the same"),
        ([ids.size], "not below"),
        ([*range(ids.size), None], "its table"),
    ):
        with pytest.raises(UserError, match=words):
            by_map(wrong, ids, ids.size, ids.size)


def test_vocabularies_without_a_common_piece_are_refused(loaded, tmp_path):
    foreign = small_tokenizers.bert(tmp_path / "foreign", ["абв где жзи клм"] * 3)
    with pytest.raises(UserError, match="no piece of text in common"):
        by_piece(vocabulary.load(foreign).ids, loaded["bert"], 500, 500)
    with pytest.raises(UserError, match=r"the old vocabulary has .* ids, but its table 100 rows"):
        by_piece(loaded["bert"], loaded["bert"], 100, 500)


def test_numbers_are_said(loaded):
    ids = loaded["gpt2"]
    found = by_piece(ids, loaded["byte"], ids.size, loaded["byte"].size)
    assert str(found) == "269 rows carried, 0 made, 172 dropped".replace(
        "172", f"{ids.size - len(np.unique(found.sources[:269]))}"
    )
