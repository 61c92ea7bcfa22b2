"""Learning from a teacher: the text it reads, the loss, a run killed and resumed, refusals."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.terminal.command_line import UserError
from tasks.vocabulary import T5_IDS
from tests.support import runs
from tests.support.decoder_folders import DECODERS, written
from tests.trainer.huggingface.conftest import random_params
from trainer.annexes.distillation import teacher
from trainer.annexes.distillation.loss import TEACHER_LOGITS
from trainer.annexes.distillation.options import DistillationConfig
from trainer.config import Config, LossConfig
from trainer.engine.loss import model_loss
from trainer.engine.program import Program
from trainer.engine.step import training_loss
from trainer.model.config import ModelConfig
from trainer.model.spec import model_spec
from trainer.model.transformer import build_model, run_model

pytestmark = pytest.mark.processes

EOS, START, S, L = 1, 0, 14, 12
ID = st.integers(2, 90)
EXAMPLE = st.tuples(st.lists(ID, max_size=4), st.booleans(), st.lists(ID, min_size=1, max_size=4))


# An encoder-decoder with as many rows as the decoders that teach it.
STUDENT = ("--preset=t5_1_1_tiny", "--model.vocab_size=704")


def run_of(*flags):
    run = runs.stub(runs.config_of(STUDENT[1], *flags), vocab_size=704)
    run.converter = SimpleNamespace(special=T5_IDS)
    return run


def batch_of(rows):
    """Returns a packed batch of rows of examples (inputs, whether EOS follows, targets)."""
    found = {
        name: np.zeros((len(rows), size), np.int32)
        for side, size, kinds in (
            ("encoder", S, ("input_tokens", "segment_ids")),
            ("decoder", L, ("input_tokens", "target_tokens", "segment_ids")),
        )
        for name in (f"{side}_{kind}" for kind in kinds)
    }
    for row, examples in enumerate(rows):
        source = target = 0
        for number, (inputs, ends, targets) in enumerate(examples, 1):
            inputs = inputs + [EOS] * ends
            place = row, slice(source, source + len(inputs))
            found["encoder_input_tokens"][place] = inputs
            found["encoder_segment_ids"][place] = number
            place = row, slice(target, target + len(targets))
            found["decoder_target_tokens"][place] = targets
            found["decoder_input_tokens"][place] = [START, *targets[:-1]]
            found["decoder_segment_ids"][place] = number
            source, target = source + len(inputs), target + len(targets)
    return found


@settings(max_examples=40)
@given(st.lists(st.lists(EXAMPLE, max_size=2), min_size=1, max_size=3), st.booleans())
def test_a_decoder_reads_inputs_and_targets_as_one_text(rows, prefix):
    batch = batch_of(rows)
    joined, place_BL = jax.tree.map(np.asarray, teacher.one_text(batch, EOS, prefix))
    for row, examples in enumerate(rows):
        ids, segments, seen, places = [], [], [], []
        for number, (inputs, _, targets) in enumerate(examples, 1):
            text = [START, *inputs, *targets]
            places += [len(ids) + len(inputs) + index for index in range(len(targets))]
            ids += text[:-1]
            segments += [number] * (len(text) - 1)
            seen += [1] * (1 + len(inputs)) + [0] * (len(targets) - 1)
        rest = [0] * (S + L - len(ids))
        assert joined["decoder_input_tokens"][row].tolist() == ids + rest
        assert joined["decoder_segment_ids"][row].tolist() == segments + rest
        if prefix:
            assert joined["decoder_causal_attention"][row].tolist() == seen + rest
        assert place_BL[row, : len(places)].tolist() == places
    assert ("decoder_causal_attention" in joined) == prefix


@pytest.mark.parametrize("packed", [True, False])
def test_logits_of_a_decoder_are_those_of_the_texts_alone(packed):
    config = DECODERS["qwen3"]
    params = random_params(config)
    examples = [([5, 9, 7], True, [30, 31, 3]), ([8], False, [44, 45])]
    rows = [examples] if packed else [[each] for each in examples]
    batch = batch_of(rows)
    if not packed:
        batch = {name: each for name, each in batch.items() if "segment" not in name}
    found = np.asarray(teacher._labelled(config, EOS, False, params, batch))
    at = 0
    for number, (inputs, _, targets) in enumerate(examples):
        text = np.array([[START, *inputs, *targets]], np.int32)
        alone = {"decoder_input_tokens": text[:, :-1], "decoder_target_tokens": text[:, 1:]}
        whole = np.asarray(run_model(build_model(model_spec(config)), params, alone))[0]
        row, first = (0, at) if packed else (number, 0)
        mine = found[row, first : first + len(targets)]
        np.testing.assert_allclose(mine, whole[len(inputs) :], atol=2e-5)
        at += len(targets)


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


@pytest.mark.parametrize("normalizer", ["sum", "average_per_sequence"])
def test_the_loss_is_the_divergence_of_probabilities(normalizer):
    random = np.random.default_rng(0)
    student, logits = random.normal(size=(2, 2, 5, 7))
    weights = np.array([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]], np.float32)
    batch = {
        "decoder_target_tokens": random.integers(0, 7, (2, 5)),
        "decoder_loss_weights": weights,
        TEACHER_LOGITS: jnp.asarray(logits, jnp.float32),
    }
    config = Config(
        preset="lm_tiny",
        model=ModelConfig(family="lm", **SIZES),
        distillation=DistillationConfig("hf:x", weight=0.7, temperature=2.0),
    )
    model = build_model(model_spec(config.model))
    loss_config = LossConfig(normalizer=normalizer)

    def total(student):
        return training_loss(model, config).of_batch(student, batch, loss_config)

    student = jnp.asarray(student, jnp.float32)
    (found, metrics), gradient = jax.value_and_grad(total, has_aux=True)(student)
    q, p = softmax(logits / 2), softmax(np.asarray(student, np.float64) / 2)
    each = (q * (np.log(q) - np.log(p))).sum(-1)
    shares = weights if normalizer == "sum" else weights / weights.sum(-1, keepdims=True)
    divisor = 1 if normalizer == "sum" else 2
    plain = model_loss(model).of_batch(student, batch, loss_config)[0]
    expected = 0.3 * float(plain) + 0.7 * 4 * (each * shares).sum() / divisor
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    sums = [float(each) for each in metrics["teacher_divergence"]]
    np.testing.assert_allclose(sums, [(each * weights).sum(), 6], rtol=1e-5)
    other = jax.grad(lambda x: model_loss(model).of_batch(x, batch, loss_config)[0])(student)
    taught = 0.7 * 4 * (p - q) / 2 * shares[..., None] / divisor
    np.testing.assert_allclose(gradient, 0.3 * np.asarray(other) + taught, atol=1e-6)


SIZES = {"emb_dim": 8, "num_heads": 1, "head_dim": 8, "mlp_dim": 8, "vocab_size": 7}
SIZES |= {"num_encoder_layers": 0, "num_decoder_layers": 1}


def test_a_teacher_that_cannot_teach_is_refused(tmp_path):
    config = DECODERS["qwen3"]
    written(tmp_path, config)

    def begun(*flags):
        run = run_of(f"--teacher=hf:{tmp_path}", *flags)
        return teacher.features(run, Program(run))

    begun()
    with pytest.raises(UserError, match=r"--teacher=hf:.* has 704 rows in its embedding, the run"):
        begun("--model.vocab_size=800")
    small = tmp_path / "nothing"
    with pytest.raises(UserError, match="nothing"):
        begun(f"--teacher=hf:{small}")
    run = run_of(f"--teacher=hf:{tmp_path}")
    loss = training_loss(build_model(model_spec(run.config.model)), run.config)
    with pytest.raises(UserError, match="--teacher: this command makes updates without one"):
        loss.of_batch(None, {}, LossConfig())


@pytest.mark.processes
def test_a_taught_run_resumes_bit_for_bit(text_cache, tmp_path):
    written(tmp_path, DECODERS["llama"])
    flags = [*STUDENT, "--checkpoint.every_steps=2"]
    flags += [f"--teacher=hf:{tmp_path}", "--metrics.every_steps=1", "--evaluation.every_steps=0"]

    def train(model_dir, steps, *more):
        words = runs.flags_of(text_cache, model_dir, *flags, f"--train_steps={steps}", *more)
        return runs.done(runs.command("trainer.pretrain", *words))

    train(tmp_path / "whole", 4)
    train(tmp_path / "parts", 2)
    train(tmp_path / "parts", 4)
    train(tmp_path / "microbatches", 4, "--microbatches=2")
    whole, parts = (runs.metadata(tmp_path / name, 4)["checksums"] for name in ("whole", "parts"))
    assert whole == parts
    one, two = (
        [line["metrics"]["teacher_divergence"] for line in runs.curve(tmp_path / name)]
        for name in ("whole", "microbatches")
    )
    assert one[0] > 0
    np.testing.assert_allclose(one, two, rtol=1e-4)
