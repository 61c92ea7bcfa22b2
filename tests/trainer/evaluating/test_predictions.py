"""Metrics of generated text: equal to seqio's Evaluator, whatever batch, devices and processes."""

import shutil
import sys

import numpy as np
import pytest

from tasks.vocabulary import load
from tests.support import eight_devices
from tests.support.words import changed
from tests.trainer.evaluating import reversals
from trainer.data.examples import Outputs, of_batches, rows_of
from trainer.engine.program import Program
from trainer.model.transformer import build_model

pytestmark = pytest.mark.processes

ROWS = 30
MODULE = "tests/trainer/evaluating/reversals.py"
METRICS = "--evaluation.metrics=task,exact_match,first_letters"


@pytest.fixture(scope="module")
def folder(text_cache, tmp_path_factory):
    folder = tmp_path_factory.mktemp("predictions") / "copy"
    shutil.copytree(text_cache.parents[1], folder)
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


def by_seqio(task, **functions):
    """Returns the metrics of seqio's evaluator for these outputs of a model."""
    import seqio

    converter, lengths = seqio.EncDecFeatureConverter(pack=False), {"inputs": 24, "targets": 16}
    evaluator = seqio.Evaluator(task, converter, "validation", sequence_length=lengths)
    found, _ = evaluator.evaluate(compute_metrics=True, **functions)
    return found.result()[task]


@pytest.mark.tensorflow
def test_metrics_equal_those_of_seqios_evaluator(alone, folder):
    results, lines = alone
    assert len(lines) == ROWS
    assert len({line["prediction"] for line in lines}) > 3
    # Texts, since ids that are no piece's own text are not what encoding the text gives.
    texts = [(number, line["prediction"]) for number, line in enumerate(lines)]
    scores = {"scores": [line["score"] for line in lines]}
    theirs = by_seqio(
        "reversals",
        predict_fn=lambda *_: texts,
        predict_with_aux_fn=lambda *_: ([(number, [1]) for number, _ in texts], scores),
        score_fn=lambda *_: [(i, line["target_score"]) for i, line in enumerate(lines)],
    )
    assert len(theirs) == 5
    for name, value in theirs.items():
        value = getattr(value, "value", value)
        assert results["validation"][name] == pytest.approx(float(value), rel=1e-6), name
    assert {"exact_match", "first_letters", "loss"} <= results["validation"].keys()


OBJECTS = "--task=seqio:reversals_by_objects"


@pytest.mark.tensorflow
def test_metric_objects_equal_those_of_seqios_evaluator(alone, folder):
    flags = changed(*reversals.FLAGS, f"--model_dir={folder}/objects", OBJECTS)
    run = reversals.prepared("t5_1_1_tiny", *flags)
    assert not any("metric_objs" in text for _, text in run.data.consequences())
    (examples,) = run.data.examples("validation")
    found, random = examples.read(None), np.random.default_rng(0)
    ids = [random.integers(3, 600, random.integers(1, 9)).astype(np.int32) for _ in found]
    scores, target_scores = (random.normal(size=ROWS).tolist() for _ in range(2))
    outputs = Outputs(ids, scores, target_scores)
    ours = {}
    for metric in examples.of_outputs:
        ours |= metric.compute(found, outputs)
    padded = [(place, np.pad(each, (0, 8 - len(each)))) for place, each in enumerate(ids)]
    theirs = by_seqio(
        "reversals_by_objects",
        predict_fn=lambda *_: padded,
        predict_with_aux_fn=lambda *_: (padded, {"scores": scores}),
        score_fn=lambda *_: list(enumerate(target_scores)),
    )
    assert theirs.keys() == {"longest", "best", "tokens", "likeliest"}
    assert ours == pytest.approx({name: float(value) for name, value in theirs.items()})


@pytest.mark.slow
def test_metric_objects_read_what_the_model_generates(alone, folder):
    results, lines = reversals.evaluate(str(folder), 16, OBJECTS)
    found = results["validation"]
    assert found["longest"] == max(len(line["prediction"]) for line in lines)
    assert found["likeliest"] == pytest.approx(max(line["target_score"] for line in lines))
    best = max(lines, key=lambda line: line["score"])
    assert found["best"] == len(best["prediction"] + best["inputs"])


@pytest.mark.tensorflow
def test_batches_of_64_rows_give_the_same(alone, folder):
    assert_same(reversals.evaluate(str(folder), 64, METRICS), alone)


@pytest.mark.slow
def test_decoders_read_prompts_as_in_training(alone, folder):
    """The first token is the likeliest of the pass that trains, whose inputs see one another."""
    one = "--evaluation.decoding.max_new_tokens=1"
    flags = ("--evaluation.metrics=exact_match", one, "--lengths.targets=16")
    _, lines = reversals.evaluate(str(folder), 8, *flags, preset="lm_tiny")
    run = reversals.prepared(
        "lm_tiny", *reversals.FLAGS, f"--model_dir={folder}/lm", "--data.pack=false"
    )
    program = Program(run)
    params = program.initial_state().params
    (examples,) = run.data.examples("validation")
    found = examples.read(None)
    assert len(lines) == len(found) == ROWS
    batch = rows_of([(each.inputs, each.targets) for each in found], run.converter)
    logits_BLV = build_model(program.spec).apply({"params": params}, batch)
    first_B = np.argmax(batch["decoder_loss_weights"], axis=1)
    assert {len(each.inputs) for each in found} == set(first_B.tolist())
    expected = [
        examples.decode([int(np.argmax(logits_LV[first]))])
        for logits_LV, first in zip(np.asarray(logits_BLV), first_B, strict=True)
    ]
    assert [line["prediction"] for line in lines] == expected
    assert len(set(expected)) > 3
    # Each of them sees the last of the inputs.
    batch["decoder_causal_attention"] = np.zeros_like(batch["decoder_causal_attention"])
    causal_BLV = build_model(program.spec).apply({"params": params}, batch)
    assert not np.allclose(logits_BLV[0, first_B[0]], causal_BLV[0, first_B[0]], atol=1e-3)


@pytest.mark.tensorflow
def test_prompts_of_a_decoders_rows_end_where_the_loss_begins(alone, folder):
    run = reversals.prepared("lm_tiny", *reversals.FLAGS, f"--model_dir={folder}/rows")
    vocabulary = load(f"{folder}/vocabulary")
    pairs = [(np.arange(3, 9), np.array([9, 4, 1])), (np.array([5]), np.array([7, 1]))]
    batch = rows_of(pairs, run.converter)
    examples = of_batches("rows", lambda: [batch], vocabulary.ids, ()).read(None)
    for (inputs, targets), example in zip(pairs, examples, strict=True):
        assert example.inputs.tolist() == inputs.tolist()
        assert example.targets.tolist() == targets.tolist()
        assert example.target == vocabulary.decode(targets[:-1])
    # What the vocabulary cannot spell is no right answer.
    batch = rows_of([(np.array([5]), np.array([vocabulary.special.unk, 1]))], run.converter)
    examples = of_batches("rows", lambda: [batch], vocabulary.ids, ())
    (example,) = examples.read(None)
    assert example.target == "\ufffd"
    assert example.target != examples.decode(example.targets.tolist())


@pytest.mark.slow
def test_four_devices_give_the_same(alone, folder):
    flags = ("--mesh.data=2", "--mesh.fsdp=2", "--mesh.tensor=2", METRICS)
    assert_same(eight_devices.run(MODULE, str(folder), "8", *flags), alone)
