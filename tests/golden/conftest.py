"""The arrays of the reference folder; tests run over what is found in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.support.compiled import compiled
from trainer.config import LossConfig
from trainer.engine.loss import loss_and_metrics
from trainer.model.config import ModelConfig
from trainer.model.spec import model_spec
from trainer.model.transformer import Transformer

ARRAY_SETS = ("encdec_untied", "encdec_tied", "lm_untied", "lm_tied")


@pytest.fixture(scope="module", autouse=True)
def compared_as_users_run_it(compiled_as_users_do: None) -> None:
    """Compiles as users do, with the optimisations that other tests leave out."""


@dataclass(frozen=True)
class ArraySet:
    """One model's parameters, batches and results, by T5X."""

    name: str
    arrays: dict[str, np.ndarray]
    meta: dict[str, Any]
    _logits: dict[str, np.ndarray] = field(default_factory=dict)

    def names(self, prefix: str) -> list[str]:
        """Returns the names that start with `prefix`, without it."""
        return [name.removeprefix(prefix) for name in self.arrays if name.startswith(prefix)]

    def tree(self, prefix: str) -> dict[str, Any]:
        """Returns the nested dict of the arrays under `prefix`."""
        tree: dict[str, Any] = {}
        for name in self.names(prefix):
            *parents, leaf = name.split("/")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[leaf] = self.arrays[prefix + name]
        return tree

    @cached_property
    def params(self) -> dict[str, Any]:
        return self.tree("params/")

    def batch(self, variant: str) -> dict[str, np.ndarray]:
        """`NAME__causal_mask` is batch NAME with its prefix not marked."""
        name, _, modification = variant.partition("__")
        assert modification in ("", "causal_mask"), variant
        batch = self.tree(f"batch/{name}/")
        if modification:
            del batch["decoder_causal_attention"]
        return batch

    @property
    def config(self) -> ModelConfig:
        sizes, decoder_only = self.meta["config"], self.name.startswith("lm_")
        return ModelConfig(
            family="lm" if decoder_only else "t5_1_1",
            vocab_size=sizes["vocab"],
            emb_dim=sizes["emb"],
            num_heads=sizes["heads"],
            head_dim=sizes["hd"],
            mlp_dim=sizes["mlp"],
            num_encoder_layers=0 if decoder_only else sizes["enc"],
            num_decoder_layers=sizes["lm"] if decoder_only else sizes["dec"],
            tied_logits=self.name.endswith("_tied"),
            mlp_activations=("gelu", "linear"),
        )

    @property
    def model(self) -> Transformer:
        return Transformer(model_spec(self.config))

    # Functions of a set are compiled once for all its batches of one form.
    @cached_property
    def apply(self) -> Callable[..., Any]:
        return compiled(self.model.apply)

    @cached_property
    def value_and_gradient(self) -> Callable[..., Any]:
        def loss(params: Any, batch: Any) -> Any:
            logits = self.model.apply({"params": params}, batch)
            targets, weights = batch["decoder_target_tokens"], batch["decoder_loss_weights"]
            return loss_and_metrics(logits, targets, weights, LossConfig())[0]

        return compiled(jax.value_and_grad(loss))

    def logits(self, variant: str) -> np.ndarray:
        """Returns our logits of a batch, computed once."""
        if variant not in self._logits:
            logits = self.apply({"params": self.params}, self.batch(variant))
            self._logits[variant] = np.asarray(logits)
        return self._logits[variant]


class Reference:
    """A folder of arrays, each file read on first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sets: dict[str, ArraySet] = {}

    @cached_property
    def meta(self) -> dict[str, Any]:
        return json.loads((self.folder / "model_meta.json").read_text())

    def has(self, name: str) -> bool:
        return (self.folder / f"{name}.npz").is_file()

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        with np.load(self.folder / f"{name}.npz") as file:
            return dict(file)

    def array_set(self, name: str) -> ArraySet:
        if name not in self._sets:
            self._sets[name] = ArraySet(name, self.arrays(name), self.meta)
        return self._sets[name]


_REFERENCE = pytest.StashKey[Reference]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_REFERENCE] = Reference(config.getoption("reference"))


@pytest.fixture(scope="session")
def reference(pytestconfig: pytest.Config) -> Reference:
    return pytestconfig.stash[_REFERENCE]


@pytest.fixture(scope="session")
def units(reference: Reference) -> dict[str, np.ndarray]:
    if not reference.has("units"):
        pytest.skip(f"{reference.folder} holds no units.npz")
    return reference.arrays("units")


# Values of the arguments of a test that takes `array_set`, read off the names of its arrays.
_FOUND_IN_NAMES: dict[str, Callable[[ArraySet], list[str]]] = {
    "logits_variant": lambda array_set: array_set.names("logits/"),
    "loss_variant": lambda array_set: array_set.names("loss/"),
    "loss_setting": lambda array_set: array_set.names("loss_variants/"),
    "encoder_variant": lambda array_set: array_set.names("encoder_output/"),
    "gradient_variant": lambda array_set: list(
        dict.fromkeys(name.split("/")[0] for name in array_set.names("grads/"))
    ),
    "training": lambda array_set: [
        run for run in ("train", "train_factored") if array_set.names(f"{run}/")
    ],
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "array_set" not in metafunc.fixturenames:
        return
    reference = metafunc.config.stash[_REFERENCE]
    sets = [reference.array_set(name) for name in ARRAY_SETS if reference.has(name)]
    # Tied logits differ from the others' in one product: `make test` has one set of each stack.
    marks = {name: [pytest.mark.processes] * name.endswith("_tied") for name in ARRAY_SETS}
    found = next((name for name in _FOUND_IN_NAMES if name in metafunc.fixturenames), None)
    if not found:
        alone = [pytest.param(each, id=each.name, marks=marks[each.name]) for each in sets]
        metafunc.parametrize("array_set", alone, scope="session")
        return
    cases = [
        pytest.param(each, value, id=f"{each.name}-{value}", marks=marks[each.name])
        for each in sets
        for value in _FOUND_IN_NAMES[found](each)
    ]
    metafunc.parametrize(("array_set", found), cases, scope="session")


@pytest.fixture(scope="session")
def assert_close() -> Callable[..., None]:
    """Fails if the largest error exceeds `tolerance` times the largest expected element."""

    def check(actual: Any, expected: Any, tolerance: float, name: str = "") -> None:
        actual, expected = np.asarray(actual), np.asarray(expected)
        assert actual.shape == expected.shape, name
        error = np.abs(actual.astype(np.float64) - expected).max() / np.abs(expected).max()
        assert error <= tolerance, f"{name}: relative error {error:.2e} above {tolerance:.0e}"

    return check
