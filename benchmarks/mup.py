"""Checks the coordinates of muP: sizes of states that do not change with width.

    python -m benchmarks.mup [--model=decoder|t5] [--optimizer=adamw] [--readout=inverse]

Trains models of two layers on bytes of the built-in corpus, in muP and in the standard
parametrisation as a control, and prints the slope of log2 mean |x| over log2 width for scores,
branches, residual stream and logits, after no, one and three updates. Exit code 1 if a gate does
not hold. The transfer of learning rates is `python -m experiments.sweep mup`.

Source: the check of Yang et al. 2022 (arXiv:2203.03466), appendix D.1; sizes and rates are ours.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.machine import machine
from tasks.reading import stdlib_docs
from tasks.terminal.command_line import Parser
from tasks.terminal.table import table
from trainer.config.optimizer import OptimizerConfig
from trainer.model.config import ModelConfig
from trainer.model.parts import READOUTS
from trainer.model.positions import RotaryPosition, rotate
from trainer.model.spec import model_spec
from trainer.model.transformer import build_model, init_params
from trainer.optim.optimizer import optimizer_of

Batch = Mapping[str, jax.Array]

_BASE, _HEAD_DIM, _LAYERS = 64, 32, 2
_VOCAB_SIZE = 128 * 3
_FIRST_BYTE = 3
_LENGTH, _ROWS = 64, 16
_STANDARD = "standard"
# Optimizers with the settings of the check.
_OPTIMIZERS: Mapping[str, dict[str, Any]] = {
    "adamw": {"beta2": 0.95, "weight_decay": 0.0, "clip_norm": 1.0},
    "lion": {"beta1": 0.95, "beta2": 0.98, "weight_decay": 0.0},
    "adafactor": {"schedule": "constant", "clip_norm": 1.0},
    "muon": {"clip_norm": 1.0, "multiply_by_parameter_scale": False},
}
_COORDINATE_WIDTHS = (64, 128, 256, 512)
_COORDINATE_RATE = 2.0**-6
_SEEDS = 3
_COORDINATE_STEPS = (0, 1, 3)
# Largest slope in muP, and smallest in the standard parametrisation. Source: measured on these
# sizes with Adam, see docs/mup.md; 0 and 1 are what theory says of infinite widths.
_FLAT, _STEEP = 0.20, 0.7


def model_of(kind: str, width: int, parametrisation: str) -> ModelConfig:
    """Returns a model of two layers: mu_transformer's decoder, or T5 1.1 ("t5")."""
    decoder = kind == "decoder"
    return ModelConfig(
        family="llama" if decoder else "t5_1_1",
        vocab_size=_VOCAB_SIZE,
        emb_dim=width,
        num_heads=width // _HEAD_DIM,
        head_dim=_HEAD_DIM,
        mlp_dim=4 * width if decoder else 3 * width,
        num_encoder_layers=0 if decoder else _LAYERS,
        num_decoder_layers=_LAYERS,
        norm="rms_norm:epsilon=1e-5,gain=none" if decoder else None,
        mlp_activations=("relu",) if decoder else None,
        parametrisation=parametrisation,
        # The control keeps the attention scale that goes with the usual width of heads.
        attention_scale=_HEAD_DIM**-0.5 if parametrisation == _STANDARD else None,
    )


