"""What an optimizer is told, in plain data that needs no JAX, and published recipes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

# Fields of several optimizers, at the same values.
_SCALE = {"minimum_parameter_scale": 1e-3, "maximum_parameter_scale": math.inf}
_DECAY = {
    "weight_decay_rate_exponent": 1.0,
    "no_weight_decay": None,  # those that the model declares: trainer.model.parameters.Use
}

# The keys of `optimizer.OPTIMIZERS`: for each the fields it reads, at the values they have when
# left at None. Sources: adafactor T5X, `adafactor.py`; adamw and lion optax 0.2.8; adamw_rms
# nanoT5, `copied_utils.AdamWScale`; muon's momentum and its Adam's betas Liu et al. 2025
# (arXiv:2502.16982), the parameter scale measured (docs/LOG.md, 2026-11-21).
OPTIMIZER_FIELDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "adafactor": {
            "beta1": 0.0,
            "epsilon": 1e-30,
            "weight_decay": 0.0,
            "weight_decay_rate_exponent": 0.0,
            "no_weight_decay": (),
            "multiply_by_parameter_scale": True,
            **_SCALE,
            "decay_rate": 0.8,
            "step_offset": 0,
            "clipping_threshold": 1.0,
            "min_dim_size_to_factor": 128,
        },
        "adamw": {
            "beta1": 0.9,
            "beta2": 0.999,
            "epsilon": 1e-8,
            "weight_decay": 1e-4,
            **_DECAY,
            "multiply_by_parameter_scale": False,
            **_SCALE,
        },
        "adamw_rms": {
            "beta1": 0.9,
            "beta2": 0.999,
            "epsilon": 1e-6,
            "weight_decay": 0.0,
            **_DECAY,
            "multiply_by_parameter_scale": True,
            **_SCALE,
        },
        "lion": {
            "beta1": 0.9,
            "beta2": 0.99,
            "weight_decay": 1e-3,
            **_DECAY,
            "multiply_by_parameter_scale": False,
            **_SCALE,
        },
        "muon": {
            "momentum": 0.95,
            "beta1": 0.9,
            "beta2": 0.95,
            "epsilon": 1e-8,
            "weight_decay": 0.0,
            **_DECAY,
            "multiply_by_parameter_scale": True,
            **_SCALE,
        },
    }
)

# The keys of `schedule.FACTORS`: for each the fields that it alone reads, at the values they have
# when left at None; REQUIRED ones have none. Source: T5X, `utils.create_learning_rate_scheduler`.
REQUIRED = object()
SCHEDULE_FACTORS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "constant": {"learning_rate": REQUIRED},
        "linear_warmup": {"warmup_start": 0.0},
        "linear_decay": {"learning_rate": REQUIRED, "decay_factor": 0.5},
        "rsqrt_decay": {},
        "rsqrt_no_ramp_down": {},
        "rsqrt_normalized_decay": {},
        "decay_every": {"decay_factor": 0.5, "steps_per_decay": 20_000},
        "cosine_decay": {"steps_per_cycle": 100_000, "final_fraction": 0.0},
        "linear_cooldown": {
            "cooldown_start": None,
            "cooldown_steps": REQUIRED,
            "final_fraction": 0.0,
        },
        "sqrt_cooldown": {
            "cooldown_start": None,
            "cooldown_steps": REQUIRED,
            "final_fraction": 0.0,
        },
    }
)


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer and its schedule. A field left at None has the optimizer's own default.

    `name` is a key of OPTIMIZER_FIELDS, which lists what each optimizer reads; any other field
    set is refused. OPTIMIZER_PRESETS holds whole recipes.

    The schedule:
    `learning_rate` is what the factor "constant" stands for, T5X's `base_learning_rate`. Only
    adafactor has a default, 1.0; others must be given one. Where updates are multiplied by the
    parameter scale it is relative to each tensor's root mean square.
    `schedule` is a product of the factors in SCHEDULE_FACTORS, "constant * linear_warmup *
    rsqrt_decay". None is T5X's "constant * rsqrt_decay" for adafactor, which has no ramp: it is
    flat at `learning_rate / sqrt(warmup_steps)` for `warmup_steps`; for others it is "constant *
    linear_warmup * rsqrt_normalized_decay", which peaks at `learning_rate`.
    `warmup_start` is the share of the rate that "linear_warmup" begins with; `decay_factor`,
    `steps_per_decay` and `steps_per_cycle` (steps) are T5X's.
    `final_fraction` is the share of the rate that "cosine_decay" and the cooldowns end with;
    cooldowns last `cooldown_steps` from `cooldown_start`, None: from the end of the warm-up.
    The schedule never gives less than `minimum_learning_rate`.

    Every optimizer:
    `clip_norm` scales gradients down to this global norm before anything else; None: never. The
    loss summed over tokens (T5X's) has large gradients: use it with
    `LossConfig.normalizer="num_real_target_tokens"`.
    `weight_decay` takes from a tensor, each step, this times rate ** `weight_decay_rate_exponent`
    of itself: exponent 1 is optax's and PyTorch's AdamW, 0 T5X's `weight_decay_rate`. It spares
    tensors whose path ("decoder/decoder_norm/scale") one of the regular expressions
    `no_weight_decay` matches somewhere: by default biases, scales of norms, embedding tables, those
    of relative positions among them, taps of Primer's convolutions and learned logits; nothing for
    adafactor, as in T5X.
    `multiply_by_parameter_scale` multiplies the update of each tensor by its root mean square,
    kept between `minimum_parameter_scale` (T5X's `epsilon2`) and `maximum_parameter_scale`.

    `beta1`, `beta2`, `epsilon` are Adam's, for muon those of the tensors that are no matrices;
    for lion its two interpolations; adafactor's `beta1` is momentum of the update (0: none) and
    its `epsilon` T5X's `epsilon1`. `momentum` is muon's own. `decay_rate`, `step_offset`,
    `clipping_threshold` (inf: none) and `min_dim_size_to_factor` are adafactor's.

    Source: Shazeer and Stern 2018 (arXiv:1804.04235); google-research/t5x, `adafactor.py` and
    `utils.create_learning_rate_scheduler`, whose defaults adafactor's are, but for the learning
    rate and the schedule, which are those of its pretraining runs (`configs/runs/pretrain.gin`).
    Differences: T5X's `skip_nan_updates`, which keeps single elements of a tensor, and rules by
    path for factoring and scaling are not here.

    Raises:
        ValueError: at construction, naming the field or the factor, if a value makes no sense, is
            missing, or is read by nothing.
    """

    name: str = "adafactor"
    learning_rate: float | None = None
    schedule: str | None = None
    warmup_steps: int = 10_000
    warmup_start: float | None = None
    decay_factor: float | None = None
    steps_per_decay: int | None = None
    steps_per_cycle: int | None = None
    cooldown_start: int | None = None
    cooldown_steps: int | None = None
    final_fraction: float | None = None
    minimum_learning_rate: float = 1e-8
    clip_norm: float | None = None
    weight_decay: float | None = None
    weight_decay_rate_exponent: float | None = None
    no_weight_decay: tuple[str, ...] | None = None
    multiply_by_parameter_scale: bool | None = None
    minimum_parameter_scale: float | None = None
    maximum_parameter_scale: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    epsilon: float | None = None
    momentum: float | None = None
    decay_rate: float | None = None
    step_offset: int | None = None
    clipping_threshold: float | None = None
    min_dim_size_to_factor: int | None = None

    def __post_init__(self) -> None:
        _require(self.name in OPTIMIZER_FIELDS, "name", self.name, _one_of(OPTIMIZER_FIELDS))
        for factor in self.factors:
            if factor not in SCHEDULE_FACTORS:
                raise ValueError(
                    f"OptimizerConfig.schedule {self.schedule!r} has the unknown factor "
                    f"{factor!r}; known are {', '.join(sorted(SCHEDULE_FACTORS))}, joined by '*'"
                )
        self._refuse_unread()
        self._ask_for_missing()
        for field, rule, holds in _RULES:
            value = getattr(self, field)
            _require(value is None or holds(value), field, value, rule)
        for pattern in self.no_weight_decay or ():
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"OptimizerConfig.no_weight_decay has {pattern!r}, "
                    f"which is no regular expression: {error}"
                ) from error

    def _refuse_unread(self) -> None:
        read_by_factors = {field for name in self.factors for field in SCHEDULE_FACTORS[name]}
        for fields, reads, reader in (
            (_FIELDS_OF_OPTIMIZERS, set(OPTIMIZER_FIELDS[self.name]), f"optimizer {self.name!r}"),
            (_FIELDS_OF_FACTORS, read_by_factors, f"schedule {' * '.join(self.factors)!r}"),
        ):
            for field in fields:
                if getattr(self, field) is not None and field not in reads:
                    raise ValueError(
                        f"OptimizerConfig.{field} is {getattr(self, field)!r}, and {reader} does "
                        f"not read it; it reads {', '.join(sorted(reads)) or 'no such field'}"
                    )
        for switch, switched in _SWITCHES.items():
            for field in switched:
                if getattr(self, field) is not None and not self.value(switch):
                    raise ValueError(
                        f"OptimizerConfig.{field} is {getattr(self, field)!r}, which needs a "
                        f"{switch}: it is {self.value(switch)!r}"
                    )

    def _ask_for_missing(self) -> None:
        for factor in self.factors:
            for field in SCHEDULE_FACTORS[factor]:
                if self.value(field) is REQUIRED:
                    recipes = ", ".join(OPTIMIZER_PRESETS)
                    raise ValueError(
                        f"OptimizerConfig.{field} must be set for {self.name!r} with schedule "
                        f"{' * '.join(self.factors)!r}: it has no default; recipes: {recipes}"
                    )

    @property
    def factors(self) -> tuple[str, ...]:
        """The factors of the schedule, in order."""
        default = "constant * linear_warmup * rsqrt_normalized_decay"
        if self.name == "adafactor":
            default = "constant * rsqrt_decay"
        return factor_names(self.schedule or default)

    def value(self, field: str) -> Any:
        """Returns what `field` stands for: its value, or the default of what reads it."""
        value = getattr(self, field)
        if value is not None:
            return value
        if field == "learning_rate" and self.name == "adafactor":
            return 1.0
        if field in OPTIMIZER_FIELDS[self.name]:
            return OPTIMIZER_FIELDS[self.name][field]
        for factor in self.factors:
            if field in SCHEDULE_FACTORS[factor]:
                return SCHEDULE_FACTORS[factor][field]
        return None


