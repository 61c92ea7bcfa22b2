"""Totals of t5-experiments' BERTs."""

from tests.support.totals import parameter_total
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
