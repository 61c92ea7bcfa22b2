"""Ids and scores of searches equal those of transformers' `generate` on exported models."""

import shutil
from functools import cached_property, partial

import numpy as np
import pytest
import torch

from tests.trainer.huggingface.conftest import Exported
from trainer.decoding.decoder import Decoder, Decoding
from trainer.huggingface import configs, modeling_palimpsest, parity

pytestmark = pytest.mark.torch

NEW = 10
LENGTHS = (9, 4, 7)
# T5 1.0 and 1.1, mT5, grouped heads, T5's decoder alone, Primer's convolutions, GPT-2.
FAST, SLOW = ("t5_1_1", "llama3", "lm"), ("t5_1_0", "mt5", "primer", "gpt2")
slow = partial(pytest.param, marks=pytest.mark.slow)
NAMES = [*FAST, *map(slow, SLOW)]
BEAMS = {
    "plain": {},
    "short": {"alpha": 0.0, "early_stopping": "true"},
    "long": {"alpha": 2.0, "early_stopping": "never", "num_return_sequences": 3},
}


def prompts() -> list[np.ndarray]:
    random = np.random.default_rng(5)
    return [random.integers(3, 380, length).astype(np.int32) for length in LENGTHS]


class Pair:
    """A random model, and the same in transformers."""

    def __init__(self, name, folder):
        exported = Exported(name, folder)
        self.name, self.config, self.params = name, exported.config, exported.params
        if exported.written["model_type"] == configs.CUSTOM:
            shutil.copy(modeling_palimpsest.__file__, folder)
        self.theirs = parity.their_model(str(folder), exported.written)

    def ours(self, **choices):
        decoder = Decoder(self.config, Decoding(max_new_tokens=NEW, **choices))
        return decoder(self.params, prompts())

    def generate(self, eos_id, **arguments):
        """Returns the ids that transformers generates, and scores of beams."""
        encodes = self.theirs.config.is_encoder_decoder
        ids = torch.zeros((len(LENGTHS), max(LENGTHS) + (not encodes)), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts()):
            prompt = torch.from_numpy(prompt if encodes else np.append(np.int32(0), prompt))
            place = slice(len(prompt)) if encodes else slice(-len(prompt), None)
            ids[row, place], mask[row, place] = prompt.long(), 1
        with torch.no_grad():
            how = {"do_sample": False, "return_dict_in_generate": True, "output_scores": True}
            how |= {"max_new_tokens": NEW, "eos_token_id": eos_id, "pad_token_id": 0}
            found = self.theirs.generate(ids, attention_mask=mask, **how, **arguments)
        rows = found.sequences[:, 1 if encodes else ids.shape[1] :].numpy()
        cut = [row[: np.argmax(row == eos_id)] if eos_id in row else row for row in rows]
        return cut, getattr(found, "sequences_scores", None)

    @cached_property
    def common(self) -> int:
        """An id that a text of a greedy search has in the middle, to serve as EOS."""
        return int(self.ours(eos_id=10**6)[0].ids[NEW // 2])


@pytest.fixture(scope="module", params=NAMES)
def pair(request, tmp_path_factory):
    return Pair(request.param, tmp_path_factory.mktemp("decoding") / request.param)


def check(ours, theirs):
    assert [each.ids.tolist() for each in ours] == [row.tolist() for row in theirs]


def test_greedy_ids_are_equal(pair):
    eos_id = pair.common
    ours = pair.ours(eos_id=eos_id)
    assert any(each.ended for each in ours)
    check(ours, pair.generate(eos_id, num_beams=1)[0])


# The other laws do not depend on the model.
LAWS = [
    *((name, "plain") for name in ("t5_1_1", "llama3")),
    ("t5_1_1", "short"),
    ("t5_1_1", "long"),
]
LAWS += [slow(name, "plain") for name in ("lm", *SLOW)]


@pytest.mark.parametrize(("pair", "name"), LAWS, indirect=["pair"])
def test_beams_are_equal(pair, name):
    eos_id, choices = pair.common, BEAMS[name]
    ours = pair.ours(
        eos_id=eos_id, method="beam", num_beams=3, length_penalty="transformers", **choices
    )
    early = {"false": False, "true": True, "never": "never"}[choices.get("early_stopping", "false")]
    theirs, scores = pair.generate(
        eos_id, num_beams=3, length_penalty=choices.get("alpha", 1.0), early_stopping=early,
        num_return_sequences=choices.get("num_return_sequences", 1),
    )  # fmt: skip
    check(ours, theirs)
    np.testing.assert_allclose([each.score for each in ours], scores.numpy(), rtol=1e-4)


CUSTOM = ["primer", *map(slow, ("lm", "primer_ez"))]


@pytest.mark.parametrize("name", CUSTOM)
def test_the_cache_of_custom_code_changes_nothing(name, tmp_path):
    pair = Pair(name, tmp_path / name)
    for beams in (1, 3):
        with_cache, _ = pair.generate(1, num_beams=beams, use_cache=True)
        without, _ = pair.generate(1, num_beams=beams, use_cache=False)
        assert [row.tolist() for row in with_cache] == [row.tolist() for row in without]


def test_a_cached_call_of_custom_code_has_the_logits_of_a_whole_one(tmp_path):
    model = Pair("primer", tmp_path / "primer").theirs
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, 380, (2, 10)))
    prefix = (torch.arange(10) < 4).long().expand(2, -1)
    with torch.no_grad():
        whole = model(ids, prefix_mask=prefix).logits
        first = model(ids[:, :4], prefix_mask=prefix[:, :4], use_cache=True)
        cache, parts = first.past_key_values, [first.logits]
        for end in (7, 8, 10):  # several tokens at once, and one
            begin = cache.get_seq_length()
            more = {"past_key_values": cache, "use_cache": True}
            parts.append(model(ids[:, begin:end], prefix_mask=prefix[:, :end], **more).logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-5)
