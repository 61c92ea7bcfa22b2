"""Lists of paragraphs: what builds cut, and what verification knows of it."""

import json
import shutil

import pytest

from pipeline import verify
from pipeline.exclusion.lists import EXACT, NEAR
from tasks import annexes
from tasks.terminal.command_line import UserError
from tests.pipeline.annexes.deduplication.texts import entries, search, sha256, words, write

needs_filters = pytest.mark.skipif(not annexes.entries("filters"), reason="without filters")


def test_paragraphs_are_cut(tmp_path, build):
    header = "This very same notice of eight words and more begins every page."
    pages = [" ".join(words(40, number)) for number in range(20)]
    texts = [(f"p{number}", f"{header}\n\n{page}") for number, page in enumerate(pages)]
    texts += [("only", header), ("short", "the end"), ("short2", "the end")]
    corpus = write(tmp_path / "c.jsonl", texts)
    found = search(corpus, tmp_path / "out", "--unit=paragraph")
    assert [row["paragraph"] for row in found] == [0] * 20
    list_path = tmp_path / "out" / "exclude.arrow"
    cache = build(tmp_path / "a", f"--corpus={corpus}?validation=0", f"--exclude={list_path}")
    receipt = json.loads(next(cache.glob("train.receipt*")).read_text())
    assert receipt["cut_paragraphs"] == 20
    assert receipt["dropped"] == {f"{EXACT}, every paragraph": 1}
    kept = [(name, text if name == "p0" else text.removeprefix(header)) for name, text in texts]
    clean = write(tmp_path / "d.jsonl", [each for each in kept if each[1]])
    other = build(tmp_path / "b", f"--corpus={clean}?validation=0")
    rows = [next(each.glob("train.tfrecord*")).read_bytes() for each in (cache, other)]
    assert rows[0] == rows[1]


@pytest.mark.skipif(not annexes.entries("exclude_lists"), reason="no lists of other files")
def test_a_list_of_paragraphs_for_a_changed_corpus(tmp_path, build, capsys):
    header = "This very same notice of eight words and more begins every page."
    texts = [(f"p{number}", f"{header}\n{' '.join(words(40, number))}") for number in range(9)]
    search(write(tmp_path / "c.jsonl", texts), tmp_path / "out", "--unit=paragraph")
    texts[3] = ("p3", None)
    changed = write(tmp_path / "c.jsonl", texts)
    given = f"--exclude={tmp_path}/out/exclude.arrow"
    flags = (f"--corpus={changed}?validation=0", "--max_quarantined=1")
    cache = build(tmp_path / "a", *flags, given)
    said = capsys.readouterr().out
    assert "8 of its 8 entries are of this corpus" in said  # judging by their ids
    assert "1 of 8 listed paragraphs are not in the corpus" in said
    receipt = json.loads(next(cache.glob("train.receipt*")).read_text())
    assert (receipt["cut_paragraphs"], receipt["dropped"]) == (7, {"null": 1})
    assert verify.main([f"--cache={cache}"]) == 0


def test_a_listed_paragraph_and_a_null_document_of_the_same_id(tmp_path, build):
    notice = " ".join(words(9, 1))
    texts = [("1", notice), ("2", f"{notice}\nmore"), ("2", None), ("3", "fine")]
    corpus = write(tmp_path / "c.jsonl", texts)
    assert len(search(corpus, tmp_path / "out", "--unit=paragraph")) == 1
    flags = (f"--corpus={corpus}?validation=0", "--max_quarantined=1")
    cache = build(tmp_path / "a", *flags)
    build(tmp_path / "a", *flags, f"--exclude={tmp_path}/out/exclude.arrow")
    receipt = json.loads(next(cache.glob("train.receipt*")).read_text())
    assert (receipt["cut_paragraphs"], receipt["dropped"]) == (1, {"null": 1})
    assert verify.main([f"--cache={cache}"]) == 0


def test_later_parts_of_a_document_whose_first_part_was_cut(tmp_path, build):
    notice = " ".join(words(10, 1))
    long = notice + "\n" + "\n".join(f"q{number:017}" for number in range(20))
    corpus = write(tmp_path / "c.jsonl", [("1", notice), ("L", long), ("3", "fine")])
    limit = f"--max_document_bytes={len(notice) + 10}"
    search(corpus, tmp_path / "out", "--unit=paragraph", limit)
    flags = (f"--corpus={corpus}?validation=0", limit)
    cache = build(tmp_path / "a", *flags, f"--exclude={tmp_path}/out/exclude.arrow")
    (tmp_path / "ids.txt").write_text("L\n")
    assert verify.main([f"--cache={cache}", f"--exclude={tmp_path}/ids.txt"]) == 1
    build(tmp_path / "a", *flags, f"--exclude={tmp_path}/ids.txt")
    assert verify.main([f"--cache={cache}", f"--exclude={tmp_path}/ids.txt"]) == 0


