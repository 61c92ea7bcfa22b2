"""Switch Transformers: T5 with experts in some layers.

Only logits are alike: in training, the losses of routers are the run's own, and transformers'
jitter also changes what experts read.

Source: transformers 5.23, modeling_switch_transformers.py; Switch Transformers (arXiv:2101.03961).
"""

from typing import Any

from trainer.annexes.switch.parts import Experts
from trainer.huggingface import formats, module_names
from trainer.huggingface.config_json_fields import Fields
from trainer.huggingface.kinds import KINDS, Kind
from trainer.model.config import ModelConfig
from trainer.model.slot import Choice

_STACKS = {"encoder": "num_layers", "decoder": "num_decoder_layers"}
# transformers' defaults.
_SPARSE, _EXPERTS, _CAPACITY = 3, 8, 64


def _sparse(step: int, layers: int) -> set[int]:
    """Returns the numbers, from 1, of transformers' layers with experts."""
    return {
        number for number in range(1, layers + 1) if step > 0 and (number - 1) % step == 1 % step
    }


def _of_ours(every: int, layers: int) -> set[int]:
    return {*range(every, layers + 1, every)}


def _every(fields: Fields) -> int:
    """Returns our option `every`; raises ValueError if it cannot say which layers have experts."""
    found = {}
    for stack, name in _STACKS.items():
        layers = fields.get(name, fields.size("num_layers"))
        sparse = fields.get(f"num_sparse_{stack}_layers", _SPARSE)
        step = fields.get(f"{stack}_sparse_step", layers // sparse if sparse > 0 else layers)
        found[stack] = layers, _sparse(step, layers)
    for every in range(1, max(layers for layers, _ in found.values()) + 1):
        if all(_of_ours(every, layers) == numbers for layers, numbers in found.values()):
            return every
    of = {stack: ", ".join(map(str, sorted(numbers))) for stack, (_, numbers) in found.items()}
    raise ValueError(
        f"num_sparse_encoder_layers and num_sparse_decoder_layers give experts to layers "
        f"{of['encoder'] or 'none'} of the encoder and {of['decoder'] or 'none'} of the decoder; "
        "in our models every n-th layer of both has them"
    )


def _read(fields: Fields) -> ModelConfig:
    for name, expected in (
        ("router_bias", False),
        ("router_dtype", "float32"),
        # Without it, transformers 5 keeps a table for each stack beside the logits' kernel.
        ("tie_word_embeddings", True),
    ):
        fields.require(name, expected)
    experts = Experts(
        fields.get("num_experts", _EXPERTS),
        _every(fields),
        fields.get("expert_capacity", _CAPACITY),
    )
    return ModelConfig(
        family="t5_1_0",
        **fields.sizes(formats.T5),
        num_decoder_layers=fields.get("num_decoder_layers", fields.size("num_layers")),
        dropout_rate=fields.get("dropout_rate", 0.0),
        mlp_activations=(fields.named("dense_act_fn", formats.ACTIVATIONS, "relu"),),
        norm=formats.norm_of("rms_norm", fields.get("layer_norm_epsilon", 1e-6)),
        position=formats.relative_of(fields),
        feed_forward=str(Choice("switch", experts)),
    )


def _write(config: ModelConfig, positions: int) -> dict[str, Any]:
    activation, *others = config.value("mlp_activations")
    name, experts = config.part("feed_forward")
    if name != "switch" or experts.capacity is None or others or not config.value("tied_logits"):
        raise KeyError("feed_forward, mlp_activations, tied_logits")
    written = formats.to_t5(config, positions)
    for name in ("feed_forward_proj", "scale_decoder_outputs"):
        del written[name]
    for stack, name in _STACKS.items():
        layers = written[name]
        sparse = layers // experts.every
        written[f"num_sparse_{stack}_layers"] = sparse
        # transformers' own, written because it obeys it.
        written[f"{stack}_sparse_step"] = layers // sparse if sparse else layers
    return {
        **written,
        "architectures": ["SwitchTransformersForConditionalGeneration"],
        "dense_act_fn": formats.ACTIVATIONS[activation],
        "num_experts": experts.experts,
        "expert_capacity": experts.capacity,
        "router_bias": False,
        "router_dtype": "float32",
    }


def _tensors(config: ModelConfig) -> dict[str, str]:
    modules = {
        path: name.replace("DenseReluDense", "mlp")
        for path, name in module_names.t5(config).items()
    }
    experts = config.part("feed_forward").options
    for stack in _STACKS:
        for number in _of_ours(experts.every, getattr(config, f"num_{stack}_layers")):
            layer = f"{stack}/layers_{number - 1}/mlp"
            for kernel in ("wi", "wo"):
                dense = modules.pop(f"{layer}/{kernel}/kernel")
                mlp = dense.rpartition(".")[0]
                for expert in range(experts.experts):
                    path = f"{layer}/experts/{expert}/{kernel}/kernel"
                    modules[path] = f"{mlp}.experts.expert_{expert}.{kernel}"
            modules[f"{layer}/router/kernel"] = f"{mlp}.router.classifier"
    return modules


# Losses and noise of training, and fields that transformers does not read.
_INERT = frozenset(
    {
        *("router_z_loss_coef", "router_aux_loss_coef", "router_jitter_noise", "is_decoder"),
        *("add_router_probs", "output_router_logits", "router_ignore_padding_tokens"),
        *("router_type", "batch_prioritized_routing", "feed_forward_proj", "is_gated_act"),
    }
)
SWITCH_TRANSFORMERS = Kind(
    *(_read, _write, _tensors, formats.T5S),
    inert=_INERT,
    embeddings=formats.T5_EMBEDDINGS,
    unused=KINDS["t5"].unused,
    missing=KINDS["t5"].missing,
    compared=("SwitchTransformersForConditionalGeneration",),
)
