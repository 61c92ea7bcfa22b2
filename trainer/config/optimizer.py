"""Optimizers and learning-rate schedules as plain data, and published recipes."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from tasks.annexes import Registry
from tasks.terminal.command_line import UserError, nearest
from tasks.terminal.flag_fields import (
    BELOW_ONE,
    ReadIf,
    Rejected,
    Rule,
    above,
    at_least,
    check,
    field,
    one_of,
    require,
)
from trainer.config.field_paths import check_pattern

# Defaults of the fields that all optimizers have, and of those that all but adafactor have.
_COMMON = {
    "weight_decay": 0.0,
    "weight_decay_rate_exponent": 1.0,
    "no_weight_decay": None,  # those that the model declares: trainer.model.parameters.Use
    "multiply_by_parameter_scale": True,
    "minimum_parameter_scale": 1e-3,
    "maximum_parameter_scale": math.inf,
}
OTHERS = {**_COMMON, "independent_weight_decay": False}
_ADAM = {**OTHERS, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-6, "scale_epsilon": False}
_OPTAX = {"multiply_by_parameter_scale": False}


@dataclass(frozen=True)
class Optimizer:
    """An optimizer's code and default field values.

    Attributes:
      code: "module:function", its `trainer.optim.optimizer.Direction`; imported lazily (no JAX).
      defaults: every field the optimizer reads -> its value when unset.
      learning_rate: None means it must be set.
      rate_exponent: "module:function", (path, number of axes without stacks) of a tensor -> the
        power of muP's rate for Adam that this optimizer needs; None means 1.
      averages_updates: `beta1` averages scaled updates rather than gradients.
    """

    code: str
    defaults: Mapping[str, Any]
    learning_rate: float | None = None
    schedule: str = "constant * linear_warmup * rsqrt_normalized_decay"
    rate_exponent: str | None = None
    averages_updates: bool = False


# Sources of the defaults: T5X for adafactor (`adafactor.py`; learning rate and schedule:
# `configs/runs/pretrain.gin`), optax 0.2.8 for adamw and lion, nanoT5's
# `copied_utils.AdamWScale` for adamw_rms.
_OURS = {
    "adafactor": Optimizer(
        "trainer.optim.adafactor:direction",
        {
            **_COMMON,
            "weight_decay_rate_exponent": 0.0,
            "no_weight_decay": (),
            "beta1": 0.0,
            "epsilon": 1e-30,
            "decay_rate": 0.8,
            "step_offset": 0,
            "clipping_threshold": 1.0,
            "min_dim_size_to_factor": 128,
        },
        learning_rate=1.0,
        schedule="constant * rsqrt_decay",
        averages_updates=True,
    ),
    "adamw": Optimizer(
        "trainer.optim.adam:direction", {**_ADAM, **_OPTAX, "epsilon": 1e-8, "weight_decay": 1e-4}
    ),
    "adamw_rms": Optimizer("trainer.optim.adam:direction", _ADAM),
    "lion": Optimizer(
        "trainer.optim.lion:direction",
        {**OTHERS, **_OPTAX, "beta1": 0.9, "beta2": 0.99, "weight_decay": 1e-3},
    ),
}
OPTIMIZERS: Registry[Optimizer] = Registry("optimizers", _OURS)
# Fields that some optimizers read; those of other modules have no field of their own but momentum.
_OF_OPTIMIZERS = {"momentum", *(name for each in _OURS.values() for name in each.defaults)}

# The default of a field that must be set.
REQUIRED = object()
_COOLDOWN = {"cooldown_start": None, "cooldown_steps": REQUIRED, "final_fraction": 0.0}

# Keys of `schedule.FACTORS` -> the fields that only the factor reads, with their defaults.
# Source: T5X, `utils.create_learning_rate_scheduler`.
SCHEDULE_FACTORS: Mapping[str, Mapping[str, Any]] = {
    "constant": {"learning_rate": REQUIRED},
    "linear_warmup": {"warmup_start": 0.0},
    "linear_decay": {"learning_rate": REQUIRED, "decay_factor": 0.5},
    "rsqrt_decay": {},
    "rsqrt_no_ramp_down": {},
    "rsqrt_normalized_decay": {},
    "decay_every": {"decay_factor": 0.5, "steps_per_decay": 20_000},
    "cosine_decay": {"steps_per_cycle": 100_000, "final_fraction": 0.0},
    "polynomial_decay": {"decay_steps": REQUIRED, "power": 1.0, "final_fraction": 0.0},
    "linear_cooldown": _COOLDOWN,
    "sqrt_cooldown": _COOLDOWN,
}


# Switch -> fields that matter only if it is neither 0 nor False.
_SWITCHES = {
    "weight_decay": ("weight_decay_rate_exponent", "no_weight_decay", "independent_weight_decay"),
    "multiply_by_parameter_scale": ("minimum_parameter_scale", "maximum_parameter_scale"),
}


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer and its schedule; an unset field has the optimizer's default.

    Source: Shazeer and Stern 2018 (arXiv:1804.04235); google-research/t5x, `adafactor.py` and
    `utils.create_learning_rate_scheduler`.
    Differences: T5X's `skip_nan_updates`, which keeps single elements of a tensor, and its rules by
    path for factoring and scaling are not supported.
    """

    name: str = field("adafactor", "the optimizer", choices=OPTIMIZERS, often="optimizer")
    learning_rate: float | None = field(
        None,
        "learning rate, the schedule's factor constant (T5X's base_learning_rate); relative to "
        "each tensor's root mean square with multiply_by_parameter_scale; None: 1.0 for adafactor, "
        "required for others",
        rule=Rule("a finite number above 0", lambda rate: 0 < rate < math.inf),
        often="learning rate",
    )
    schedule: str | None = field(
        None,
        "product of factors, such as 'constant * linear_warmup * rsqrt_decay'; factors are "
        f"{', '.join(SCHEDULE_FACTORS)}; None: for adafactor T5X's 'constant * rsqrt_decay', which "
        "is flat at learning_rate / sqrt(warmup_steps) and then falls; for others 'constant * "
        "linear_warmup * rsqrt_normalized_decay', which peaks at learning_rate",
        often="factors, such as 'constant * linear_warmup'",
    )
    warmup_steps: int = field(
        10_000, "warm-up updates; 1 or more", rule=at_least(1), often="warm-up updates"
    )
    warmup_start: float | None = field(
        None, "fraction of the rate at which linear_warmup starts, in [0, 1)", rule=BELOW_ONE
    )
    decay_factor: float | None = field(
        None,
        "linear_decay: fraction of the base rate lost per update after the warm-up; decay_every: "
        "factor applied every steps_per_decay",
    )
    steps_per_decay: int | None = field(
        None, "updates between drops of decay_every; 1 or more", rule=at_least(1)
    )
    steps_per_cycle: int | None = field(
        None, "updates in cosine_decay's half cosine; 1 or more", rule=at_least(1)
    )
    decay_steps: int | None = field(
        None, "updates of polynomial_decay after the warm-up; 1 or more", rule=at_least(1)
    )
    power: float | None = field(
        None, "polynomial_decay's exponent, above 0; 1: linear", rule=above(0)
    )
    cooldown_start: int | None = field(
        None,
        "update at which linear_cooldown or sqrt_cooldown starts; None: the end of the warm-up",
        rule=at_least(0),
    )
    cooldown_steps: int | None = field(
        None, "number of updates in linear_cooldown or sqrt_cooldown", rule=at_least(1)
    )
    final_fraction: float | None = field(
        None,
        "fraction of the rate at which cosine_decay, polynomial_decay and cooldowns end, in [0, 1)",
        rule=BELOW_ONE,
    )
    minimum_learning_rate: float = field(
        1e-8, "minimum of the schedule; 0 or more", rule=at_least(0)
    )
    clip_norm: float | None = field(
        None,
        "maximum global norm of the gradients, above 0; use it with loss.normalizer="
        "num_real_target_tokens, since a loss summed over tokens has large gradients; None: no "
        "clipping",
        rule=above(0),
    )
    clip_value: float | None = field(
        None,
        "maximum absolute value of gradient elements, above 0, as in optax.clip; None: no limit",
        rule=above(0),
    )
    weight_decay: float | None = field(
        None,
        "fraction of a tensor to subtract per update, times rate ** weight_decay_rate_exponent; 0 "
        "or more",
        rule=at_least(0),
        often="weight decay",
    )
    weight_decay_rate_exponent: float | None = field(
        None,
        "exponent of the learning rate in weight decay: 1 as in AdamW of optax and PyTorch; 0 as "
        "in T5X's weight_decay_rate",
        rule=at_least(0),
    )
    independent_weight_decay: bool | None = field(
        None,
        "multiply weight decay by the schedule without learning_rate and without muP's factor for "
        "the tensor, so that decay and rate can be tuned separately",
    )
    no_weight_decay: tuple[str, ...] | None = field(
        None,
        "regular expressions for paths, such as decoder/decoder_norm/scale, of tensors that do not "
        "decay; None: biases, norm scales, embedding and position tables, taps of Primer's "
        "convolutions and learned logits; for adafactor, as in T5X, no tensors",
    )
    multiply_by_parameter_scale: bool | None = field(
        None, "multiply each tensor's update by the tensor's root mean square"
    )
    minimum_parameter_scale: float | None = field(
        None,
        "lower bound on the root mean square in multiply_by_parameter_scale (T5X's epsilon2); 0 or "
        "more",
        rule=at_least(0),
    )
    maximum_parameter_scale: float | None = field(
        None,
        "upper bound on the root mean square in multiply_by_parameter_scale; above 0",
        rule=above(0),
    )
    beta1: float | None = field(
        None,
        "decay of Adam's first moment, in [0, 1); lion: first interpolation; adafactor: momentum "
        "of the update, 0 for none",
        rule=BELOW_ONE,
    )
    beta2: float | None = field(
        None,
        "decay of Adam's second moment, in [0, 1); lion: second interpolation",
        rule=BELOW_ONE,
    )
    epsilon: float | None = field(
        None,
        "added to Adam's denominator or, as adafactor's epsilon1, to squared gradients; 0 or more",
        rule=at_least(0),
    )
    scale_epsilon: bool | None = field(
        None,
        "in muP, multiply Adam's epsilon by each tensor's learning-rate factor",
        read_if=ReadIf(
            lambda config: config.model.part("parametrisation").name == "mup",
            "without --model.parametrisation=mup",
            whole=True,
        ),
    )
    momentum: float | None = field(None, "momentum, in [0, 1)", rule=BELOW_ONE)
    decay_rate: float | None = field(
        None,
        "adafactor: exponent of the decay of second moments, 1 - step ** -decay_rate; above 0",
        rule=above(0),
    )
    step_offset: int | None = field(
        None, "adafactor: number of updates that the decay of second moments skips"
    )
    clipping_threshold: float | None = field(
        None,
        "adafactor: maximum root mean square of a tensor's update, 1 or more; inf: no clipping",
        rule=at_least(1),
    )
    min_dim_size_to_factor: int | None = field(
        None,
        "adafactor: factor second moments of tensors whose two largest dimensions have at least "
        "this size; 1 or more",
        rule=at_least(1),
    )

    def __post_init__(self) -> None:
        check(self)
        for factor in self.factors:
            require(
                factor in SCHEDULE_FACTORS,
                "OptimizerConfig.schedule",
                self.schedule,
                f"factors joined by '*', but {factor!r} is not one; a factor is "
                f"{one_of(SCHEDULE_FACTORS)}",
            )
        for name in (name for factor in self.factors for name in SCHEDULE_FACTORS[factor]):
            if self.value(name) is REQUIRED:
                rule = (
                    f"set for {self.name!r} with schedule {' * '.join(self.factors)!r}: it has "
                    f"no default; recipes: {', '.join(OPTIMIZER_PRESETS)}"
                )
                raise Rejected(f"OptimizerConfig.{name}", None, rule)
        for pattern in self.no_weight_decay or ():
            check_pattern("OptimizerConfig.no_weight_decay", pattern)

    def unread(self) -> dict[str, str]:
        """Returns field -> reason, for fields that neither optimizer nor schedule reads."""
        found: dict[str, str] = {}
        if not set(self.factors) <= SCHEDULE_FACTORS.keys():
            return found  # refused elsewhere
        used = [SCHEDULE_FACTORS[name] for name in self.factors]
        for tables, read, reader in (
            ([_OF_OPTIMIZERS], [OPTIMIZERS[self.name].defaults], f"optimizer {self.name!r}"),
            (SCHEDULE_FACTORS.values(), used, f"schedule {' * '.join(self.factors)!r}"),
        ):
            reads = set().union(*read)
            why = f"with {reader}, which reads {', '.join(sorted(reads)) or 'no such field'}"
            found |= dict.fromkeys(set().union(*tables) - reads, why)
        for switch, switched in _SWITCHES.items():
            if not self.value(switch):
                why = f"while {switch} is {self.value(switch)!r}"
                found |= {name: why for name in switched if name not in found}
        return found

    @property
    def factors(self) -> tuple[str, ...]:
        schedule = self.schedule or OPTIMIZERS[self.name].schedule
        return tuple(name.strip() for name in schedule.split("*"))

    def value(self, name: str) -> Any:
        """Returns a field's value or, if unset, the default of its reader."""
        value = getattr(self, name)
        if value is not None:
            return value
        optimizer = OPTIMIZERS[self.name]
        if name == "learning_rate" and optimizer.learning_rate is not None:
            return optimizer.learning_rate
        factors = (SCHEDULE_FACTORS.get(factor, {}) for factor in self.factors)
        return next((each[name] for each in (optimizer.defaults, *factors) if name in each), None)


