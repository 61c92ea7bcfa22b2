"""Supervised tasks: golden examples of T5's paper, and what their metrics make of predictions."""

import json

import pytest

from tasks.annexes.t5_tasks import table
from tasks.terminal.command_line import UserError
from tests.support.in_process import run

RTE = {
    "sentence1": "A smaller proportion of Yugoslavia's Italians were settled in Slovenia.",
    "sentence2": "Slovenia has 3,000 inhabitants.",
    "label": 1,
    "idx": 0,
}
COPA = {
    "premise": "Political violence broke out in the nation.",
    "choice1": "Many citizens relocated to the capitol.",
    "choice2": "Many citizens took refuge in other territories.",
    "question": "effect",
    "label": 1,
}
PAIR = {"sentence1": "a b", "sentence2": "c"}
NLI = {"premise": "yeah well", "hypothesis": "They won."}
OF_NLI = "hypothesis: They won. premise: yeah well"
# Source: Raffel et al. 2020, appendix D, for the form; of each task a row, its inputs and targets.
GOLDEN = {
    "glue_cola": (
        {"sentence": "John made Bill master of himself.", "label": 1, "idx": 0},
        "cola sentence: John made Bill master of himself.",
        "acceptable",
    ),
    "glue_sst2": ({"sentence": "is great", "label": 1}, "sst2 sentence: is great", "positive"),
    "glue_mrpc": ({**PAIR, "label": 1}, "mrpc sentence1: a b sentence2: c", "equivalent"),
    # 1.7 as float32 times 5 is 8.5, which is rounded to the even 8.
    "glue_stsb": ({**PAIR, "label": 1.7}, "stsb sentence1: a b sentence2: c", "1.6"),
    "glue_qqp": (
        {"question1": "why?", "question2": "how?", "label": 0},
        "qqp question1: why? question2: how?",
        "not_duplicate",
    ),
    "glue_mnli": ({**NLI, "label": 2}, f"mnli {OF_NLI}", "contradiction"),
    "glue_qnli": (
        {"question": "Where?", "sentence": "Here.", "label": 0},
        "qnli question: Where? sentence: Here.",
        "entailment",
    ),
    "glue_rte": (
        RTE,
        f"rte sentence1: {RTE['sentence1']} sentence2: {RTE['sentence2']}",
        "not_entailment",
    ),
    "glue_wnli": ({**PAIR, "label": -1}, "wnli sentence1: a b sentence2: c", "<unk>"),
    "super_glue_boolq": (
        {"passage": "P", "question": "is it", "label": 0},
        "boolq passage: P question: is it",
        "False",
    ),
    "super_glue_cb": ({**NLI, "label": 1}, f"cb {OF_NLI}", "contradiction"),
    "super_glue_copa": (
        COPA,
        f"copa choice1: {COPA['choice1']} choice2: {COPA['choice2']} premise: {COPA['premise']} "
        "question: effect",
        "choice2",
    ),
    "super_glue_multirc": (
        {
            "paragraph": "<b>Sent 1: </b>Once.<br>", "question": "Why?", "answer": "So.",
            "idx": {"paragraph": 3, "question": 1, "answer": 0}, "label": 1,
        },
        "multirc question: Why? answer: So. paragraph: Sent 1: Once. ",
        "True",
    ),
    "super_glue_record": (
        {
            "query": "@placeholder won",
            "passage": "They met.\n@highlight\nAnn won\n@highlight\nso",
            "entities": ["Ann", "Bob"], "answers": ["Ann"],
        },
        "record query: @placeholder won entities: Ann, Bob passage: They met. Ann won. so",
        "Ann",
    ),
    "super_glue_rte": ({**NLI, "label": 0}, f"rte {OF_NLI}", "entailment"),
    "super_glue_wic": (
        {**PAIR, "word": "b", "label": 1},
        "wic sentence1: a b sentence2: c word: b",
        "True",
    ),
    "super_glue_wsc": (
        {"text": "The stable opened , which made it airy.", "span1_text": "The stable",
         "span2_text": "it", "span2_index": 6, "label": 1},
        "wsc: The stable opened , which made *it* airy.",
        "The stable",
    ),
    "squad": (
        {
            "question": "Who\nwas (it)?", "context": "Ann's  friend.",
            "answers": {"text": ["Ann's", "Ann"]},
        },
        "question: Who was ( it ) ? context: Ann ' s friend . ",
        "Ann ' s",
    ),
    "cnn_dailymail": ({"article": "Long.", "highlights": "It is ."}, "summarize: Long.", "It is ."),
    "xsum": ({"document": "Long.", "summary": "It is."}, "summarize: Long.", "It is."),
    "wmt14_ende": (
        {"translation": {"en": "That is good.", "de": "Das ist gut."}},
        "translate English to German: That is good.",
        "Das ist gut.",
    ),
    "wmt16_roen": (
        {"translation": {"en": "Yes", "ro": "Da"}},
        "translate Romanian to English: Da",
        "Yes",
    ),
}  # fmt: skip
OTHER_DIRECTIONS = {"wmt14_deen", "wmt14_enfr", "wmt14_fren", "wmt16_enro"}


def test_every_task_has_a_golden_example():
    assert table.TASKS.keys() == GOLDEN.keys() | OTHER_DIRECTIONS


@pytest.mark.parametrize("name", GOLDEN)
def test_rows_are_formatted_as_t5_formats_them(name):
    row, inputs, targets = GOLDEN[name]
    (pair,) = table.get(name).examples([row])
    assert (pair["inputs"], pair["targets"]) == (inputs, targets)


