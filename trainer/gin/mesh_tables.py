"""Maps arguments of Mesh T5's and Primer's configurables to our configuration fields.

Source: tensorflow/mesh `transformer/`; google-research/text-to-text-transfer-transformer; Primer,
google-research/google-research `primer/`.
"""

from __future__ import annotations

from trainer.gin.meaning import Argument, Configurable, field, keep, nothing, only, partitions

ATTENTION, MLP = "SelfAttention", "DenseReluDense"


_LAYOUT = "--mesh sets the mesh; results do not depend on it"
_STATE = "checkpoints hold the training state, in float32"
_EVALUATED = "the validation split is evaluated during training and by trainer.evaluate"
_PRESET = "the model's preset sets it"
_FOLDED = "kernels are initialized as T5's"
_EAGER = "batches are made as they are needed"


def _unread(why: str, *names: str) -> dict[str, Argument]:
    return {name: nothing(why) for name in names}


def _known(module: str, name: str, arguments: dict[str, Argument] | None = None) -> Configurable:
    return Configurable((f"{module}.{name}",), arguments or {})


_TRANSFORMER = "mesh_tensorflow.transformer.transformer"
_LAYERS = "mesh_tensorflow.transformer.transformer_layers"
_UTILS = "mesh_tensorflow.transformer.utils"
_RATES = "mesh_tensorflow.transformer.learning_rate_schedules"
_PREPROCESSORS = "t5.data.preprocessors"
_T5 = "t5.models.mesh_transformer"
_HEADS = {
    "num_heads": field("model.num_heads"),
    "key_value_size": field("model.head_dim"),
    "dropout_rate": field("model.dropout_rate"),
    "relative_attention_type": only("bias_shared", "all layers of a stack share one table"),
    "relative_attention_num_buckets": only(32, "the table has 32 buckets"),
    "num_memory_heads": only(0, "there are no memory heads"),
    "shared_kv": only(False, "keys and values have kernels of their own"),
    "attention_kwargs": only(None, "attention has no other settings"),
    **_unread(_FOLDED, "fold_scaling_into_initializer", "combine_dims", "keep_query_heads_dims"),
}
_DATA = {
    "mixture_or_task_name": keep("task", str),
    "mixture_name": keep("task", str),
    "use_cached": keep("use_cached", bool),
    "pack": keep("pack", bool),
    "seed": nothing("the run's seed determines the order", None),
}
NORMS = {
    "sublayer_true_layer_norm": "layer",
    "sublayer_rms_norm": "rms",
    "sublayer_prime_norm": "prime",
}
_NO_EPSILON = {
    "dropout_rate": nothing("sublayers have their own dropout"),
    "norm_epsilon": only(1e-6, "epsilon is 1e-6", None),
    "sublayers_initial": nothing("embeddings always have dropout"),
    "sublayers_per_layer": keep("norm", list),
    "sublayers_final": keep("last_norm", list),
    "recompute_grads": nothing("set --model.remat instead", False),
}

