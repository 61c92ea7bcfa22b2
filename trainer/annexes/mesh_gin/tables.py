"""Maps arguments of Mesh T5's and Primer's configurables to our configuration fields.

Source: tensorflow/mesh `transformer/`; google-research/text-to-text-transfer-transformer; Primer,
google-research/google-research `primer/`.
"""

from typing import Any

from trainer.annexes.gin.reader import Value
from trainer.annexes.gin.translate import (
    Argument,
    Reading,
    configurable,
    field,
    keep,
    nothing,
    only,
    partitions,
    take,
)

ATTENTION, MLP = "SelfAttention", "DenseReluDense"

_EVALUATED = "the validation split is evaluated during training and by trainer.evaluate"
_LAYOUT = "--mesh sets the mesh; results do not depend on it"
_NAMES = "parameters have T5X's names"
_PLANNED = "windows are planned in advance"
_PRESET = "the model's preset sets it"
_SINGLE = "a single model is trained"


def _unread(why: str, names: str) -> dict[str, Argument]:
    return {name: nothing(why) for name in names.split()}


def _kept(kind: Any, names: str) -> dict[str, Argument]:
    return {name: keep(name, kind) for name in names.split()}


def _take(reading: Reading, found: Value) -> None:
    if found.value is not None:
        reading.warn(
            f"take.num_examples = {found.value!r} ({found.origin}) does not apply here: set "
            f"--data.take='{found.value} documents' to read as many from the start of the corpus"
        )


_MESH = "mesh_tensorflow.transformer"
_MODEL, _LAYERS = f"{_MESH}.transformer", f"{_MESH}.transformer_layers"
_STEPS = "t5.data.preprocessors"
_T5 = "t5.models.mesh_transformer"
_DROPOUT = {"dropout_rate": field("model.dropout_rate")}
_HEADS = {
    **_DROPOUT,
    "num_heads": field("model.num_heads"),
    "key_value_size": field("model.head_dim"),
    "relative_attention_type": only("bias_shared", "all layers of a stack share one table"),
    "relative_attention_num_buckets": only(32, "the table has 32 buckets"),
    "num_memory_heads": only(0, "there are no memory heads"),
    "shared_kv": only(False, "keys and values have kernels of their own"),
    "attention_kwargs": only(None, "attention has no other settings"),
    **_unread(
        "kernels are initialized as in T5",
        "fold_scaling_into_initializer combine_dims keep_query_heads_dims",
    ),
}
NORMS = {
    "sublayer_true_layer_norm": "layer",
    "sublayer_rms_norm": "rms",
    "sublayer_prime_norm": "prime",
}
_STACK = {
    "dropout_rate": nothing("sublayers have their own dropout"),
    "norm_epsilon": only(1e-6, "epsilon is 1e-6", None),
    "sublayers_initial": nothing("embeddings always have dropout"),
    "sublayers_per_layer": keep("norm", list),
    "sublayers_final": keep("last_norm", list),
    "recompute_grads": nothing("set --model.remat instead", False),
}
# Configurables whose arguments have no counterpart -> the reason, and their arguments.
_IDLE = {
    f"{_LAYERS}.LocalSelfAttention": ("no layer has local attention", "dropout_rate"),
    f"{_T5}.mesh_eval_dataset_fn": (_EVALUATED, "mixture_or_task_name"),
    **dict.fromkeys(
        (f"{_T5}.get_vocabulary", f"{_T5}.get_sentencepiece_model_path"),
        ("the vocabulary is the cache's", "mixture_or_task_name mixture_name"),
    ),
    "mesh_tensorflow.layers.VarianceScalingInitializer": (_PRESET, "scale"),
    "t5.data.utils.rate_num_examples": ("the mixture sets its rates", "maximum scale temperature"),
    "t5.data.utils.rate_unsupervised": ("the mixture sets its rates", "value"),
    "t5.data.sentencepiece_vocabulary.SentencePieceVocabulary": (
        "the cache's vocabulary has its sentinels",
        "extra_ids sentencepiece_model_file",
    ),
    f"{_STEPS}.select_random_chunk": ("a cache has whole documents", "max_length feature_key"),
    f"{_STEPS}.reduce_concat_tokens": ("a cache joins all documents", "batch_size feature_key"),
    f"{_STEPS}.noise_token_to_random_token": (
        "random tokens are pieces of text",
        "num_reserved_tokens",
    ),
    f"{_STEPS}.random_spans_helper": (
        _PLANNED,
        "inputs_length noise_density mean_noise_span_length extra_tokens_per_span_inputs "
        "extra_tokens_per_span_targets",
    ),
    f"{_STEPS}.split_tokens": (
        _PLANNED,
        "max_tokens_per_segment min_tokens_per_segment feature_key",
    ),
}
_WITHOUT_ARGUMENTS = (
    *(f"{_MODEL}.sublayer_{name}" for name in ("call_layer", "residual", "mask_padding")),
    *(
        f"{_STEPS}.{name}"
        for name in (
            *("split_tokens_to_inputs_length", "iid_noise_mask", "permute_noise_tokens"),
            *("split_tokens_to_random_length", "noise_span_to_sentinel"),
            *("split_tokens_to_targets_length", "random_prefix_noise_mask"),
            *("noise_span_to_unique_sentinel", "nonnoise_span_to_unique_sentinel"),
            *("random_spans_targets_length", "random_spans_tokens_length"),
            *("drop_noise_tokens", "drop_nonnoise_tokens", "noise_token_to_sentinel"),
            "nonnoise_span_to_sentinel",
        )
    ),
)

