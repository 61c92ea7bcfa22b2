"""Pairs of texts to fine-tune on: what they lack, and few of them."""

import collections
import json
import sys

import pytest

from experiments import few_pairs, pairs
from tasks.terminal.command_line import UserError


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


LOST = {
    "diacritics": lambda text: text.translate(str.maketrans("ăâîșțȘ", "aaistS")),
    "case": str.lower,
    "spaces": lambda text: text.replace(" ", ""),
}


@pytest.mark.parametrize("undo", LOST)
def test_phrases_lose_what_is_asked_and_copying_has_its_error(tmp_path, undo, capsys):
    rows = "".join(f"Mâța{number} Și câinele aici stau\n" for number in range(60))
    (tmp_path / "a.txt").write_text(rows)
    flags = [f"--corpus=text:{tmp_path}/a.txt?validation=0.2", f"--undo={undo}", "--words=3"]
    assert pairs.main([*flags, f"--output={tmp_path}/made"]) == 0
    found = lines(tmp_path / "made/validation.jsonl")
    assert {len(each["targets"].split()) for each in found} == {3}
    for each in found:
        assert each["inputs"] == LOST[undo](each["targets"])
    held_out = {each["targets"] for each in found}
    assert not held_out & {each["targets"] for each in lines(tmp_path / "made/train.jsonl")}
    # "Mâța12 Și câinele" loses four diacritics, two capitals, or two spaces.
    lost = {"diacritics": 4, "case": 2, "spaces": 2}[undo]
    rate = 100 * lost * len(found) / sum(len(each["targets"]) for each in found)
    assert f"have a character error rate of {rate:.1f} %" in capsys.readouterr().out


def test_few_pairs_have_each_target_equally_often(tmp_path, capsys):
    rows = [{"q": f"text {i}", "a": "yes" if i % 10 == 0 else "no"} for i in range(600)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = f"--pairs=json:{tmp_path}/a.jsonl?inputs=q&targets=a&validation=0.2"
    drawn = []
    for seed in (0, 1):
        output = tmp_path / str(seed)
        flags = [spec, "--count=64", f"--seed={seed}", "--held_out=50", f"--output={output}"]
        assert few_pairs.main(flags) == 0
        train, held_out = lines(output / "train.jsonl"), lines(output / "validation.jsonl")
        drawn.append({row["inputs"] for row in train})
        assert collections.Counter(row["targets"] for row in train) == {"yes": 32, "no": 32}
        assert len(held_out) == 50
        assert not drawn[-1] & {row["inputs"] for row in held_out}
    assert drawn[0] != drawn[1]
    assert "% of the pairs held out have the target 'no'" in capsys.readouterr().out
    few_pairs.main([spec, "--count=3", f"--output={tmp_path}/0"])
    assert "0/train.jsonl exists and is kept" in capsys.readouterr().out
    with pytest.raises(UserError, match="pairs to train on and"):
        few_pairs.main([spec, "--count=600", f"--output={tmp_path}/more"])


def test_no_input_of_few_pairs_is_held_out(tmp_path):
    rows = [{"q": f"text {i % 30}", "a": "yes"} for i in range(600)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = f"--pairs=json:{tmp_path}/a.jsonl?inputs=q&targets=a&validation=0.02"
    few_pairs.main([spec, "--count=9", f"--output={tmp_path}/made"])
    train, held_out = (lines(tmp_path / f"made/{split}.jsonl") for split in ("train", "validation"))
    assert not {row["inputs"] for row in train} & {row["inputs"] for row in held_out}


def test_letters_without_diacritics_are_not_taken_apart():
    assert pairs.without_diacritics("\ud55c\uad6d cânt") == "\ud55c\uad6d cant"


def test_pairs_need_the_package_of_their_metric(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("".join(f"Mâța{i} și câinele\n" for i in range(60)))
    monkeypatch.setitem(sys.modules, "editdistance", None)
    flags = [f"--corpus=text:{tmp_path}/a.txt?validation=0.2", f"--output={tmp_path}/made"]
    with pytest.raises(UserError, match="needs the package editdistance"):
        pairs.main(flags)
    assert not (tmp_path / "made").exists()


def test_pairs_are_not_made_of_pairs_and_equal_ones_count_once(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"a": "b", "text": "Ana Are mere"}\n' * 60)
    spec = f"--corpus=json:{tmp_path}/a.jsonl?validation=0.2"
    with pytest.raises(UserError, match="has pairs: leave out inputs= and targets="):
        pairs.main([f"{spec}&inputs=a&targets=text", f"--output={tmp_path}/made"])
    (tmp_path / "a.txt").write_text(
        "".join("Ana Are\n" if i % 2 else f"A{i} b\n" for i in range(90))
    )
    pairs.main([f"--corpus=text:{tmp_path}/a.txt?validation=0.3", "--undo=case",
                f"--output={tmp_path}/made"])  # fmt: skip
    held_out = lines(tmp_path / "made/validation.jsonl")
    wrong = sum(2 if each["targets"] == "Ana Are" else 1 for each in held_out)
    rate = 100 * wrong / sum(len(each["targets"]) for each in held_out)
    assert f"all {len(held_out)} pairs held out, as they are, have a character error rate of " \
        f"{rate:.1f} %" in capsys.readouterr().out  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nimic de pierdut", "its validation split has no phrase of 2 words that loses its case;"),
        ("Ana are", "its train split has no phrase of 2 words that loses its case and is not held"),
    ],
)
def test_a_split_without_phrases_is_named(tmp_path, text, said):
    (tmp_path / "a.txt").write_text(f"{text}\n" * 60)
    spec = f"--corpus=text:{tmp_path}/a.txt?validation=0.2"
    with pytest.raises(UserError, match=said):
        pairs.main([spec, "--undo=case", f"--output={tmp_path}/made"])
    assert not (tmp_path / "made").exists()


def test_pairs_held_out_are_a_sample_and_the_same_for_each_seed(tmp_path):
    rows = ({"i": f"text {n}", "t": "bad" if n < 200 else "good"} for n in range(400))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = f"--pairs=json:{tmp_path}/a.jsonl?inputs=i&targets=t&validation=0.5"
    made = []
    for seed in (0, 1):
        flags = ["--count=8", "--held_out=40", f"--seed={seed}", f"--output={tmp_path}/{seed}"]
        assert few_pairs.main([spec, *flags]) == 0
        made.append((tmp_path / str(seed) / "validation.jsonl").read_text())
    assert made[0] == made[1]
    assert 8 < made[0].count('"good"') < 32