def factor_names(schedule: str) -> tuple[str, ...]:
    """The factors of a schedule, in order."""
    return tuple(name.strip() for name in schedule.split("*"))


def _require(holds: bool, field: str, value: object, rule: str) -> None:
    if not holds:
        raise ValueError(f"OptimizerConfig.{field} is {value!r}; it must be {rule}")


def _one_of(names: Mapping[str, Any]) -> str:
    return "one of " + ", ".join(repr(name) for name in sorted(names))


_FIELDS_OF_OPTIMIZERS = sorted({field for read in OPTIMIZER_FIELDS.values() for field in read})
# What matters only where another field is neither 0 nor False.
_SWITCHES = {
    "weight_decay": ("weight_decay_rate_exponent", "no_weight_decay"),
    "multiply_by_parameter_scale": ("minimum_parameter_scale", "maximum_parameter_scale"),
}
_FIELDS_OF_FACTORS = sorted({field for read in SCHEDULE_FACTORS.values() for field in read})
_RULES = (
    *((name, "above 0", lambda value: value > 0) for name in ("learning_rate", "clip_norm")),
    *(
        (name, "1 or more", lambda value: value >= 1)
        for name in (
            "warmup_steps",
            "steps_per_decay",
            "steps_per_cycle",
            "cooldown_steps",
            "clipping_threshold",
            "min_dim_size_to_factor",
        )
    ),
    *(
        (name, "0 or more", lambda value: value >= 0)
        for name in (
            "cooldown_start",
            "minimum_learning_rate",
            "weight_decay",
            "weight_decay_rate_exponent",
            "minimum_parameter_scale",
            "epsilon",
        )
    ),
    *(
        (name, "in [0, 1)", lambda value: 0 <= value < 1)
        for name in ("beta1", "beta2", "momentum", "warmup_start", "final_fraction")
    ),
    ("decay_rate", "above 0", lambda value: value > 0),
    ("maximum_parameter_scale", "above 0", lambda value: value > 0),
)