@pytest.mark.parametrize("name", GOLDEN)
def test_the_right_text_is_the_best_prediction(name):
    task = table.get(name)
    if {"matthews", "f1", "macro_f1", "rouge", "bleu_intl"} & {*task.metrics}:
        pytest.importorskip("sklearn")
        pytest.importorskip("sacrebleu")
    row, _, _ = GOLDEN[name]
    pairs = list(task.examples([row], evaluating=True))
    right = task.evaluate(pairs, [pair["targets"] for pair in pairs])
    wrong = task.evaluate(pairs, ["something else"] * len(pairs))
    assert right.keys() == wrong.keys()
    assert all(right[each] >= wrong[each] for each in right)
    alone = ("matthews", "pearson", "spearman", "f1", "macro_f1", "bleu_intl")
    assert all(value == 100 for each, value in right.items() if each not in alone) or "<unk>" in (
        pair["targets"] for pair in pairs
    )


def test_labels_that_are_none_are_wrong():
    task = table.get("glue_rte")
    pairs = list(task.examples([RTE, {**RTE, "label": 0}]))
    assert task.evaluate(pairs, ["not_entailment", "perhaps"]) == {"accuracy": 50.0}


def test_questions_of_multirc_count_as_a_whole():
    pytest.importorskip("sklearn")
    task = table.get("super_glue_multirc")
    row = GOLDEN["super_glue_multirc"][0]
    rows = [
        {**row, "label": label, "idx": {"paragraph": 0, "question": question}}
        for question, label in ((0, 1), (0, 0), (1, 1), (1, 1))
    ]
    found = task.evaluate(list(task.examples(rows)), ["True", "True", "True", "True"])
    assert found == {"f1": pytest.approx(100 * 6 / 7), "grouped_exact_match": 50.0}
    # A prediction that is no label is the wrong one.
    found = task.evaluate(list(task.examples(rows)), ["True", "perhaps", "True", "True"])
    assert found == {"f1": pytest.approx(100 * 6 / 7), "grouped_exact_match": 50.0}


def test_wsc_trains_on_true_referents_and_judges_all():
    task = table.get("super_glue_wsc")
    row = GOLDEN["super_glue_wsc"][0]
    rows = [row, {**row, "label": 0}]
    assert len(list(task.examples(rows))) == 1
    pairs = list(task.examples(rows, evaluating=True))
    assert task.evaluate(pairs, ["stable", "the stable"]) == {"accuracy": 50.0}
    assert task.evaluate(pairs, ["stable", "a horse"]) == {"accuracy": 100.0}
    # No noun is no answer, and of two nouns both or none have an apostrophe.
    assert task.evaluate(pairs, ["stable", "the"]) == {"accuracy": 50.0}
    assert task.evaluate(pairs, ["stable", "the stable's"]) == {"accuracy": 100.0}
    assert task.evaluate(pairs, ["their old stable", "stable"]) == {"accuracy": 50.0}


def test_pronouns_of_wsc_are_found_where_their_index_is_wrong():
    task = table.get("super_glue_wsc")
    row = {"span1_text": "the pebble", "span2_text": "it", "label": 1}
    for text, index, marked in (
        ("They want to use it , but when?", 3, "They want to use *it* , but when?"),
        ('"Good for it," he said.', 2, '"Good for *it* ," he said.'),
    ):
        (pair,) = task.examples([{**row, "text": text, "span2_index": index}])
        assert pair["inputs"] == f"wsc: {marked}"


def test_an_answer_of_several_is_right():
    task = table.get("squad")
    pairs = list(task.examples([GOLDEN["squad"][0]]))
    assert task.evaluate(pairs, ["the ANN."]) == {"em": 100.0, "f1": 100.0}


def test_pairs_are_written(tmp_path):
    odd = {**RTE, "sentence2": "two\u2028lines"}
    lines = [json.dumps(row, ensure_ascii=False) for row in (RTE, odd)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    flags = [f"--output={tmp_path}/pairs.jsonl", f"--input={tmp_path}/rows.jsonl"]
    command = "tasks.annexes.t5_tasks.write_pairs"
    made = run(command, "--task=glue_rte", *flags)
    assert made.returncode == 0, made.stderr
    written = (tmp_path / "pairs.jsonl").read_bytes()
    first, second = map(json.loads, written.decode().rstrip("\n").split("\n"))
    assert first == {"inputs": GOLDEN["glue_rte"][1], "targets": "not_entailment"}
    assert second["inputs"].endswith("sentence2: two\u2028lines")
    for name, text, says in (
        ("glue_cola", "\n".join([*lines, '{"sentence1": "no more"}']), "glue/cola"),
        ("glue_rte", json.dumps({**RTE, "label": 7}), "labels"),
        ("glue_rte", json.dumps({**RTE, "label": "entailment"}), "labels"),
        ("glue_rte", json.dumps({**RTE, "sentence2": None}), "null"),
        ("glue_rte", "", "has no rows"),
    ):
        (tmp_path / "rows.jsonl").write_text(text)
        made = run(command, f"--task={name}", *flags)
        assert made.returncode == 2
        assert made.stderr.count("\n") == 1
        assert says in made.stderr
    (tmp_path / "rows.parquet").write_text("no table")
    made = run(command, "--task=glue_rte", flags[0], f"--input={tmp_path}/rows.parquet")
    assert (made.returncode, made.stderr.count("\n")) == (2, 1)
    assert "rows.parquet: this is not Parquet" in made.stderr
    assert (tmp_path / "pairs.jsonl").read_bytes() == written
    with pytest.raises(UserError, match="did you mean"):
        table.get("glue_colla")
