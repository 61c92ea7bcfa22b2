"""Metrics of generated text: equal to seqio's Evaluator, whatever batch, devices and processes."""

import sys

import pytest

from tests import eight_devices
from tests.trainer.evaluating import reversals

ROWS = 30
MODULE = "tests/trainer/evaluating/reversals.py"
METRICS = "--evaluation.metrics=task,exact_match,first_letters"


@pytest.fixture(scope="module")
def folder(text_cache):
    folder = text_cache.parents[1]
    text = reversals.MODULE.format(folder=str(folder), rows=ROWS)
    (folder / "reversals.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    """(results, predictions) of a batch of 8 on one device."""
    import seqio

    found = reversals.evaluate(str(folder), 8, METRICS)
    yield found
    seqio.TaskRegistry.reset()
    sys.modules.pop("reversals", None)
    sys.path.remove(str(folder))


def assert_same(found, expected):
    """Compares metrics up to rounding, and texts exactly."""
    (results, lines), (wanted, wanted_lines) = found, expected
    assert results.keys() == wanted.keys()
    for split, values in wanted.items():
        assert results[split] == pytest.approx(values, rel=2e-5), split
    assert [line["prediction"] for line in lines] == [line["prediction"] for line in wanted_lines]


def test_metrics_equal_those_of_seqios_evaluator(alone, folder):
    import seqio

    results, lines = alone
    assert len(lines) == ROWS
    assert len({line["prediction"] for line in lines}) > 3
    evaluator = seqio.Evaluator(
        mixture_or_task_name="reversals",
        feature_converter=seqio.EncDecFeatureConverter(pack=False),
        eval_split="validation",
        sequence_length={"inputs": 24, "targets": 16},
    )
    # Texts, since ids that are no piece's own text are not what encoding the text gives.
    texts = [(number, line["prediction"]) for number, line in enumerate(lines)]
    scores = {"scores": [line["score"] for line in lines]}
    found, _ = evaluator.evaluate(
        compute_metrics=True,
        predict_fn=lambda *_: texts,
        predict_with_aux_fn=lambda *_: ([(number, [1]) for number, _ in texts], scores),
        score_fn=lambda *_: [(i, line["target_score"]) for i, line in enumerate(lines)],
    )
    theirs = found.result()["reversals"]
    assert len(theirs) == 5
    for name, value in theirs.items():
        value = getattr(value, "value", value)
        assert results["validation"][name] == pytest.approx(float(value), rel=1e-6), name
    assert {"exact_match", "first_letters", "loss"} <= results["validation"].keys()


def test_batches_of_64_rows_give_the_same(alone, folder):
    assert_same(reversals.evaluate(str(folder), 64, METRICS), alone)


@pytest.mark.slow
def test_four_devices_give_the_same(alone, folder):
    flags = ("--mesh.data=2", "--mesh.fsdp=2", "--mesh.tensor=2", METRICS)
    assert_same(eight_devices.run(MODULE, str(folder), "8", *flags), alone)
