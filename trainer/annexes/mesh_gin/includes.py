"""Built-in descriptions of the gin files of the T5 library before T5X.

Source: google-research/text-to-text-transfer-transformer, `t5/models/gin/**.gin`; tensorflow/mesh,
`transformer/gin/defaults.gin`.
"""

from typing import Any

from trainer.annexes.gin.includes import described
from trainer.annexes.gin.reader import Macro, Reference
from trainer.config.presets import MODEL_PRESETS


def _refer(name: str) -> Reference:
    return Reference("", name, False)


def _sizes(preset: str, partitions: int) -> dict[str, Any]:
    sizes = MODEL_PRESETS[preset]
    return {
        "d_model": sizes.emb_dim,
        "num_layers": sizes.num_decoder_layers,
        "d_ff": sizes.mlp_dim,
        "num_heads": sizes.num_heads,
        "d_kv": sizes.head_dim,
        "utils.tpu_mesh_shape.model_parallelism": partitions,
    }


def _denoised(density: Any, mask: str, inputs: str, targets: str | None) -> dict[str, Any]:
    functions = {"noise_mask_fn": mask, "inputs_fn": inputs, "targets_fn": targets}
    return {
        "preprocessors.denoise.noise_density": density,
        **{
            f"preprocessors.denoise.{name}": value and _refer(f"preprocessors.{value}")
            for name, value in functions.items()
        },
    }


def _preprocessors(*names: str) -> dict[str, Any]:
    steps = [_refer(f"preprocessors.{name}") for name in names]
    return {"preprocessors.unsupervised.preprocessors": steps}


_ATTENTION, _MLP = "transformer_layers.SelfAttention", "transformer_layers.DenseReluDense"
_STACK = "transformer.make_layer_stack"
_RATE = "utils.run.learning_rate_schedule"
_DEFAULTS = {
    f"{_STACK}.layers": [_refer(_ATTENTION), _refer(_MLP)],
    "num_layers": 6,
    "d_model": 1024,
    "d_ff": 4096,
    "num_heads": 8,
    "d_kv": 128,
    "dropout_rate": 0.1,
    f"{_STACK}.num_layers": Macro("num_layers"),
    "Unitransformer.d_model": Macro("d_model"),
    "Unitransformer.shared_embedding_and_softmax_weights": True,
    "DenseReluDense.hidden_size": Macro("d_ff"),
    "DenseReluDense.dropout_rate": Macro("dropout_rate"),
    "SelfAttention.num_heads": Macro("num_heads"),
    "SelfAttention.key_value_size": Macro("d_kv"),
    "SelfAttention.dropout_rate": Macro("dropout_rate"),
    "Unitransformer.label_smoothing": 0.0,
    "utils.run.sequence_length": {"inputs": 512, "targets": 512},
    "utils.run.optimizer": _refer("optimize.AdafactorOptimizer"),
    _RATE: _refer("learning_rate_schedules.learning_rate_schedule_noam"),
    "utils.tpu_mesh_shape.model_parallelism": 1,
    "utils.get_variable_dtype.activation_dtype": "bfloat16",
}
_T5_1_0 = {"utils.run.model_type": "bitransformer", "Unitransformer.positional_embedding": False}
_T5_1_1 = {
    **_T5_1_0,
    "DenseReluDense.activation": ["gelu", "linear"],
    "dropout_rate": 0.0,
    "Unitransformer.shared_embedding_and_softmax_weights": False,
}
# (size in the file name, number of model-parallel devices).
_1_0_SIZES = (("small", 1), ("base", 1), ("large", 2), ("3B", 8), ("11B", 32))
_1_1_SIZES = (("small", 1), ("base", 1), ("large", 2), ("xl", 8), ("xxl", 8))

_CHUNKS = ("select_random_chunk", "reduce_concat_tokens")
_DENOISE = {
    **_preprocessors(*_CHUNKS, "split_tokens_to_inputs_length", "denoise"),
    **_denoised(0.15, "iid_noise_mask", "noise_token_to_sentinel", None),
}
_SPAN = {
    **_preprocessors(*_CHUNKS, "split_tokens", "denoise"),
    "inputs_length": 512,
    "noise_density": 0.15,
    "mean_noise_span_length": 3.0,
    "targets_length": Reference("", "preprocessors.random_spans_targets_length", True),
    **_denoised(
        Macro("noise_density"),
        "random_spans_noise_mask",
        "noise_span_to_unique_sentinel",
        "nonnoise_span_to_unique_sentinel",
    ),
    "preprocessors.random_spans_noise_mask.mean_noise_span_length": Macro("mean_noise_span_length"),
    "utils.run.sequence_length": {
        "inputs": Macro("inputs_length"),
        "targets": Macro("targets_length"),
    },
}
_FILES = {
    **{
        f"models/{name}.gin": {**_T5_1_0, **_sizes(f"t5_1_0_{size.lower()}", partitions)}
        for size, partitions in _1_0_SIZES
        for name in (f"t5.1.0.{size}", "bi_v1" if size == "base" else f"bi_v1_{size}")
    },
    **{
        f"models/t5.1.1.{size}.gin": {**_T5_1_1, **_sizes(f"t5_1_1_{size}", partitions)}
        for size, partitions in _1_1_SIZES
    },
    "models/lm_v1.gin": {**_T5_1_0, **_sizes("t5_1_0_base", 1), "utils.run.model_type": "lm"},
    "dataset.gin": {
        "mesh_train_dataset_fn.use_cached": False,
        "mesh_train_dataset_fn.mixture_or_task_name": Macro("MIXTURE_NAME"),
    },
    "sequence_lengths/default.gin": {"utils.run.sequence_length": {"inputs": 512, "targets": 512}},
    "learning_rate_schedules/rsqrt_no_ramp_down.gin": {
        _RATE: _refer("learning_rate_schedules.learning_rate_schedule_noam"),
        "learning_rate_schedule_noam.linear_decay_fraction": 0.0,
    },
    "learning_rate_schedules/constant_0_001.gin": {
        _RATE: _refer("learning_rate_schedules.constant_learning_rate"),
        "constant_learning_rate.learning_rate": 0.001,
    },
    "objectives/lm.gin": _preprocessors(*_CHUNKS, "split_tokens_to_targets_length"),
    "objectives/denoise.gin": _DENOISE,
    "objectives/span.gin": _SPAN,
    "objectives/span_3_15_u_u.gin": _SPAN,
    **{
        f"objectives/span_{length}_15_u_u.gin": {**_SPAN, "mean_noise_span_length": float(length)}
        for length in (2, 5, 10)
    },
    "objectives/prefix_lm.gin": {
        **_preprocessors(_CHUNKS[0], "split_tokens_to_inputs_length", "denoise"),
        **_denoised(0.5, "random_prefix_noise_mask", "drop_nonnoise_tokens", "drop_noise_tokens"),
    },
}

DESCRIPTIONS = described(_FILES)
# Bindings that Mesh TensorFlow reads before all other files.
_NAME = "Mesh TensorFlow's defaults.gin"
DEFAULTS = described({_NAME: _DEFAULTS})[_NAME]