@needs_filters
def test_a_takedown_after_which_nothing_is_left_out(tmp_path, build, checksums, monkeypatch):
    notice = " ".join(words(10, 1))
    texts = [("a", notice), ("b", f"{notice}\nshort line here"), ("c", "x")]
    corpus = write(tmp_path / "c.jsonl", texts)
    search(corpus, tmp_path / "out", "--unit=paragraph")
    given = f"--exclude={tmp_path}/out/exclude.arrow"
    flags = (f"--corpus={corpus}?validation=0", "--filter=length?max_words=11")
    cache = build(tmp_path / "a", *flags)
    assert list(cache.glob("*.quarantine-*"))
    # Killed after the receipts were deleted, then completed.
    with monkeypatch.context() as patched:
        patched.setattr("pipeline.building.lifecycle._remove_quarantines", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            build(tmp_path / "a", *flags, given)
    build(tmp_path / "a", *flags, given)
    assert not list(cache.glob("*.quarantine-*"))
    assert verify.main([f"--cache={cache}"]) == 0
    for folder in cache.glob(".before-*"):
        shutil.rmtree(folder)
    assert checksums(cache) == checksums(build(tmp_path / "b", *flags, given))


def test_a_given_list_of_paragraphs_that_were_all_cut(tmp_path, build):
    example = " ".join(words(20, 7))
    sets = write(tmp_path / "eval.jsonl", [("q", example)])
    notice = "This very same notice of eight words and more begins every page."
    texts = [(f"p{n}", f"{notice}\n{' '.join(words(40, n))}\n{example}") for n in range(5)]
    corpus = write(tmp_path / "c.jsonl", texts)
    against = ("--unit=paragraph", f"--against={sets}")
    search(corpus, tmp_path / "all", *against)
    assert len(search(corpus, tmp_path / "some", *against, "--duplicates=none")) == 5
    flags = (f"--corpus={corpus}?validation=0",)
    cache = build(tmp_path / "a", *flags, f"--exclude={tmp_path}/all/exclude.arrow")
    assert verify.main([f"--cache={cache}", f"--exclude={tmp_path}/some/exclude.arrow"]) == 0
    # It keeps nothing, so it goes with a list of duplicate documents.
    search(corpus, tmp_path / "documents")
    lists = f"{tmp_path}/documents/exclude.arrow,{tmp_path}/some/exclude.arrow"
    cache = build(tmp_path / "b", *flags, f"--exclude={lists}")
    assert verify.main([f"--cache={cache}", f"--exclude={lists}"]) == 0
    assert verify.main([f"--cache={cache}", f"--exclude={tmp_path}/all/exclude.arrow"]) == 1


@needs_filters
def test_verification_counts_cut_paragraphs(tmp_path, build, capsys):
    header = "This very same notice of eight words and more begins every page."
    texts = [(f"p{number}", f"{header}\n{' '.join(words(40, number))}") for number in range(9)]
    texts += [("only", header), ("dropped", f"{header}\nshort")]
    corpus = write(tmp_path / "c.jsonl", texts)
    search(corpus, tmp_path / "out", "--unit=paragraph")
    given = f"--exclude={tmp_path}/out/exclude.arrow"
    flags = (f"--corpus={corpus}?validation=0", "--filter=length?min_words=20")
    cache, without = build(tmp_path / "a", *flags, given), build(tmp_path / "b", *flags)
    capsys.readouterr()
    assert verify.main([f"--cache={cache}", given]) == 0
    assert "absent: all 10 paragraphs of" in capsys.readouterr().out
    assert verify.main([f"--cache={without}"]) == 0
    assert verify.main([f"--cache={without}", given]) == 1
    what = "it holds 8 documents with paragraphs of an exclude list: p1, p2, p3…"
    assert what in capsys.readouterr().out
    # As if a build had not cut one, and sealed that.
    for path in (next(cache.glob("train.receipt-*")), cache / "manifest.json"):
        text = path.read_text()
        assert text.count('"cut_paragraphs": 10') == 1
        path.write_text(text.replace('"cut_paragraphs": 10', '"cut_paragraphs": 9'))
    assert verify.main([f"--cache={cache}"]) == 1
    what = "9 paragraphs were cut from its documents; exclude lists have 10"
    assert what in capsys.readouterr().out


def test_paragraphs_are_kept_where_their_document_stays(tmp_path, build):
    text, other = (" ".join(words(count, seed)) for count, seed in ((300, 1), (100, 2)))
    notice = "This very same notice of eight words and more ends two pages."
    texts = [("w", text), ("x", f"{text}\n{notice}"), ("y", f"{other}\n{notice}")]
    corpus = write(tmp_path / "c.jsonl", texts)
    names = [name for name, _ in texts]
    assert entries(search(corpus, tmp_path / "a"), names) == {"x": (NEAR, "w")}
    first = tmp_path / "a" / "exclude.arrow"
    # x is read first, and would keep the notice.
    assert "y" in entries(search(corpus, tmp_path / "b", "--unit=paragraph"), names)
    after = search(corpus, tmp_path / "d", "--unit=paragraph", f"--exclude={first}")
    assert not len(after)
    assert after.header["exclude"] == [sha256(first)]
    flags = (f"--corpus={corpus}?validation=0", f"--exclude={first},{tmp_path}/d/exclude.arrow")
    cache = build(tmp_path / "k", *flags)
    receipt = json.loads(next(cache.glob("train.receipt*")).read_text())
    assert (receipt["documents"], receipt.get("cut_paragraphs", 0)) == (2, 0)
    with pytest.raises(UserError, match="takes lists of documents"):
        search(corpus, tmp_path / "e", f"--exclude={tmp_path}/b/exclude.arrow")