KNOWN = (
    _known(
        _UTILS,
        "run",
        {
            "train_steps": field("train_steps"),
            "model_dir": field("model_dir"),
            "batch_size": keep("batch_size", object),
            "sequence_length": keep("lengths", object),
            "save_checkpoints_steps": field("checkpoint.every_steps"),
            "keep_checkpoint_max": field("checkpoint.keep"),
            "init_checkpoint": field("init_from"),
            "model_type": keep("model_type", str),
            "learning_rate_schedule": keep("schedule", object),
            "optimizer": keep("optimizer", object),
            "mode": only("train", "evaluate with python -m trainer.evaluate"),
            "dataset_split": only("train", "training reads the train split"),
            "vocabulary": nothing("the vocabulary is the cache's"),
            "ensemble_inputs": only(None, "a single model is trained"),
            "variable_filter": only(None, "all parameters are trained"),
            **_unread(_EVALUATED, "eval_summary_dir", "predict_fn", "export_path"),
            "train_dataset_fn": nothing("trainer.data.cached reads the data"),
            "eval_dataset_fn": nothing(_EVALUATED),
            "eval_checkpoint_step": nothing(_EVALUATED),
            "perplexity_eval_steps": nothing(_EVALUATED),
            **_unread(_LAYOUT, "mesh_shape", "mesh_devices", "layout_rules", "autostack"),
            **_unread(_EAGER, "iterations_per_loop", "skip_seen_data"),
        },
    ),
    _known(
        _UTILS,
        "tpu_mesh_shape",
        {
            "model_parallelism": field("mesh.tensor", convert=partitions),
            "ensemble_parallelism": only(None, "a single model is trained"),
            "tpu_topology": nothing(_LAYOUT),
        },
    ),
    _known(
        _UTILS,
        "serialize_num_microbatches",
        {"tokens_per_microbatch_per_replica": field("tokens_per_microbatch_per_replica")},
    ),
    _known(
        _UTILS,
        "get_variable_dtype",
        {
            "activation_dtype": field("model.dtype"),
            **_unread(_STATE, "slice_dtype", "master_dtype"),
        },
    ),
    _known(
        _TRANSFORMER,
        "Unitransformer",
        {
            "d_model": field("model.emb_dim"),
            "shared_embedding_and_softmax_weights": field("model.tied_logits"),
            "label_smoothing": field("loss.label_smoothing"),
            "z_loss": field("loss.z_loss"),
            "positional_embedding": only(False, "positions are T5's relative ones"),
            "layer_stack": keep("ineffective", object),
            "vocab_divisor": only(128, "embeddings are a multiple of 128"),
            "token_dropout_rate": only(0.0, "no tokens are dropped"),
            "ensemble": only(None, "a single model is trained"),
            "input_full_attention": keep("full_attention", bool),
            "loss_denominator": only(None, "the loss is divided by all positions of a batch"),
            "loss_fn": only(None, "the loss is the cross entropy"),
            "loss_on_targets_only": keep("loss_on_targets_only", bool),
            "name": nothing("parameters have T5X's names"),
            "max_length": nothing("relative positions have no limit"),
        },
    ),
    _known(
        _TRANSFORMER,
        "Bitransformer",
        {"shared_embedding": only(True, "encoder and decoder have one table")},
    ),
    _known(
        _TRANSFORMER,
        "make_bitransformer",
        {
            "encoder_name": only("encoder", "encoder and decoder have parameters of their own"),
            "decoder_name": only("decoder", "encoder and decoder have parameters of their own"),
        },
    ),
    _known(
        _UTILS,
        "tpu_estimator_model_fn",
        {
            "init_checkpoint": field("init_from"),
            "outer_batch_size": only(1, "batches have one axis of rows"),
            "tpu_summaries": nothing("metrics are always written", False),
        },
    ),
    _known(
        _TRANSFORMER,
        "make_layer_stack",
        {
            "layers": keep("layers", list),
            "num_layers": keep("num_layers", int),
            "layer_stack_cls": keep("layer_stack_cls", object),
            "block_scope": nothing("parameters have T5X's names"),
        },
    ),
    _known(_TRANSFORMER, "LayerStack", _NO_EPSILON),
    _known("t5_models", "PrePostNormLayerStack", _NO_EPSILON),
    *(
        _known(
            "t5_models" if name == "sublayer_prime_norm" else _TRANSFORMER,
            name,
            {"epsilon": only(1e-6, "epsilon is 1e-6")},
        )
        for name in NORMS
    ),
    _known(_TRANSFORMER, "sublayer_dropout", {"dropout_rate": field("model.dropout_rate")}),
    *(
        _known(_TRANSFORMER, f"sublayer_{name}")
        for name in ("call_layer", "residual", "mask_padding")
    ),
    _known(_LAYERS, ATTENTION, _HEADS),
    _known(
        _LAYERS, "LocalSelfAttention", {"dropout_rate": nothing("no layer uses local attention")}
    ),
    _known("t5_models", "MDHA", {**_HEADS, "share_qk_rep": keep("share_qk", bool)}),
    _known(
        "t5_models",
        "DoubleHeadsAttentionLayer",
        {
            "base_num_heads": nothing(_PRESET),
            "key_value_size": nothing(_PRESET),
            "dropout_rate": field("model.dropout_rate"),
        },
    ),
    _known(
        "mesh_tensorflow.transformer.evolved_transformer",
        "DecoderConvolutionalLayer",
        {"d_model": nothing(_PRESET), "dropout_rate": field("model.dropout_rate")},
    ),
    _known(
        _LAYERS,
        "Synthesizer",
        {
            **_HEADS,
            "synthesize_mode": only("random_plus", "the preset synthesizer has this mode"),
        },
    ),
    _known(
        _LAYERS,
        "EncDecAttention",
        {"relative_attention_type": only(None, "cross attention has no bias")},
    ),
    _known(
        _LAYERS,
        MLP,
        {
            "hidden_size": field("model.mlp_dim"),
            "activation": keep("activations", object),
            "dropout_rate": field("model.dropout_rate"),
            "use_bias": keep("use_bias", bool),
        },
    ),
    _known(
        "mesh_tensorflow.transformer.moe",
        "MoE1D",
        {
            "num_experts": keep("num_experts", int),
            "activation": keep("expert_activations", object),
            "hidden_size": field("model.mlp_dim"),
            "dropout_rate": field("model.dropout_rate"),
            "moe_gating": only("switch", "each token is routed to one expert"),
            **_unread(
                _PRESET,
                *("switch_policy_train", "switch_policy_eval", "switch_jitter"),
                *("capacity_factor_train", "capacity_factor_eval"),
            ),
        },
    ),
    _known("mesh_tensorflow.layers", "VarianceScalingInitializer", _unread(_PRESET, "scale")),
    _known(
        "mesh_tensorflow.optimize",
        "AdafactorOptimizer",
        {
            "beta1": field("optimizer.beta1"),
            "clipping_threshold": field("optimizer.clipping_threshold"),
            "epsilon1": field("optimizer.epsilon"),
            "epsilon2": field("optimizer.minimum_parameter_scale"),
            "min_dim_size_to_factor": field("optimizer.min_dim_size_to_factor"),
            "multiply_by_parameter_scale": field("optimizer.multiply_by_parameter_scale"),
            "factored": only(True, "raise min_dim_size_to_factor instead"),
            "decay_rate": only(None, "the decay is 1 - step^-0.8"),
        },
    ),
    _known(
        _RATES,
        "learning_rate_schedule_noam",
        {
            "warmup_steps": field("optimizer.warmup_steps"),
            "multiplier": field("optimizer.learning_rate"),
            "linear_decay_fraction": keep("linear_decay_fraction", float),
            "offset": only(0, "the schedule counts the run's own steps"),
        },
    ),
    _known(_RATES, "constant_learning_rate", {"learning_rate": keep("constant_rate", float)}),
    _known(_T5, "mesh_train_dataset_fn", _DATA),
    _known(_T5, "mesh_eval_dataset_fn", _unread(_EVALUATED, "mixture_or_task_name")),
    *(
        _known(
            _T5,
            name,
            _unread("the vocabulary is the cache's", "mixture_or_task_name", "mixture_name"),
        )
        for name in ("get_vocabulary", "get_sentencepiece_model_path")
    ),
    *(
        _known("t5.data.utils", name, _unread("the mixture sets its rates", *arguments))
        for name, arguments in (
            ("rate_num_examples", ("maximum", "scale", "temperature")),
            ("rate_unsupervised", ("value",)),
        )
    ),
    _known("t5.data.utils", "sentinel_id", {"return_value": only(None, "it is the last id")}),
    _known(_PREPROCESSORS, "unsupervised", {"preprocessors": keep("preprocessors", list)}),
    _known(
        _PREPROCESSORS,
        "select_random_chunk",
        _unread("a cache has whole documents", "max_length", "feature_key"),
    ),
    _known(
        _PREPROCESSORS,
        "reduce_concat_tokens",
        _unread("a cache joins all documents", "batch_size", "feature_key"),
    ),
    _known(_PREPROCESSORS, "take", {"num_examples": keep("take", int | None)}),
    _known(
        _PREPROCESSORS,
        "regular_noise_mask",
        {name: keep(name, int) for name in ("min_span_length", "max_span_length")},
    ),
    *(
        _known(_PREPROCESSORS, name, {"random_prob": only(0.1, "one noise token in ten is random")})
        for name in (
            "noise_token_to_random_token_or_sentinel",
            "noise_token_to_random_token_or_sentinel_or_itself",
        )
    ),
    _known(
        _PREPROCESSORS,
        "noise_token_to_random_token",
        _unread("random tokens are pieces of text", "num_reserved_tokens"),
    ),
    _known(
        _PREPROCESSORS,
        "denoise",
        {
            "noise_density": keep("noise_density", float),
            "noise_mask_fn": keep("noise_mask", object),
            "inputs_fn": keep("inputs_fn", object),
            "targets_fn": keep("targets_fn", object),
        },
    ),
    _known(
        _PREPROCESSORS,
        "random_spans_noise_mask",
        {"mean_noise_span_length": keep("mean_noise_span_length", float)},
    ),
    *(
        _known(_PREPROCESSORS, name)
        for name in (
            *("split_tokens_to_inputs_length", "iid_noise_mask", "permute_noise_tokens"),
            *("split_tokens_to_random_length", "noise_span_to_sentinel"),
            *("nonnoise_span_to_sentinel",),
            *("split_tokens_to_targets_length", "random_prefix_noise_mask"),
            *("noise_span_to_unique_sentinel", "nonnoise_span_to_unique_sentinel"),
            *("random_spans_targets_length", "random_spans_tokens_length"),
            *("drop_noise_tokens", "drop_nonnoise_tokens", "noise_token_to_sentinel"),
        )
    ),
    _known(
        _PREPROCESSORS,
        "random_spans_helper",
        _unread(
            "windows are planned in advance",
            *("inputs_length", "noise_density", "mean_noise_span_length"),
            *("extra_tokens_per_span_inputs", "extra_tokens_per_span_targets"),
        ),
    ),
    _known(
        _PREPROCESSORS,
        "split_tokens",
        _unread(
            "windows are planned in advance",
            *("max_tokens_per_segment", "min_tokens_per_segment", "feature_key"),
        ),
    ),
    _known(
        "t5.data.sentencepiece_vocabulary",
        "SentencePieceVocabulary",
        _unread(
            "the cache's vocabulary has its sentinels", "extra_ids", "sentencepiece_model_file"
        ),
    ),
)
MACROS = (
    *("MIXTURE_NAME", "d_ff", "d_kv", "d_model", "dropout_rate", "eval_checkpoint_step"),
    *("inputs_length", "mean_noise_span_length", "noise_density", "num_heads", "num_layers"),
    *("num_sentinels", "targets_length", "split", "tokens_per_batch", "model_parallelism"),
)
