"""The first core that supports an attention computes it; kernels of annexes are tried first."""

from dataclasses import replace

import pytest

from trainer.model import attention_cores
from trainer.model.attention_cores import Core, Reason, Request, select
from trainer.model.device import Device

PLAIN = Request(dtype="float32", num_heads=4, head_dim=8, device=Device("TPU v5 lite"))
REFUSING = Core("no", "", lambda request: Reason("head_dim", "16"))
WILLING = Core("yes", "", lambda request: None)


@pytest.mark.parametrize(
    ("setting", "changes", "chosen"),
    [
        ("auto", {}, "einsum"),
        ("dot_product", {}, "dot_product"),
        ("dot_product", {"cached": True}, "einsum"),
        ("cudnn", {"dtype": "bfloat16"}, "cudnn"),
    ],
)
def test_the_named_core_computes_what_it_supports(monkeypatch, setting, changes, chosen):
    monkeypatch.setattr(attention_cores, "every", lambda slot: [REFUSING])
    assert select(setting, replace(PLAIN, **changes)).name == chosen


def test_the_first_that_supports_it_is_chosen(monkeypatch):
    slots = {"attention_cores.auto.tpu": [REFUSING, WILLING]}
    monkeypatch.setattr(attention_cores, "every", lambda slot: slots.get(slot, []))
    assert select("auto", PLAIN) is WILLING
    assert select("einsum", PLAIN).name == "einsum"
    assert select("auto", replace(PLAIN, device=Device("cpu"))).name == "einsum"


def test_a_pattern_needs_a_core_for_patterns(monkeypatch):
    class Blocks:
        block = 4

    asked = replace(PLAIN, pattern=Blocks())
    slots = {}
    monkeypatch.setattr(attention_cores, "every", lambda slot: slots.get(slot, []))
    with pytest.raises(ValueError, match="no attention core"):
        select("auto", asked)
    assert select("auto", replace(asked, cached=True)).name == attention_cores.EINSUM
    slots["attention_cores.patterned"] = [WILLING]
    assert select("einsum", asked) is WILLING