def batches(kind: str, steps: int) -> Batch:
    """Returns rows of bytes, int32 [steps, rows, length] by feature.

    T5 reads the first half of a row of twice the length, and predicts the second.
    """
    text = "\n".join(stdlib_docs.documents().values()).encode()
    # Without the first tenth, as when the slopes in docs/mup.md were measured.
    data = np.frombuffer(text, np.uint8)[len(text) // 10 :].astype(np.int32) + _FIRST_BYTE
    total = _LENGTH * (1 if kind == "decoder" else 2)
    random = np.random.default_rng(1)
    start = random.integers(0, len(data) - total, (steps, _ROWS, 1))
    tokens = jnp.asarray(data[start + np.arange(total)])
    targets = tokens[..., -_LENGTH:]
    shifted = jnp.pad(targets, ((0, 0), (0, 0), (1, 0)))[..., :-1]
    found = {"decoder_target_tokens": targets, "decoder_input_tokens": shifted}
    if kind != "decoder":
        found["encoder_input_tokens"] = tokens[..., :_LENGTH]
    return found


class Training:
    """A model and its optimizer; the learning rate is an argument, so that it compiles once."""

    def __init__(self, config: ModelConfig, optimizer: str):
        self.spec = model_spec(config)
        self.model = build_model(self.spec)
        settings = {"schedule": "constant", **_OPTIMIZERS[optimizer]}
        self.optimizer = optimizer_of(
            OptimizerConfig(name=optimizer, learning_rate=1.0, **settings), self.spec
        )

    def initial(self, seed: int = 0) -> Any:
        """Returns initial parameters."""
        return init_params(self.spec, jax.random.key(seed))

    def loss(self, params: Any, batch: Batch) -> jax.Array:
        """Returns the mean cross-entropy, in nats per byte."""
        logits = self.model.apply({"params": params}, batch)
        targets = batch["decoder_target_tokens"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    @partial(jax.jit, static_argnums=0)
    def run(self, params: Any, rates: jax.Array, of_steps: Batch) -> Any:
        """Returns the parameters after one update for each rate."""

        def step(state: tuple[Any, Any], inputs: tuple[jax.Array, Batch]) -> tuple[Any, None]:
            params, moments = state
            rate, batch = inputs
            gradients = jax.grad(self.loss)(params, batch)
            updates, moments = self.optimizer.update(gradients, moments, params)
            updates = jax.tree.map(lambda update: rate * update, updates)
            return (optax.apply_updates(params, updates), moments), None

        state = (params, self.optimizer.init(params))
        return jax.lax.scan(step, state, (rates, of_steps))[0][0]

    @partial(jax.jit, static_argnums=0)
    def sizes(self, params: Any, batch: Batch) -> dict[str, jax.Array]:
        """Returns the mean absolute value of states by name, averaged over layers."""
        logits, variables = self.model.apply({"params": params}, batch, capture_intermediates=True)
        found: dict[str, list[jax.Array]] = {"logits": [jnp.mean(jnp.abs(logits))]}
        scale = self.spec.shared.parametrisation.attention_scale(_HEAD_DIM)
        for layer in _layers(variables["intermediates"]):
            found.setdefault("residual stream", []).append(_size(layer))
            found.setdefault("MLP branch", []).append(_size(layer["mlp"]))
            for name, part in layer.items():
                if not name.endswith("attention"):
                    continue
                found.setdefault("attention branch", []).append(_size(part))
                query, key = (
                    each.reshape(*each.shape[:2], -1, _HEAD_DIM)
                    for each in (part["query"]["__call__"][0], part["key"]["__call__"][0])
                )
                if isinstance(self.spec.decoder.position, RotaryPosition):
                    angle = jnp.arange(_LENGTH)[None, :, None] * jnp.asarray(
                        self.spec.decoder.position.frequency_C, jnp.float32
                    )
                    query, key = rotate(query, angle), rotate(key, angle)
                scores = jnp.abs(jnp.einsum("blhk,bshk->bhls", query, key)) * scale
                if name == "self_attention":
                    scores = scores[..., np.tril(np.ones((_LENGTH, _LENGTH), bool))]
                found.setdefault("scores", []).append(jnp.mean(scores))
        return {name: jnp.mean(jnp.stack(values)) for name, values in found.items()}


def _layers(intermediates: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for stack in ("encoder", "decoder"):
        for name, layer in intermediates.get(stack, {}).items():
            if name.startswith("layers_"):
                yield layer


def _size(captured: Mapping[str, Any]) -> jax.Array:
    return jnp.mean(jnp.abs(captured["__call__"][0]))


def coordinate_slopes(
    kind: str, parametrisation: str, optimizer: str
) -> dict[str, dict[int, float]]:
    """Returns slopes of log2 size over log2 width: name of states -> updates -> slope."""
    of_steps = batches(kind, max(_COORDINATE_STEPS) + 1)
    logarithms: dict[str, dict[int, list[float]]] = {}
    seen = {name: array[0] for name, array in of_steps.items()}
    for width in _COORDINATE_WIDTHS:
        training = Training(model_of(kind, width, parametrisation), optimizer)
        for steps in _COORDINATE_STEPS:
            first = {name: array[:steps] for name, array in of_steps.items()}
            rates = jnp.full(steps, _COORDINATE_RATE)
            of_seeds = []
            for seed in range(_SEEDS):
                params = training.initial(seed)
                if steps:
                    params = training.run(params, rates, first)
                of_seeds.append(training.sizes(params, seen))
            for name in of_seeds[0]:
                mean = float(np.mean([sizes[name] for sizes in of_seeds]))
                logarithms.setdefault(name, {}).setdefault(steps, []).append(math.log2(mean))
    widths = np.log2(_COORDINATE_WIDTHS)
    return {
        name: {steps: float(np.polyfit(widths, values, 1)[0]) for steps, values in found.items()}
        for name, found in logarithms.items()
    }


def check_coordinates(kind: str, optimizer: str, mup: str) -> list[str]:
    """Prints slopes; returns the gates that do not hold."""
    rows, slopes = [], {}
    for parametrisation in (mup, _STANDARD):
        slopes[parametrisation] = coordinate_slopes(kind, parametrisation, optimizer)
        for name, found in slopes[parametrisation].items():
            shown = [f"{found[steps]:+.3f}" for steps in _COORDINATE_STEPS]
            rows.append((parametrisation, name, *shown))
    header = ("parametrisation", "states", *(f"after {steps}" for steps in _COORDINATE_STEPS))
    print(table(header, rows, markdown=True))
    last = _COORDINATE_STEPS[-1]
    hidden = {name: each[last] for name, each in slopes[mup].items() if name != "logits"}
    worst = max(hidden, key=lambda name: abs(hidden[name]))
    control = slopes[_STANDARD]["residual stream"][last]
    print(f"muP: at most {abs(hidden[worst]):.3f} ({worst}); standard: {control:.3f}")
    failures = []
    if abs(hidden[worst]) > _FLAT:
        failures.append(f"slope of {worst} in muP: {hidden[worst]:.3f}, above {_FLAT}")
    if control < _STEEP:
        failures.append(f"slope of the residual stream of the control: {control:.3f}")
    return failures


def main() -> None:
    """Runs the command."""
    parser = Parser(prog="python -m benchmarks.mup", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("decoder", "t5"), default="decoder")
    parser.add_argument("--optimizer", choices=tuple(_OPTIMIZERS), default="adamw")
    parser.add_argument("--readout", choices=READOUTS[:3], default=READOUTS[0])
    arguments = parser.parse_args()
    mup = f"mup:base_width={_BASE},readout={arguments.readout}"
    failures = check_coordinates(arguments.model, arguments.optimizer, mup)
    print(machine())
    for failure in failures:
        print(f"does not hold: {failure}", file=sys.stderr)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
