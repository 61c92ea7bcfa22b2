"""Dynamic tanh."""

from tests.trainer.model.conftest import initial, tiny_config
from trainer.annexes.march.layers import DynamicTanh
from trainer.model.spec import model_spec


def test_a_dynamic_tanh_starts_as_its_option_says():
    spec = model_spec(tiny_config("llama", norm="dynamic_tanh:alpha=0.25"))
    assert spec.decoder.layers[0].norm == spec.decoder.norm == DynamicTanh(0.25)
    assert initial(spec, "decoder/decoder_norm/alpha").tolist() == [0.25]