class Recipe(NamedTuple):
    """A published optimizer with its schedule, and field -> value where its loss differs."""

    optimizer: OptimizerConfig
    loss: Mapping[str, Any] = {}


# Source: nanoT5, `configs/default.yaml` and `utils/model_utils.py`: T5 1.1 base, 2^16 steps of 128
# rows, 1.953 nats on held-out C4 (1.995 with its Adafactor; README). `steps_per_cycle` is the
# number of updates minus the warm-up: set both for a run of a different length. It clips the
# gradient of the mean loss; with a summed loss, every update would be clipped.
# Differences: AdamWScale adds its epsilon before the bias correction, optax after it.
_NANOT5 = Recipe(
    OptimizerConfig(
        name="adamw_rms",
        learning_rate=0.02,
        schedule="constant * linear_warmup * cosine_decay",
        warmup_steps=10_000,
        warmup_start=0.5,
        steps_per_cycle=2**16 - 10_000,
        final_fraction=1e-5 / 0.02,
        clip_norm=1.0,
    ),
    {"normalizer": "num_real_target_tokens"},
)

# Source: lucaslingle/mu_transformer, `configs/base.py`, for 125,000 updates, and the schedule of
# `launch.py`; set `cooldown_steps` for a run of a different length. The rate is from the README,
# "CLI overrides": 1.0 in `base.py` only stands for the powers of 2 that its scripts try. The loss
# is divided by all positions.
# Differences: its first moments are bfloat16.
_MU_TRANSFORMER = Recipe(
    OptimizerConfig(
        name="adamw",
        learning_rate=0.03,
        schedule="constant * linear_warmup * linear_cooldown",
        warmup_steps=10_000,
        warmup_start=1e-4,
        cooldown_steps=125_000 - 10_000,
        final_fraction=1e-4,
        clip_norm=1.0,
        weight_decay=0.0,
        beta2=0.95,
    ),
    {"normalizer": "num_total_target_tokens", "z_loss": 0.0},
)