KNOWN = (
    configurable(
        f"{_MESH}.utils.run",
        train_steps=field("train_steps"),
        model_dir=field("model_dir"),
        **_kept(object, "batch_size optimizer"),
        sequence_length=keep("lengths", object),
        save_checkpoints_steps=field("checkpoint.every_steps"),
        keep_checkpoint_max=field("checkpoint.keep"),
        init_checkpoint=field("init_from"),
        **_kept(str, "model_type"),
        learning_rate_schedule=keep("schedule", object),
        mode=only("train", "evaluate with python -m trainer.evaluate"),
        dataset_split=only("train", "training reads the train split"),
        vocabulary=nothing("the vocabulary is the cache's"),
        ensemble_inputs=only(None, _SINGLE),
        variable_filter=only(None, "all parameters are trained"),
        train_dataset_fn=nothing("trainer.data.cached reads the data"),
        **_unread(
            _EVALUATED,
            "eval_summary_dir predict_fn export_path eval_dataset_fn eval_checkpoint_step "
            "perplexity_eval_steps",
        ),
        **_unread(_LAYOUT, "mesh_shape mesh_devices layout_rules autostack"),
        **_unread("batches are made as they are needed", "iterations_per_loop skip_seen_data"),
    ),
    configurable(
        f"{_MESH}.utils.tpu_mesh_shape",
        model_parallelism=field("mesh.tensor", convert=partitions),
        ensemble_parallelism=only(None, _SINGLE),
        tpu_topology=nothing(_LAYOUT),
    ),
    configurable(
        f"{_MESH}.utils.serialize_num_microbatches",
        tokens_per_microbatch_per_replica=field("tokens_per_microbatch_per_replica"),
    ),
    configurable(
        f"{_MESH}.utils.get_variable_dtype",
        activation_dtype=field("model.dtype"),
        **_unread("checkpoints hold the training state, in float32", "slice_dtype master_dtype"),
    ),
    configurable(
        f"{_MODEL}.Unitransformer",
        d_model=field("model.emb_dim"),
        shared_embedding_and_softmax_weights=field("model.tied_logits"),
        label_smoothing=field("loss.label_smoothing"),
        z_loss=field("loss.z_loss"),
        positional_embedding=only(False, "positions are T5's relative ones"),
        layer_stack=keep("ineffective", object),
        vocab_divisor=only(128, "embedding tables have a multiple of 128 rows"),
        token_dropout_rate=only(0.0, "no tokens are dropped"),
        ensemble=only(None, _SINGLE),
        input_full_attention=keep("full_attention", bool),
        loss_denominator=only(None, "the loss is divided by all positions of a batch"),
        loss_fn=only(None, "the loss is the cross entropy"),
        **_kept(bool, "loss_on_targets_only"),
        name=nothing(_NAMES),
        max_length=nothing("relative positions have no limit"),
    ),
    configurable(
        f"{_MODEL}.Bitransformer", shared_embedding=only(True, "encoder and decoder share a table")
    ),
    configurable(
        f"{_MODEL}.make_bitransformer",
        encoder_name=only("encoder", "encoder and decoder have parameters of their own"),
        decoder_name=only("decoder", "encoder and decoder have parameters of their own"),
    ),
    configurable(
        f"{_MESH}.utils.tpu_estimator_model_fn",
        init_checkpoint=field("init_from"),
        outer_batch_size=only(1, "batches have one axis of rows"),
        tpu_summaries=nothing("metrics are always written", False),
    ),
    configurable(
        f"{_MODEL}.make_layer_stack",
        **_kept(list, "layers"),
        **_kept(int, "num_layers"),
        **_kept(object, "layer_stack_cls"),
        block_scope=nothing(_NAMES),
    ),
    configurable(f"{_MODEL}.LayerStack", **_STACK),
    configurable("t5_models.PrePostNormLayerStack", **_STACK),
    *(
        configurable(
            f"{'t5_models' if name == 'sublayer_prime_norm' else _MODEL}.{name}",
            epsilon=only(1e-6, "epsilon is 1e-6"),
        )
        for name in NORMS
    ),
    configurable(f"{_MODEL}.sublayer_dropout", **_DROPOUT),
    configurable(f"{_LAYERS}.{ATTENTION}", **_HEADS),
    configurable("t5_models.MDHA", **_HEADS, share_qk_rep=keep("share_qk", bool)),
    configurable(
        "t5_models.DoubleHeadsAttentionLayer",
        **_unread(_PRESET, "base_num_heads key_value_size"),
        **_DROPOUT,
    ),
    configurable(
        "mesh_tensorflow.transformer.evolved_transformer.DecoderConvolutionalLayer",
        **_unread(_PRESET, "d_model"),
        **_DROPOUT,
    ),
    configurable(
        f"{_LAYERS}.Synthesizer",
        **_HEADS,
        synthesize_mode=only("random_plus", "the preset synthesizer has this mode"),
    ),
    configurable(
        f"{_LAYERS}.EncDecAttention",
        relative_attention_type=only(None, "cross attention has no bias"),
    ),
    configurable(
        f"{_LAYERS}.{MLP}",
        hidden_size=field("model.mlp_dim"),
        activation=keep("activations", object),
        **_DROPOUT,
        **_kept(bool, "use_bias"),
    ),
    configurable(
        "mesh_tensorflow.transformer.moe.MoE1D",
        **_kept(int, "num_experts"),
        activation=keep("expert_activations", object),
        hidden_size=field("model.mlp_dim"),
        **_DROPOUT,
        moe_gating=only("switch", "each token is routed to one expert"),
        **_unread(
            _PRESET,
            "switch_policy_train switch_policy_eval switch_jitter capacity_factor_train "
            "capacity_factor_eval",
        ),
    ),
    configurable(
        "mesh_tensorflow.optimize.AdafactorOptimizer",
        beta1=field("optimizer.beta1"),
        clipping_threshold=field("optimizer.clipping_threshold"),
        epsilon1=field("optimizer.epsilon"),
        epsilon2=field("optimizer.minimum_parameter_scale"),
        min_dim_size_to_factor=field("optimizer.min_dim_size_to_factor"),
        multiply_by_parameter_scale=field("optimizer.multiply_by_parameter_scale"),
        factored=only(True, "raise min_dim_size_to_factor instead"),
        decay_rate=only(None, "the decay is 1 - step^-0.8"),
    ),
    configurable(
        f"{_MESH}.learning_rate_schedules.learning_rate_schedule_noam",
        warmup_steps=field("optimizer.warmup_steps"),
        multiplier=field("optimizer.learning_rate"),
        **_kept(float, "linear_decay_fraction"),
        offset=only(0, "the schedule counts the run's own steps"),
    ),
    configurable(
        f"{_MESH}.learning_rate_schedules.constant_learning_rate",
        learning_rate=keep("constant_rate", float),
    ),
    configurable(
        f"{_T5}.mesh_train_dataset_fn",
        mixture_or_task_name=keep("task", str),
        mixture_name=keep("task", str),
        **_kept(bool, "use_cached pack"),
        seed=nothing("the run's seed determines the order", None),
    ),
    configurable("t5.data.utils.sentinel_id", return_value=only(None, "it is the last id")),
    configurable(f"{_STEPS}.unsupervised", **_kept(list, "preprocessors")),
    configurable(f"{_STEPS}.take", num_examples=take(_take)),
    configurable(f"{_STEPS}.regular_noise_mask", **_kept(int, "min_span_length max_span_length")),
    *(
        configurable(
            f"{_STEPS}.noise_token_to_random_token_or_sentinel{ending}",
            random_prob=only(0.1, "one noise token in ten is random"),
        )
        for ending in ("", "_or_itself")
    ),
    configurable(
        f"{_STEPS}.denoise",
        **_kept(float, "noise_density"),
        **_kept(object, "noise_mask_fn inputs_fn targets_fn"),
    ),
    configurable(f"{_STEPS}.random_spans_noise_mask", **_kept(float, "mean_noise_span_length")),
    *(configurable(name, **_unread(*unread)) for name, unread in _IDLE.items()),
    *map(configurable, _WITHOUT_ARGUMENTS),
)
MACROS = (
    *("MIXTURE_NAME", "d_ff", "d_kv", "d_model", "dropout_rate", "eval_checkpoint_step"),
    *("inputs_length", "mean_noise_span_length", "noise_density", "num_heads", "num_layers"),
    *("num_sentinels", "targets_length", "split", "tokens_per_batch", "model_parallelism"),
)
