"""With a vocabulary whose id 0 is a piece, seqio's batches tell padding by lengths."""

import numpy as np
import pytest
import seqio
import tensorflow as tf

from tasks.objectives import Lengths
from tasks.vocabulary import T5_IDS, SpecialIds
from tests.support.words import changed
from trainer.annexes.seqio_tasks import seqio_data
from trainer.annexes.seqio_tasks.seqio_data import SeqioData
from trainer.config.from_flags import build_config
from trainer.data import features
from trainer.setup import prepare

pytestmark = [pytest.mark.tensorflow, pytest.mark.processes]

SPECIAL = SpecialIds(pad=None, eos=9, unk=None, bos=8)
INPUTS = [[0, 3, 0, 9], [5, 0, 0, 0, 0, 9], [0, 9]]
TARGETS = [[0, 0, 9], [4, 9], [7, 0, 6, 0, 9]]


class Odd(seqio.PassThroughVocabulary):
    """Ids of 0 to 9, of which 0 is a piece."""

    zero_pads = False
    bos_id, eos_id, unk_id = 8, 9, None

    def __init__(self):
        super().__init__(10, eos_id=9)


@pytest.fixture
def task():
    def source(split, shuffle_files, seed=None):
        rows = zip(INPUTS, TARGETS, strict=True)
        signature = {side: tf.TensorSpec([None], tf.int32) for side in ("inputs", "targets")}
        made = [{"inputs": one, "targets": other} for one, other in rows]
        return tf.data.Dataset.from_generator(lambda: iter(made), output_signature=signature)

    def add(name, sides):
        seqio.TaskRegistry.remove(name)
        seqio.TaskRegistry.add(
            name,
            source=seqio.FunctionDataSource(source, ["train"]),
            preprocessors=[],
            output_features={side: seqio.Feature(Odd(), add_eos=False) for side in sides},
            metric_fns=[],
        )

    add("odd_pairs", ["inputs", "targets"])
    add("odd_lm", ["targets"])


def data(preset, name, *flags):
    arguments = [f"--task=seqio:{name}", "--batch_size=3", "--model_dir=nowhere", *flags]
    arguments += ["--lengths.targets=8", "--data.shuffle=none", "--evaluation.every_steps=0"]
    config, origins = build_config(preset, changed(*arguments))
    return config, SeqioData(config, name), (config, origins)


def padded(rows):
    sizes = np.array(list(map(len, rows)))
    values = np.zeros((len(rows), max(sizes)), np.int32)
    for row, value in zip(values, rows, strict=True):
        row[: len(value)] = value
    return values, sizes


@pytest.mark.parametrize(
    ("preset", "name"),
    [("t5_1_1_tiny", "odd_pairs"), ("lm_tiny", "odd_pairs"), ("lm_tiny", "odd_lm")],
)
def test_one_example_a_row(task, preset, name):
    flags = ["--data.pack=false", *(["--lengths.inputs=8"] if name == "odd_pairs" else [])]
    config, made, _ = data(preset, name, *flags)
    assert made.special == SPECIAL
    lengths = Lengths(8 if name == "odd_pairs" else 0, 8)
    expected = features.converter(config.model, lengths, SPECIAL)(
        {"inputs": padded(INPUTS), "targets": padded(TARGETS)}
    )
    found = next(made.training(0))
    assert found.keys() == expected.keys()
    for feature in ("encoder_input_tokens", "decoder_target_tokens", "decoder_segment_ids",
                    "encoder_segment_ids", "decoder_loss_weights"):  # fmt: skip
        if feature in expected:
            np.testing.assert_array_equal(found[feature], expected[feature])
    seen = expected["decoder_segment_ids"] > 0  # what a decoder reads at padding is masked
    for feature in ("decoder_input_tokens", "decoder_causal_attention"):
        if feature in expected:
            np.testing.assert_array_equal(found[feature][seen], expected[feature][seen])


@pytest.mark.parametrize("preset", ["t5_1_1_tiny", "lm_tiny"])
def test_packed_rows_lose_no_token(task, preset):
    flags = ["--lengths.inputs=12"]
    if preset == "lm_tiny":
        flags += ["--lengths.targets=12"]
    _, made, _ = data(preset, "odd_pairs", *flags, "--batch_size=1")
    assert made.special.start == 8
    batch = next(made.training(0))
    segments = batch["decoder_segment_ids"]
    weights, targets = batch["decoder_loss_weights"], batch["decoder_target_tokens"]
    rows = [targets[(segments == number) & (weights > 0)].tolist() for number in range(1, 4)]
    assert [row for row in rows if row] == TARGETS[: len([row for row in rows if row])]
    assert rows[0] == TARGETS[0]
    first = (batch["decoder_positions"] == 0) & (segments > 0)
    assert (batch["decoder_input_tokens"][first] == 8).all()
    after = (batch["decoder_positions"] > 0) & (segments > 0)
    before = np.roll(targets, 1, axis=1)
    np.testing.assert_array_equal(batch["decoder_input_tokens"][after], before[after])
    if preset == "t5_1_1_tiny":
        inputs, places = batch["encoder_input_tokens"], batch["encoder_segment_ids"]
        assert inputs[places == 1].tolist() == INPUTS[0]


def test_the_run_says_so_and_records_it(task, tmp_path):
    _, made, (config, origins) = data("lm_tiny", "odd_lm", f"--model_dir={tmp_path}")
    assert "padding identified by lengths" in dict(made.consequences())["task"]
    assert made.tasks_record["odd_lm"]["padding"] == "lengths"
    run = prepare(config, origins)
    assert run.converter.special == SPECIAL


def test_vocabularies_whose_zero_pads_stay_as_they_were():
    assert seqio_data.special_of(seqio.ByteVocabulary()) is T5_IDS
    assert seqio_data.special_of(seqio.PassThroughVocabulary(10)) is T5_IDS
