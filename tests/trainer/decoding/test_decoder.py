"""Searches by rules written out here, draws by their law, and what results may not depend on."""

import json
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
import torch
from scipy import stats
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import Rejected
from tests.support import eight_devices
from tests.trainer.model.conftest import TinyModel, tiny_config
from trainer.config.mesh import MeshConfig
from trainer.decoding.decoder import Decoder, Decoding, bucket
from trainer.engine.sharding import make_mesh
from trainer.model.config import ModelConfig
from trainer.model.transformer import build_model

pytestmark = pytest.mark.torch

PROMPTS = [np.arange(3, 3 + length, dtype=np.int32) for length in (5, 1, 8, 5)]
SIZES = {"num_heads": 4, "head_dim": 8, "emb_dim": 16, "mlp_dim": 24}


def config_of(family: str = "t5_1_1", **changes) -> ModelConfig:
    return tiny_config(family, **SIZES | changes)


def log_probabilities(model: TinyModel, prompt: np.ndarray, new: list[int]) -> np.ndarray:
    """Returns those of the token after `new`, by the training pass."""
    inputs = np.zeros((1, 8), np.int32)  # one program for all lengths; what comes later is not seen
    inputs[0, 1 : 1 + len(new)] = new
    batch = {
        "encoder_input_tokens": np.pad(prompt, (0, 16 - len(prompt)))[None],
        "decoder_input_tokens": inputs,
        "decoder_target_tokens": np.ones_like(inputs),
    }
    logits = program(model.spec)({"params": model.params}, batch)
    return np.asarray(jax.nn.log_softmax(logits))[0, len(new)]


@cache
def program(spec):
    return jax.jit(build_model(spec).apply)


def beams_of(model, prompt, beams: int, alpha: float, size: int, eos_id: int):
    """Returns the (score, ids) of T5X's beam search, best first, written out for one prompt.

    Where fewer end than are kept, the best of those that have not ended follow.
    """
    live, done = [(0.0, [])], []
    for length in range(1, size + 1):
        candidates = [
            (total + gain, [*ids, token])
            for total, ids in live
            for token, gain in enumerate(log_probabilities(model, prompt, ids))
        ]
        candidates = sorted(candidates, key=lambda each: -each[0])[: 2 * beams]
        penalty = ((5 + length) / 6) ** alpha
        done += [(total / penalty, ids) for total, ids in candidates if ids[-1] == eos_id]
        done = sorted(done, key=lambda each: -each[0])[:beams]
        live = [each for each in candidates if each[1][-1] != eos_id][:beams]
        reach = live[0][0] / ((5 + size + 1) / 6) ** alpha
        if len(done) == beams and done[-1][0] > reach:
            break
    return [*done, *((total / penalty, ids) for total, ids in live)][:beams]


@pytest.mark.parametrize("alpha", [0.6, 0.0])
def test_beam_search_is_that_of_t5x(alpha):
    model = TinyModel(config_of())
    decoding = Decoding(
        method="beam", num_beams=2, max_new_tokens=4, alpha=alpha, num_return_sequences=2, eos_id=9
    )
    found = Decoder(model.config, decoding)(model.params, PROMPTS[:2])
    for number, prompt in enumerate(PROMPTS[:2]):
        expected = beams_of(model, prompt, 2, alpha, 4, 9)
        for ours, (score, ids) in zip(found[2 * number :][:2], expected, strict=True):
            assert ours.ids.tolist() == [token for token in ids if token != 9]
            assert ours.score == pytest.approx(score, rel=1e-4)


LAWS = {
    "softmax": {},
    "temperature": {"temperature": 2.5},
    "top_k": {"temperature": 4.0, "top_k": 5},
    "top_p": {"temperature": 4.0, "top_p": 0.7},
    "all": {"temperature": 3.0, "top_k": 12, "top_p": 0.8},
}


@pytest.mark.parametrize("name", LAWS)
def test_draws_follow_the_law_of_transformers(name):
    choices, draws = LAWS[name], 4000
    model = TinyModel(config_of())
    logits = torch.from_numpy(log_probabilities(model, PROMPTS[0], []).copy())[None]
    for key, warper in (
        ("temperature", TemperatureLogitsWarper),
        ("top_k", TopKLogitsWarper),
        ("top_p", TopPLogitsWarper),
    ):
        if key in choices:
            logits = warper(choices[key])(None, logits)
    law = torch.softmax(logits.double(), -1)[0].numpy()
    decoding = Decoding(
        method="sample", max_new_tokens=1, num_return_sequences=draws, eos_id=10**6, **choices
    )
    found = Decoder(model.config, decoding)(model.params, PROMPTS[:1])
    counts = np.bincount([int(each.ids[0]) for each in found], minlength=len(law))
    assert counts[law == 0].sum() == 0
    common = law * draws >= 5
    observed = [*counts[common], counts[~common].sum()]
    expected = np.array([*law[common], law[~common].sum()]) * draws
    kept = expected > 0
    assert stats.chisquare(np.array(observed)[kept], expected[kept]).pvalue > 0.01


