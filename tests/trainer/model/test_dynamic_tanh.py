"""Dynamic tanh against its formula in float64 NumPy."""

import numpy as np

from tests.trainer.model.conftest import TinyModel, tiny_config
from trainer.config.presets import model_preset
from trainer.huggingface import configs
from trainer.model.dense import Shared
from trainer.model.parametrisation import StandardParametrisation
from trainer.model.spec import model_spec
from trainer.zoo.march_parts import DynamicTanh


def test_outputs_are_those_of_the_formula():
    random = np.random.default_rng(0)
    x = random.normal(size=(2, 3, 8))
    params = {"alpha": np.array([0.7]), "scale": random.normal(size=8), "bias": np.ones(8)}
    module = DynamicTanh().build(Shared(8, 8, "float32", 0.0, StandardParametrisation()), "norm")
    found = module.apply({"params": params}, x)
    expected = params["scale"] * np.tanh(0.7 * x) + params["bias"]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_alpha_starts_as_the_option_says_and_moves_the_logits(batch):
    spec = model_spec(tiny_config("llama", norm="dynamic_tanh:alpha=0.25"))
    assert spec.decoder.layers[0].norm == spec.decoder.norm == DynamicTanh(0.25)
    model = TinyModel("llama", norm="dynamic_tanh")
    before = model.apply(batch)
    model.params["decoder"]["layers_0"]["pre_mlp_layer_norm"]["alpha"] += 1.0
    assert np.abs(np.asarray(model.apply(batch) - before)).max() > 1e-2


def test_its_export_is_refused():
    found = configs.refusal(model_preset("llama_tiny_dynamic_tanh"))
    assert found == "transformers has no llama model with norm dynamic_tanh"
