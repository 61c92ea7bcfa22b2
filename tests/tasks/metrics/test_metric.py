"""Metrics on small examples with known values, each by hand or by the library itself."""

import re
import subprocess
import sys
import types
import unicodedata

import pytest

from tasks import annexes
from tasks.metrics import metric, words
from tasks.metrics.metric import METRICS, Metric
from tasks.terminal import extras
from tasks.terminal.command_line import UserError
from tests.support import extending

TARGETS = ["the cat sat on the mat", "a dog barks"]
PREDICTIONS = ["the cat sat on a mat", "dog barks"]


def value(name, targets=TARGETS, predictions=PREDICTIONS, of=None):
    return METRICS[name](targets, predictions)[of or name]


def test_exact_match_and_squad():
    assert value("exact_match") == 0
    assert value("exact_match", ["a", ["b", "c"]], [" a ", "c"]) == 100
    # Articles do not count: "cat sat on mat" and "dog barks".
    assert METRICS["squad"](TARGETS, PREDICTIONS) == {"em": 100.0, "f1": 100.0}
    assert value("token_f1", ["x y"], ["x z w"]) == pytest.approx(100 * 2 / 5)
    assert value("token_f1", ["x"], [""]) == 0
    assert value("token_f1", [""], ["the"]) == 100


def test_error_rates():
    pytest.importorskip("editdistance")
    # "the" -> "a" is 3 edits, and "a " is left out: 2.
    assert value("character_error_rate") == pytest.approx(100 * 5 / 33)
    assert value("word_error_rate") == pytest.approx(100 * 2 / 9)
    assert value("character_error_rate", [["abcd", "xy"]], ["xz"]) == 50


def test_targets_of_another_kind_are_one_line():
    for name in ("squad", "token_f1", "character_error_rate", "word_error_rate", "bleu", "rouge"):
        for label in (1, {"value": 1}):
            with pytest.raises(UserError, match=r"needs texts, but a target is .*: use a metric"):
                METRICS[name]([label], [label])


def test_overlap_is_that_of_the_libraries():
    sacrebleu = pytest.importorskip("sacrebleu")
    scorer = pytest.importorskip("rouge_score.rouge_scorer")
    assert value("bleu") == sacrebleu.corpus_bleu(PREDICTIONS, [TARGETS]).score
    sides = ["a \u201ccat\u201d sat on mats"], ["a \u201c cat \u201d sat on mats"]
    assert value("bleu_intl", *sides) == pytest.approx(100)
    assert value("bleu", *sides) < 90
    assert value("chrf") == sacrebleu.corpus_chrf(PREDICTIONS, [TARGETS]).score
    several = [["x", TARGETS[0]], [TARGETS[1]]]
    assert value("chrf", several) == pytest.approx(value("chrf"))
    theirs = scorer.RougeScorer(["rouge2"])
    expected = sum(
        theirs.score(target, prediction)["rouge2"].fmeasure
        for target, prediction in zip(TARGETS, PREDICTIONS, strict=True)
    )
    assert value("rouge", of="rouge2") == pytest.approx(50 * expected)


def test_the_metric_that_the_page_describes(monkeypatch):
    module = types.ModuleType("page_metrics")
    exec(extending.example("A metric"), module.__dict__)
    monkeypatch.setitem(sys.modules, "page_metrics", module)
    (own,) = metric.chosen(["length_error"], "page_metrics")
    assert own(["abc", "a"], ["a", "a"]) == {"length_error": 1.0}
    assert metric.lower_is_better("length_error", "page_metrics") is True
    assert metric.lower_is_better("length_error") is None


def test_every_metric_says_which_way_it_is_better():
    for each in METRICS.values():
        assert each.lower_is_better == each.name.endswith("error_rate")
        for value in metric.values_of(each.name):
            assert metric.lower_is_better(value) is each.lower_is_better


def test_a_users_metric_and_an_unknown_one(monkeypatch):
    module = types.ModuleType("my_metrics")
    module.METRICS = (Metric("same_length", lambda t, p: {"same": len(t) == len(p)}),)
    monkeypatch.setitem(sys.modules, "my_metrics", module)
    own, bleu = metric.chosen(["same_length", "bleu"], "my_metrics")
    assert own(["a"], ["b"]) == {"same": 1.0}
    assert bleu is METRICS["bleu"]
    with pytest.raises(UserError, match=r"unknown metric exact_mach \(did you mean exact_match"):
        metric.chosen(["exact_mach"])
    with pytest.raises(ValueError, match="2 targets and 1 predictions"):
        own(["a", "b"], ["b"])
    for returned in (1.0, {"same": "text"}, None):
        with pytest.raises(UserError, match=r"metric odd returns .*, which is not a dict"):
            Metric("odd", lambda _t, _p, returned=returned: returned)(["a"], ["b"])
    with pytest.raises(ZeroDivisionError) as raised:
        Metric("odd", lambda _t, _p: 1 / 0)(["a"], ["b"])
    assert raised.value.__notes__ == ["This is from the metric odd."]