def test_draws_depend_on_seed_and_example_alone():
    model = TinyModel(config_of("llama"))
    choices = {"method": "sample", "max_new_tokens": 6, "num_return_sequences": 2}

    def draw(prompts, ids, **more):
        found = Decoder(model.config, Decoding(**choices | more))(model.params, prompts, ids)
        return [[each.ids.tolist() for each in found[n : n + 2]] for n in range(0, len(found), 2)]

    together = draw(PROMPTS, [0, 1, 2, 2**40])
    assert draw(PROMPTS[::-1], [2**40, 2, 1, 0], batch_size=1)[::-1] == together
    assert draw(PROMPTS[2:], [2, 2**40]) == together[2:]
    assert draw(PROMPTS, [0, 1, 2, 2**40], seed=1) != together
    # The same prompt with other ids has other draws, and so has each of its sequences.
    assert together[0] != together[3]
    assert together[0][0] != together[0][1]


def test_results_end_before_eos_and_scores_are_log_probabilities():
    model = TinyModel(config_of())
    first = Decoder(model.config, Decoding(max_new_tokens=6, eos_id=10**6))
    (whole,) = first(model.params, PROMPTS[:1])
    eos_id = int(whole.ids[3])
    place = whole.ids.tolist().index(eos_id)
    (cut,) = Decoder(model.config, Decoding(max_new_tokens=6, eos_id=eos_id))(
        model.params, PROMPTS[:1]
    )
    assert (len(whole.ids), whole.ended) == (6, False)
    assert (cut.ids.tolist(), cut.ended) == (whole.ids[:place].tolist(), True)
    gains = [
        log_probabilities(model, PROMPTS[0], whole.ids[:n].tolist())[whole.ids[n]]
        for n in range(place + 1)
    ]
    assert cut.score == pytest.approx(sum(gains), rel=1e-4)


def test_models_and_prompts_that_cannot_be_decoded_are_refused():
    with pytest.raises(UserError, match="family bert has no decoder"):
        Decoder(config_of("bert", max_positions=16), Decoding())
    config = config_of("gpt2", max_positions=16)
    with pytest.raises(UserError, match=r"prompt 4 has 9 tokens, .* at most 8 of its 16 positions"):
        Decoder(config, Decoding(max_new_tokens=8))(
            TinyModel(config).params, [*PROMPTS, np.arange(9)]
        )
    with pytest.raises(UserError, match="max_new_tokens is 20, but the model has 16 positions"):
        Decoder(config, Decoding(max_new_tokens=20))(TinyModel(config).params, PROMPTS)


@pytest.mark.parametrize(
    ("choices", "field"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"method": "beam", "top_k": 2}, "top_k"),
        ({"method": "sample", "temperature": 0.0}, "temperature"),
        ({"method": "beam", "early_stopping": "true"}, "early_stopping"),
        ({"num_return_sequences": 2}, "num_return_sequences"),
        ({"method": "beam", "num_return_sequences": 5}, "num_return_sequences"),
        ({"method": "best"}, "method"),
    ],
)
def test_choices_without_effect_are_refused(choices, field):
    with pytest.raises(Rejected) as refused:
        Decoding(**choices)
    assert refused.value.field == field


def test_few_lengths_are_compiled_and_little_is_padding():
    buckets = {length: bucket(length) for length in range(1, 2000)}
    assert all(length <= size for length, size in buckets.items())
    assert all(size - length <= max(8, length / 4) for length, size in buckets.items())
    assert len({*buckets.values()}) < 36
    assert bucket(9, 12) == 12


def results(mesh: bool) -> list:
    config = replace(config_of("llama"), num_kv_heads=2)
    devices = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)) if mesh else None
    found = []
    for choices in ({}, {"method": "beam", "num_beams": 2}, {"method": "sample"}):
        decoder = Decoder(config, Decoding(max_new_tokens=4, **choices), devices)
        found += [each.ids.tolist() for each in decoder(TinyModel(config).params, PROMPTS[:3])]
    return found


@pytest.mark.slow
def test_eight_devices_find_the_same():
    assert eight_devices.run(__file__, timeout=600) == results(mesh=False)


if __name__ == "__main__":
    print(json.dumps(results(mesh=True)))
