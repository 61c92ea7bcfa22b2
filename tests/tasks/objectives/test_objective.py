"""The facts that objectives state about themselves."""

import numpy as np
import pytest

from tasks import registry
from tasks.objectives import AutoregressiveLM
from tasks.vocabulary import TokenIds

# Task -> (architectures, codes text, appends EOS, description).
FACTS = {
    "span_corruption": (("encoder_decoder", "decoder"), False, True, "denoising (mask random sp"),
    "prefix_lm": (("encoder_decoder", "decoder"), True, True, "denoising (mask random prefix (no"),
    "decoder_prefix_lm": (("decoder",), True, False, "decoder prefix LM"),
    "autoregressive_lm": (("decoder",), True, True, "autoregressive LM (eos window)"),
    "full_lm": (("decoder",), True, False, "autoregressive LM (eos document)"),
    "ul2": (("encoder_decoder", "decoder"), False, True, "UL2, mode <extra_id_9"),
    "masked_lm": (("encoder",), False, False, "masked LM (noise density 0.15, longest 3, mask"),
    "deshuffling": (
        ("encoder_decoder", "decoder"),
        False,
        True,
        "denoising (mask iid tokens (nois",
    ),
}


@pytest.mark.parametrize("name", FACTS)
def test_an_objective_states_its_facts(name):
    objective = registry.get(f"c4_{name}").objective
    architectures, codes_text, appends_eos, description = FACTS[name]
    assert objective.architectures == architectures
    assert objective.codes_text == codes_text
    assert objective.appends_eos == appends_eos
    assert objective.describe(np.uint64(5)).startswith(description)


def test_targets_end_in_the_eos_that_the_objective_says():
    tokens_WN, lengths_W = np.array([[7, 8, 9], [7, 8, 0]], np.int32), np.array([3, 2])
    ids = TokenIds(20, 0)
    for eos, last in (("window", [1, 1]), ("document", [9, 8])):
        objective = AutoregressiveLM(eos)
        made_WN, made_W = objective.examples(tokens_WN, lengths_W, None, None, ids)["targets"]
        assert made_WN[[0, 1], made_W - 1].tolist() == last
        assert objective.appends_eos == (last == [1, 1])
