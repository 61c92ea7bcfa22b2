"""Sets of questions by name, file, folder and SPEC; pairs; baselines and intervals."""

import json
import math

import fsspec
import pytest

from tasks.annexes.questions import baselines, question, scores, sets
from tasks.annexes.questions.question import Question, of_pair, of_text
from tasks.annexes.questions.scores import Answered
from tasks.terminal.command_line import UserError

CLOZE = {"cloze": "The {} barks.", "choices": ["dog", "house"], "answer": 0}


@pytest.mark.parametrize(
    ("good", "bad", "before", "choices", "after"),
    [
        ("The keys are here", "The keys is here", "The keys ", ("are", "is"), " here"),
        ("These keys", "This keys", "", ("These", "This"), " keys"),
        ("He has gone", "He gone", "He ", ("has gone", "gone"), ""),
        ("old man", "man old", "", ("old man", "man old"), ""),
        ("a b a", "a b b a", "a b ", ("a", "b a"), ""),
        ("same", "same", "", ("same", "same"), ""),
    ],
)
def test_the_gap_of_a_pair_is_where_it_differs(good, bad, before, choices, after):
    found = of_pair(good, bad)
    assert (found.before, found.choices, found.after) == (before, choices, after)
    assert found.before + found.right + found.after == good


def test_a_corpus_with_commas_is_a_set(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"a": "One", "good": "is", "bad": "are"}))
    spec = f"json:{tmp_path}/a.json?inputs={{a}}, {{good}}&targets={{a}}, {{bad}}"
    assert sets.load(f"mine={spec};")["mine"][0].choices == ("is", "are")


@pytest.mark.parametrize("text", ["one", "one two three", "a  b\nc d"])
def test_the_second_half_of_a_text_is_asked(text):
    found = of_text(text)
    assert (found.before + found.right).split() == text.split()
    assert len(found.right.split()) == math.ceil(len(text.split()) / 2)


@pytest.mark.parametrize("text", ["字" * 300, f"see {'x' * 65} there", "word " * 40])
def test_texts_without_spaces_are_halved_and_cut_too(text):
    words = question.words_of(text)
    assert "".join(words) == text.strip()
    assert all(len(word) <= 65 for word in words)
    found = of_text(text)
    assert found.before + found.right == text.strip()
    assert len(found.before) > 0
    parts = question.cut(text * 20)
    assert len(parts) > 1
    assert max(len(question.words_of(each.before + each.right)) for each in parts) <= 256


def test_the_own_suites_have_questions_of_each_kind():
    found = sets.load("english,romanian")
    assert {"english.cloze", "romanian.agreement", "english.arithmetic"} <= found.keys()
    assert all(len(questions) >= 90 for questions in found.values())
    for questions in found.values():
        alike = {(each.before, frozenset(each.choices), each.after) for each in questions}
        assert len(alike) == len(questions)
    for name in ("english.agreement", "romanian.agreement"):
        found_baselines = baselines.of_choices(found[name])
        assert 40 < found_baselines.unigram < 60
        assert len({each.group for each in found[name]}) >= 3


def test_files_folders_and_corpora_are_sets(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.jsonl").write_text(json.dumps(CLOZE) + "\n" + '{"text": "x y"}\n')
    (tmp_path / "pairs.json").write_text(
        "".join(json.dumps({"good": f"it is {i}", "bad": f"it are {i}"}) + "\n" for i in range(9))
    )
    spec = f"json:{tmp_path}/pairs.json?inputs={{good}}&targets={{bad}}"
    suites = [f"{tmp_path}/mine", f"{tmp_path}/mine/a.jsonl", f"my.pairs={spec}", ""]
    found = sets.load(",".join(suites), limit=4)
    assert sets.load(";".join(suites), limit=4) == found
    assert {name: len(each) for name, each in found.items()} == {"mine.a": 2, "a": 2, "my.pairs": 4}
    assert found["my.pairs"][0].choices == ("is", "are")


def test_a_limit_takes_questions_of_all_groups():
    found = sets.load("english", limit=18)["english.cloze"]
    assert len(found) == 18
    assert len({each.group for each in found}) == 9


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("", "has no questions"),
        ("{", "line 1: this is not JSON"),
        ("[" * 30_000, "line 1: this is not JSON"),
        ('{"text": "abc \\ud800 d"}', "line 1 has half a character"),
        (json.dumps(CLOZE | {"choices": ["\ud800", "y"]}), "line 1 has half a character"),
        ("[1]", "line 1: give"),
        ('{"text": " "}', "line 1: give"),
        (json.dumps(CLOZE | {"cloze": "no gap"}), "line 1: give"),
        (json.dumps(CLOZE | {"answer": 2}), "line 1: answer must be the index"),
        (json.dumps(CLOZE | {"choices": ["dog"]}), "line 1: answer must be the index"),
        (json.dumps(CLOZE | {"answer": True}), "line 1: answer must be the index"),
        (json.dumps(CLOZE | {"choices": ["dog", " "]}), "line 1: choices must be texts"),
        (json.dumps(CLOZE | {"choices": ["dog", None]}), "line 1: choices must be texts"),
        (json.dumps(CLOZE | {"choices": ["dog", "dog"]}), "line 1: the right choice .dog."),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path, written, says):
    path = tmp_path / "a.jsonl"
    path.write_text(written)
    with pytest.raises(UserError, match=f"--suite={path}.*{says}"):
        sets.load(str(path))


