"""Questions that are made from texts: what is asked, and that wrong choices are fair."""

import json
import re
from collections import Counter

import pytest

from tasks.annexes.making_questions import make_questions, making
from tasks.annexes.questions import baselines, question, sets
from tasks.terminal.command_line import UserError


@pytest.fixture(scope="module")
def texts():
    return [row["text"] for row in sets.rows("python_docs?split=validation")]


@pytest.fixture(scope="module")
def both():
    """Texts of both splits, and the numbers of those held out."""
    rows = sets.rows_with_splits("python_docs")
    held_out = {number for number, (split, _) in enumerate(rows) if split == "validation"}
    return [row["text"] for _, row in rows], held_out


@pytest.fixture(scope="module")
def made(texts, both):
    alone = [kind for kind in making.KINDS if kind != "seen"]
    found = {kind: making.make(kind, texts, 60, 3, seed=1) for kind in alone}
    return found | {"seen": making.make("seen", both[0], 60, 3, 1, both[1])}


@pytest.mark.parametrize("kind", ["cloze", "long_cloze", "order", "seen"])
def test_the_right_choice_gives_the_text_back(made, texts, kind):
    whole = "\n".join(" ".join(text.split()) for text in texts)
    assert len(made[kind]) >= 40
    for each in made[kind]:
        assert each.before + each.right + each.after in whole
        assert len(set(each.choices)) == len(each.choices) == (2 if kind == "order" else 4)


def test_wrong_spans_are_as_long_and_about_as_frequent_as_the_right_one(made):
    for each in made["cloze"]:
        assert {len(choice.split()) for choice in each.choices} == {int(each.group[0])}
    groups = {each.group for each in made["cloze"]}
    assert len(groups) == 9
    # What is more frequent elsewhere must not give the answer away.
    assert baselines.of_choices(made["cloze"]).unigram < 45


def test_a_long_cloze_has_its_word_at_the_distance_of_its_group(made):
    for each in made["long_cloze"]:
        least, most = map(int, re.findall(r"\d+", each.group))
        words = each.before.split()
        (earlier,) = (place for place, word in enumerate(words) if word == each.right)
        assert least <= len(words) - earlier <= most
        context = set(words) | set(each.after.split())
        assert not context & (set(each.choices) - {each.right})


def test_a_copied_list_lacks_its_word(made):
    for each in made["copying"]:
        first, second = f"{each.before}{each.right}{each.after}".split(". ")
        assert first == second
        assert len(first.split()) == int(each.group.split()[0])
        assert set(each.choices) <= set(first.split())


def test_a_word_is_asked_for_that_the_training_texts_always_have_there(made, both):
    texts, held_out = both
    train = [text.split() for number, text in enumerate(texts) if number not in held_out]
    whole = f" {' '.join(word for words in train for word in words)} "
    right = 0
    for each in made["seen"]:
        before, after = each.before.split(), each.after.split()
        assert 6 <= len(before) + 1 + len(after) <= 24
        assert each.right not in before + after
        assert not set("`_<>*=0123456789") & set(each.before + each.after)
        sides = (re.escape(" ".join(some)) for some in (before[-2:], after[:2]))
        between = Counter(re.findall(r"(?= {} (\S+) {} )".format(*sides), whole))
        ((answer, times),) = between.items()
        assert times >= max(3, int(each.group.split()[1]))
        right += answer == each.right
        assert answer == each.right or answer not in each.choices
    assert 0.9 < right / len(made["seen"]) < 1  # the held-out text decides
    train_only = making.make("seen", [" ".join(words) for words in train], 60, 3, seed=1)
    assert train_only == []


def test_a_sentence_is_a_whole_one():
    held_out = "Aa two three bb cc\n\nZz aa two three bb cc e.g. five six. Aa two three."
    texts = ["aa two three bb cc"] * 3
    (asked,) = making.make("seen", [*texts, held_out], 9, 1, 0, {3})
    assert asked.before + asked.right + asked.after == "Zz aa two three bb cc e.g. five six."
    assert asked.right == "three"