# Source: nanoT5, `configs/default.yaml` and `utils/model_utils.py`: T5 1.1 base, 2^16 steps of 128
# rows, 1.953 nats on held-out C4 against 1.995 of its Adafactor (README). It means the loss over
# tokens (`LossConfig.normalizer="num_real_target_tokens"`). `steps_per_cycle` is the number of
# steps less the warm-up: set both for a run of another length.
# Differences: AdamWScale's epsilon is added before the bias correction, optax's after it.
_NANOT5 = OptimizerConfig(
    name="adamw_rms",
    learning_rate=0.02,
    schedule="constant * linear_warmup * cosine_decay",
    warmup_steps=10_000,
    warmup_start=0.5,
    steps_per_cycle=2**16 - 10_000,
    final_fraction=1e-5 / 0.02,
    clip_norm=1.0,
)

OPTIMIZER_PRESETS: Mapping[str, OptimizerConfig] = MappingProxyType(
    {
        # Source: T5X, `configs/runs/pretrain.gin`.
        "t5x": OptimizerConfig(),
        "nanot5": _NANOT5,
        # Source: google-research/primer README; 0.01 for 10,000 steps, then 1 / sqrt(step).
        "primer": OptimizerConfig(schedule="rsqrt_no_ramp_down"),
    }
)