def test_names_and_kinds_go_before_the_ending(tmp_path):
    lines = json.dumps({"good": "it is", "bad": "it are"}) + "\n"
    (tmp_path / "pairs.jsonl").write_text(lines)
    (tmp_path / "a=b.jsonl").write_text(json.dumps(CLOZE))
    (tmp_path / "texts.jsonl").write_text('{"text": "one two"}\n')
    found = sets.load(
        f"json:{tmp_path}/texts.jsonl,mine=json:{tmp_path}/texts.jsonl,"
        f"own={tmp_path}/texts.jsonl,{tmp_path}/a=b.jsonl"
    )
    assert [name.rpartition("_texts")[1] or name for name in found] == [
        "_texts",
        "mine",
        "own",
        "a=b",
    ]
    assert found["mine"] == found["own"] == [of_text("one two")]


def test_sets_may_be_named_and_in_a_store(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.jsonl").write_text(json.dumps(CLOZE))
    (tmp_path / "texts.txt").write_text("one two")
    store = fsspec.filesystem("memory")
    store.pipe("/sets/a.jsonl", json.dumps(CLOZE).encode())
    store.pipe("/sets/b.txt", b"one two")
    found = sets.load(
        f"x={tmp_path}/mine,y=memory://sets/a.jsonl,z=text:memory://sets/b.txt,"
        f"text:{tmp_path}/texts.txt"
    )
    assert list(found)[:3] == ["x.a", "y", "z"]
    assert found["x.a"] == found["y"]
    assert found["z"] == [of_text("one two")]
    assert "python_docs" in sets.load("python_docs?split=validation", limit=3)


def test_a_damaged_file_of_a_folder_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(CLOZE))
    (tmp_path / "b.jsonl").write_text("{")
    with pytest.raises(UserError, match=r"/b\.jsonl, line 1: this is not JSON"):
        sets.load(str(tmp_path))


def test_unknown_suites_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"--suite=englsh: no such suite; give a suite \(english"):
        sets.load("englsh")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.txt").write_text("text")
    with pytest.raises(UserError, match="--suite=,: give a suite"):
        sets.load(",")
    with pytest.raises(UserError, match=r"the folder has no \.jsonl file"):
        sets.load(f"{tmp_path}/other")
    with pytest.raises(UserError, match="no such file"):
        sets.load(f"{tmp_path}/none.jsonl")
    (tmp_path / "english.cloze.jsonl").write_text(json.dumps(CLOZE))
    with pytest.raises(UserError, match="two sets are called english"):
        sets.load(f"english,{tmp_path}/english.cloze.jsonl")


def test_a_corpus_has_a_name_and_parts_of_long_texts(tmp_path):
    words = [f"w{number}" for number in range(600)]
    (tmp_path / "a.txt").write_text(" ".join(words))
    found = sets.load(f"text:{tmp_path}/*.txt?document=file")
    ((name, asked),) = found.items()
    assert name.endswith("_txt")
    assert " ".join(each.before + each.right for each in asked).split() == words
    assert max(len((each.before + each.right).split()) for each in asked) <= 256
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": " ".join(words)}))
    assert sets.load(f"{tmp_path}/b.jsonl")["b"] == asked