def test_sums_are_right(made):
    for each in made["arithmetic"]:
        a, sign, b, _ = each.before.split()
        assert int(each.right) == (int(a) + int(b) if sign == "+" else int(a) - int(b))
        assert all(int(choice) >= 0 for choice in each.choices)
        assert len(a) == int(each.group[0])
    many = making.make("arithmetic", [], 400, 3, seed=0)
    groups = Counter(each.group for each in many)
    assert groups == {"1 digit": 90, "2 digits": 134, "3 digits": 134}
    assert len({each.before for each in many}) == len(many)


@pytest.mark.parametrize("wrong", [1, 6])
def test_any_number_of_wrong_choices(texts, both, wrong):
    for kind in making.KINDS:
        few = both if kind == "seen" else (texts[:60], ())
        found = making.make(kind, few[0], 24, wrong, 2, few[1])
        most = max(len(each.choices) for each in found)
        assert most == {"order": 2, "text": 1}.get(kind, wrong + 1)


def test_answers_are_at_all_places(made):
    for kind in ("cloze", "copying", "arithmetic"):
        places = [each.answer for each in made[kind]]
        assert all(places.count(place) > len(places) / 8 for place in range(4))


def test_files_are_read_as_written_and_made_alike(texts, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("\n".join(" ".join(text.split()) for text in texts))
    flags = [f"--corpus=text:{tmp_path}/a.txt", "--count=20"]
    for folder in ("a", "b"):
        own = ["--kinds=cloze,text", f"--output={tmp_path}/{folder}"]
        assert make_questions.main([*flags, *own]) == 0
    for name in ("cloze.jsonl", "text.jsonl"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
        found = question.read(str(tmp_path / "a" / name), "")
        lines = (tmp_path / "a" / name).read_text().splitlines()
        assert [question.line(each) for each in found] == [json.loads(line) for line in lines]
    assert "20 questions" in capsys.readouterr().out
    make_questions.main([*flags, "--kinds=order", "--documents=9", f"--output={tmp_path}/c"])
    first = "\n".join((tmp_path / "a.txt").read_text().splitlines()[:9])
    for each in question.read(str(tmp_path / "c/order.jsonl"), ""):
        assert each.before + each.right + each.after in first


def test_texts_without_enough_words_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("Too short.\n")
    flags = [f"--corpus=text:{tmp_path}/a.txt", f"--output={tmp_path}/made"]
    with pytest.raises(
        UserError, match="too little text for cloze with --wrong=3, which needs words"
    ):
        make_questions.main(flags)
    with pytest.raises(UserError, match="--kinds=close"):
        make_questions.main([*flags, "--kinds=close"])
    with pytest.raises(UserError, match="--kinds=: choose among"):
        make_questions.main([*flags, "--kinds="])
    with pytest.raises(UserError, match=r"too little text for seen .* needs a validation split"):
        make_questions.main([*flags, "--kinds=seen"])


def test_a_gap_in_the_text_itself_is_not_asked_about():
    texts = ["print {} to say what " + " ".join(f"the value of {name} was" for name in "abcde")] * 9
    found = making.make("order", texts, 90, 1, seed=0)
    assert found
    assert all(each.cloze.count("{}") == 1 for each in found)


def test_a_long_cloze_has_its_word_nowhere_else_whatever_stands_beside_it(made):
    for each in made["long_cloze"]:
        around = making._bare(each.before + each.after)
        assert around.count(each.right) == 1
        assert not {*around} & {*each.choices} - {each.right}


@pytest.mark.parametrize(
    "word",
    ["\u0645\u0631\u062d\u0628\u0627", "ca\u0302inele", "\u0939\u093f\u0928\u094d\u0926\u0940"],
)
def test_words_of_any_script_may_be_in_a_gap(word):
    assert making._Texts([]).plain(word)
    for other in ("Ana", "a1", "non-empty", "\u0302", ""):
        assert not making._Texts([]).plain(other)


def test_no_question_is_asked_twice(texts):
    twice = making.make("order", [*texts, *texts], 400, 1, seed=0)
    asked = [(each.before, frozenset(each.choices), each.after) for each in twice]
    assert len(asked) == len({*asked}) > 0
