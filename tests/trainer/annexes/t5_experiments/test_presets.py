"""Totals of t5-experiments' BERTs, and the optimizers of its models."""

import dataclasses

import pytest

from tasks.terminal.command_line import UserError
from tests.support.totals import parameter_total
from tests.trainer.reporting.test_reports import optimizer_line
from trainer.config import stored_model
from trainer.config.mesh import check_dimensions
from trainer.config.presets import model_preset


def test_the_berts_of_t5_experiments():
    base = parameter_total(model_preset("bert_base"))
    layer = 12 * 768**2 + (5 * 768 + 3072) + 2 * 2 * 768  # kernels, biases, norms
    small, last_norm, table = base - 8 * layer, 2 * 768, 512 * 768
    for name, total in (
        ("bert_base_pre_ln", base + last_norm),
        ("bert_base_4l", small),
        ("bert_base_4l_pre_ln_relative", small + last_norm - table + 12 * 32),
        ("bert_base_4l_pre_ln_rotary", small + last_norm - table),
    ):
        assert parameter_total(model_preset(name)) == total, name
    assert model_preset("bert_base_4l_pre_ln_rotary").rotated_channels == 16


@pytest.mark.parametrize(
    ("preset", "kind"), [("t5_1_0_base_only_cdq", "t5"), ("bert_base_4l", "bert")]
)
def test_a_run_with_the_default_optimizer_names_that_of_the_source(preset, kind):
    hint = f"; the source of {preset} trains with --optimizer_preset=t5_experiments_{kind}"
    assert optimizer_line(preset) == f"adafactor, T5X's default{hint}"
    line = optimizer_line(preset, optimizer_preset=f"t5_experiments_{kind}")
    assert line == f"adamw, optimizer preset t5_experiments_{kind}"


def test_conditional_heads_are_kept_whole():
    sizes, model = {"data": 1, "fsdp": 1, "tensor": 4}, model_preset("t5_1_0_base_cdq")
    with pytest.raises(UserError, match="conditional_heads 6 is not divisible by 4"):
        check_dimensions(sizes, "standard", model, [8], 1)
    check_dimensions(sizes, "standard", model_preset("t5_1_0_base_only_cdq"), [8], 1)


def test_the_field_of_earlier_versions_is_read():
    stored = dataclasses.asdict(model_preset("t5_1_0_tiny"))
    for count, expected in ((0, "none"), (3, "memory_tokens:count=3")):
        assert stored_model({**stored, "memory_tokens": count}, "x").stack_parts == expected
    preset = model_preset("t5_1_0_small_memory_10")
    stored = dataclasses.asdict(dataclasses.replace(preset, stack_parts="none"))
    assert stored_model({**stored, "memory_tokens": 10}, "x") == preset