def test_a_question_about_a_text_with_braces_is_read_as_written(tmp_path):
    (tmp_path / "a.json").write_text(
        json.dumps({"good": "Use the {} sign", "bad": "Use a {} sign"})
    )
    (asked,) = sets.of_corpus(f"json:{tmp_path}/a.json?inputs={{good}}&targets={{bad}}")
    scores.write(f"{tmp_path}/s.jsonl", [Answered("s", asked, [-1.0, -2.0])])
    assert scores.read(f"{tmp_path}/s.jsonl") == [Answered("s", asked, [-1.0, -2.0])]
    # Answers to other sets stay.
    scores.write(f"{tmp_path}/s.jsonl", [Answered("t", asked, [-3.0, -2.0])])
    scores.write(f"{tmp_path}/s.jsonl", [Answered("s", asked, [-4.0, -2.0])])
    found = {each.set: each.scores for each in scores.read(f"{tmp_path}/s.jsonl")}
    assert found == {"t": [-3.0, -2.0], "s": [-4.0, -2.0]}
    (tmp_path / "s.jsonl").write_text('{"set": "s"')
    with pytest.raises(UserError, match="is damaged: delete it, and answer the suite again"):
        scores.read(f"{tmp_path}/s.jsonl")


def test_wilsons_interval():
    # Newcombe 1998 (Statistics in Medicine 17, table I): 81 of 263, and 0 of 20.
    found = baselines.share(81, 263)
    assert [round(each, 2) for each in found] == [30.80, 25.53, 36.62]
    assert [round(each, 2) for each in baselines.share(0, 20)] == [0.0, 0.0, 16.11]


def test_the_interval_of_a_ratio_covers_what_repeated_draws_give():
    import numpy as np

    random = np.random.default_rng(0)
    widths, values = [], []
    for _ in range(400):
        sizes = random.integers(20, 200, 60)
        bits = sizes * random.gamma(9, 1 / 9, 60) * 2
        found = baselines.ratio(bits.tolist(), sizes.tolist())
        values.append(found.low <= 2 <= found.high)
        widths.append(found.value)
    assert 0.90 < np.mean(values) < 0.98
    assert np.mean(widths) == pytest.approx(2, abs=0.02)


def test_baselines_share_their_ties():
    asked = [Question("a a a b ", ("a", "b", "c"), 1), Question("c d ", ("x", "y"), 0)]
    found = baselines.of_choices(asked)
    assert found.chance == pytest.approx(100 * (1 / 3 + 1 / 2) / 2)
    # Elsewhere the set has one c and no a, b, x or y.
    assert found.unigram == pytest.approx(100 * (0 + 1 / 2) / 2)
    assert found.copying == pytest.approx(100 * (0 + 1 / 2) / 2)


def test_equal_likelihoods_are_not_right():
    asked = Question("", ("a", "b"), 0)
    assert not Answered("s", asked, [-1.0, -1.0]).is_right
    assert Answered("s", asked, [-1.0, -1.5]).is_right


def test_scores_have_groups_and_results_intervals():
    asked = [Question("", ("a", "b"), 0, "", group) for group in ("x", "x", "all")]
    answered = [
        Answered("s", each, [-1.0, other]) for each, other in zip(asked, (-2, 0, -2), strict=True)
    ]
    text = Answered("t", of_text("one two"), [-3 * math.log(2)])
    found = scores.of([*answered, text])
    assert [(each.set, each.group, round(each.score.value, 2)) for each in found] == [
        ("s", None, 66.67), ("s", "x", 50.0), ("s", "all", 100.0), ("t", None, 1.0),
    ]  # fmt: skip
    results = scores.results(found)
    assert results.keys() == {"suite/s", "suite/t"}
    assert results["suite/t"] == {"suite_bits_per_byte": 1.0}
    assert results["suite/s"]["suite_accuracy_low"] < 66 < results["suite/s"]["suite_accuracy_high"]
    assert "66.7 %" in scores.shown(found)


@pytest.mark.parametrize(
    ("suite", "is_corpus"), [("hf:a/b", True), ("fasta-x:a.fa", True), ("gs://bucket/a", False)]
)
def test_a_corpus_begins_with_its_kind(suite, is_corpus):
    assert bool(sets._CORPUS.match(suite)) == is_corpus


def test_pairs_of_equal_sentences_are_counted(tmp_path, capsys):
    rows = [{"good": "The cat sits", "bad": "The cat  sits"}, {"good": "a b", "bad": "a c"}]
    (tmp_path / "some.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "all.jsonl").write_text(json.dumps(rows[0]))
    spec = f"json:{tmp_path}/{{}}.jsonl?inputs={{{{good}}}}&targets={{{{bad}}}}"
    assert len(sets.of_corpus(spec.format("some"))) == 1
    assert "note: 1 pairs of json:" in capsys.readouterr().err
    with pytest.raises(UserError, match="has only 1 pairs of equal sentences"):
        sets.of_corpus(spec.format("all"))
