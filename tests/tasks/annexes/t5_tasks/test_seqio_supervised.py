"""Supervised tasks as seqio Tasks: their examples, postprocessors and metrics."""

import string

import pytest
import seqio

from tasks.annexes.t5_tasks import seqio_supervised, table
from tests.support.small_tokenizers import t5

pytestmark = [pytest.mark.tensorflow, pytest.mark.processes]

WSC = {
    "text": "The stable opened , which made it airy.", "span1_text": "The stable",
    "span2_text": "it", "span2_index": 6, "label": 1,
}  # fmt: skip
QUESTION = {"question": "Who?", "context": "Ann did.", "answers": {"text": ["Ann", "Ann did"]}}
LENGTHS = {"inputs": 64, "targets": 16}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("characters") / "characters"
    return t5(prefix, [string.printable.strip()] * 2, 98, model_type="char")


@pytest.fixture
def registered(model):
    names = []

    def register(name, rows):
        names.append(name)
        splits = {split: lambda: iter(rows) for split in ("train", "validation")}
        return seqio_supervised.register(table.get(name), splits, model)

    yield register
    for name in names:
        seqio.TaskRegistry.remove(name)


def examples(task, split):
    dataset = task.get_dataset(LENGTHS, split, shuffle=False)
    return list(dataset.as_numpy_iterator())


def evaluated(task, texts):
    """Returns the metrics of seqio's Evaluator on the validation split."""
    evaluator = seqio.Evaluator(
        mixture_or_task_name=task.name,
        feature_converter=seqio.EncDecFeatureConverter(pack=False),
        eval_split="validation",
        sequence_length=LENGTHS,
    )
    vocabulary = task.output_features["targets"].vocabulary
    # seqio makes one array of them.
    ids = [(vocabulary.encode(text) + [1] * LENGTHS["targets"]) for text in texts]
    predictions = [(place, row[: LENGTHS["targets"]]) for place, row in enumerate(ids)]
    found, _ = evaluator.evaluate(compute_metrics=True, predict_fn=lambda *_: predictions)
    return dict(found.result()[task.name])


def test_training_and_evaluation_have_their_own_examples(registered):
    task = registered("super_glue_wsc", [WSC, {**WSC, "label": 0}])
    (train,), validation = examples(task, "train"), examples(task, "validation")
    assert len(validation) == 2
    assert train["inputs_pretokenized"].decode() == "wsc: The stable opened , which made *it* airy."
    vocabulary = task.output_features["targets"].vocabulary
    for side, text in (("inputs", train["inputs_pretokenized"]), ("targets", b"The stable")):
        assert train[side].tolist() == [*vocabulary.encode(text.decode()), 1]


def test_metrics_are_those_of_the_task(registered):
    task = registered("super_glue_wsc", [WSC, {**WSC, "label": 0}])
    assert evaluated(task, ["stable", "a list"]) == {"accuracy": 100}
    assert evaluated(task, ["stable", "the stable"]) == {"accuracy": 50}
    task = registered("squad", [QUESTION, {**QUESTION, "answers": {"text": ["Bob"]}}])
    assert evaluated(task, ["ann did", "ann"]) == {"em": 50, "f1": 50}


def test_a_task_is_replaced(registered):
    registered("squad", [QUESTION])
    task = registered("squad", [QUESTION] * 3)
    assert len(examples(task, "train")) == 3