def test_a_missing_package_is_asked_for_before_the_work(monkeypatch):
    missing = f"needs the package sacrebleu: {extras.install('eval')}"
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(UserError, match=re.escape(missing)):
        metric.chosen(["bleu"])
    assert metric.chosen(["exact_match"])


def test_a_package_that_cannot_be_imported_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "editdistance.py").write_text("from sys import nothing\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "editdistance", raising=False)
    with pytest.raises(UserError, match="the metric word_error_rate cannot import sys: "):
        metric.chosen(["word_error_rate"])


def test_the_table_imports_no_library():
    code = (
        "import sys; from tasks.metrics.metric import METRICS; "
        "assert not {'sklearn', 'scipy', 'sacrebleu', 'rouge_score'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Two texts without a common word in each script.
SCRIPTS = {
    "Latin": ("the new school of our town", "rain falls until late evening"),
    "Romanian": ("președintele a vizitat școala nouă", "mâine plouă și bate vântul"),
    "Cyrillic": ("президент посетил новую школу", "завтра будет сильный дождь"),
    "Greek": ("ο πρόεδρος επισκέφθηκε το σχολείο", "αύριο θα βρέχει πολύ δυνατά"),
    "Arabic": ("زار الرئيس المدرسة الجديدة", "غدا تمطر السماء كثيرا"),
    "Hindi": ("राष्ट्रपति आज नए स्कूल गए", "कल बहुत तेज बारिश होगी"),
    "Chinese": ("总统今天访问了北京的学校", "明夜有大雨和风"),
    "Japanese": ("大統領は新しい学校を訪れた", "明日も雨がふります"),
    "Thai": ("รัฐมนตรีไปโรงเรียน", "ฝนหยุดแล้ว"),
}
OF_TEXTS = {
    "exact_match": (100, 0),
    "squad": (100, 20),  # characters of Thai, which has no spaces
    "token_f1": (100, 20),
    "bleu": (100, 5),
    "bleu_intl": (100, 5),
    "chrf": (100, 25),  # scripts share letters
    "rouge": (100, 20),
    "character_error_rate": (0, 60),
    "word_error_rate": (0, 100),
}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("name", OF_TEXTS)
def test_equal_and_disjoint_texts_in_every_script(name, script):
    if name.endswith("_rate"):
        pytest.importorskip("editdistance")
    text, other = SCRIPTS[script]
    equal, disjoint = OF_TEXTS[name]
    for found in METRICS[name]([text, other], [text, other]).values():
        assert found == pytest.approx(equal)
    for found in METRICS[name]([text, other], [other, text]).values():
        assert found >= disjoint if name.endswith("_rate") else found <= disjoint


def test_words_of_ascii_are_those_of_rouge_score():
    tokenizers = pytest.importorskip("rouge_score.tokenizers")
    text = "It's 3.5 %, SAID_he;\tx-ray\n(a)  b . c?"
    assert words.UnicodeWords().tokenize(text) == tokenizers.DefaultTokenizer().tokenize(text)


def test_words_of_other_scripts():
    tokenize = words.UnicodeWords().tokenize
    assert tokenize("Țara, șase-șapte în_2024!") == ["țara", "șase", "șapte", "în", "2024"]
    assert tokenize("हिन्दी में।") == ["हिन्दी", "में"]
    assert tokenize("ABC的学がGo") == ["abc", "的", "学", "が", "go"]
    assert "".join(tokenize("ที่นี่")) == "ที่นี่"  # no mark is lost
    assert words.spaced("plain text") == "plain text"


def test_an_empty_answer_to_a_question_without_one_is_right():
    rouge = METRICS["rouge"]
    answers = ["", "the cat sat on the mat", " "]
    assert set(rouge(answers, answers).values()) == {100.0}
    assert rouge(["", "a b"], ["x", ""])["rouge1"] == 0.0
    assert rouge([["", "a b"]], [""])["rouge1"] == 100.0


@pytest.mark.parametrize("name", ["bleu", "bleu_intl", "chrf"])
def test_empty_predictions_of_empty_targets_are_right_in_every_metric(name):
    assert value(name, ["", [" ", ""], []], ["", " ", ""]) == 100
    assert value(name, ["", "a b"], ["", ""]) == 0
    assert value(name, [""], ["a b"]) == 0


@pytest.mark.parametrize("name", METRICS)
def test_the_functions_of_metrics_need_examples(name):
    compute = METRICS[name].compute
    compute = annexes.load(compute) if isinstance(compute, str) else compute
    with pytest.raises(ValueError, match="0 targets and 0 predictions"):
        compute([], [])
    with pytest.raises(ValueError, match="2 targets and 1 predictions"):
        compute(["a", "b"], ["a"])


@pytest.mark.parametrize(
    ("target", "prediction", "overlap"),
    [
        ("今天天气很好", "今天天气很好。", 100),
        ("Москва", "«Москва»", 100),
        ("café", unicodedata.normalize("NFD", "café"), 100),
        ("今天天气很好", "今天天气不好", 0),  # a text without spaces is one word
    ],
)
def test_squad_knows_punctuation_of_every_script(target, prediction, overlap):
    found = METRICS["squad"]([target], [prediction])
    assert found == {"em": 100.0 * (overlap == 100), "f1": pytest.approx(overlap)}