OPTIMIZER_PRESETS = Registry(
    "optimizer_presets",
    {
        # Source: T5X, `configs/runs/pretrain.gin`.
        "t5x": Recipe(OptimizerConfig()),
        # Source: T5X, `configs/runs/finetune.gin`; Raffel et al. 2020, section 3.1.2.
        "t5x_finetune": Recipe(OptimizerConfig(learning_rate=1e-3, schedule="constant")),
        "nanot5": _NANOT5,
        "mu_transformer": _MU_TRANSFORMER,
        # Source: dumitrescustefan/t5x_models, `ro_t5x_{base,large}_pretrain.gin`: T5X's values. Its
        # `ro_mt5x_{base,large}_pretrain.gin` continue mT5 at a learning_rate of 0.4 and 0.5.
        "romanian_t5x": Recipe(OptimizerConfig()),
    },
)

# The loss of PyTorch and transformers: a mean over tokens, without z-loss.
PYTORCH_LOSS = {"normalizer": "num_real_target_tokens", "z_loss": 0.0}


def recipe(name: str) -> dict[str, Any]:
    """Returns field path -> value of a preset: its optimizer and its loss."""
    if name not in OPTIMIZER_PRESETS:
        raise UserError(
            f"unknown optimizer preset {name}{nearest(name, OPTIMIZER_PRESETS)}; known: "
            f"{', '.join(OPTIMIZER_PRESETS)}"
        )
    found = OPTIMIZER_PRESETS[name]
    return {
        **{f"optimizer.{field}": value for field, value in asdict(found.optimizer).items()},
        **{f"loss.{field}": value for field, value in found.loss.items()},
    }
