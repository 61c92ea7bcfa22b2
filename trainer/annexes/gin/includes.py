"""Built-in descriptions of T5X's gin files, used if T5X is not installed.

Source: google-research/t5x, `configs/runs/{pretrain,finetune}.gin` and `examples/**/*.gin`.
"""

from collections.abc import Mapping
from typing import Any

from trainer.annexes.gin.reader import REQUIRED, Binding, Macro, Reference
from trainer.config.presets import MODEL_PRESETS

_REQUIRED = Macro(REQUIRED)
_T5_VOCABULARY = "gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model"
_MT5_VOCABULARY = "gs://t5-data/vocabs/mc4.250000.100extra/sentencepiece.model"

_1_0 = ("small", "base", "large", "3B", "11B")
_1_1 = ("small", "base", "large", "xl", "xxl")


def binding(key: str, value: Any, path: str) -> Binding:
    """Returns a binding; `key` is "scope/configurable.argument" or a macro's name."""
    scope, _, rest = key.rpartition("/")
    selector, _, argument = rest.rpartition(".")
    place = f"{path} (built in)"
    return Binding(scope, selector or argument, argument if selector else "", value, place, True)


def _call(name: str, scope: str = "") -> Reference:
    return Reference(scope, name, True)


def _data(scope: str, **settings: Any) -> dict[str, Any]:
    common = {
        "mixture_or_task_name": Macro("MIXTURE_OR_TASK_NAME"),
        "task_feature_lengths": Macro("TASK_FEATURE_LENGTHS"),
        "batch_size": Macro("BATCH_SIZE"),
        "use_cached": Macro("USE_CACHED_TASKS"),
        "module": Macro("MIXTURE_OR_TASK_MODULE"),
        "pack": True,
    }
    return {
        f"{scope}/utils.DatasetConfig.{name}": value
        for name, value in {**common, **settings}.items()
    }


def _run(macros: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    required = ("MIXTURE_OR_TASK_NAME", "TASK_FEATURE_LENGTHS", "TRAIN_STEPS", "MODEL_DIR")
    return {
        **dict.fromkeys(required, _REQUIRED),
        "BATCH_SIZE": 128,
        "USE_CACHED_TASKS": True,
        "MIXTURE_OR_TASK_MODULE": None,
        "USE_HARDWARE_RNG": False,
        "RANDOM_SEED": None,
        "TRAIN_STEPS_RELATIVE": None,
        "train.model": Macro("MODEL"),
        "train.model_dir": Macro("MODEL_DIR"),
        "train.train_dataset_cfg": _call("utils.DatasetConfig", "train"),
        "train.train_eval_dataset_cfg": _call("utils.DatasetConfig", "train_eval"),
        "train.infer_eval_dataset_cfg": None,
        "train.checkpoint_cfg": _call("utils.CheckpointConfig"),
        "train.partitioner": _call("partitioning.PjitPartitioner"),
        "train.trainer_cls": Reference("", "trainer.Trainer", False),
        "train.total_steps": Macro("TRAIN_STEPS"),
        "train.eval_steps": 20,
        "train.eval_period": 1000,
        "train.relative_steps": Macro("TRAIN_STEPS_RELATIVE"),
        "train.random_seed": Macro("RANDOM_SEED"),
        "train.use_hardware_rng": Macro("USE_HARDWARE_RNG"),
        "partitioning.PjitPartitioner.num_partitions": 1,
        "partitioning.PjitPartitioner.logical_axis_rules": _call(
            "partitioning.standard_logical_axis_rules"
        ),
        **_data("train", split="train", shuffle=True, seed=None),
        **_data("train_eval", split="validation", shuffle=False, seed=42),
        "utils.CheckpointConfig.save": _call("utils.SaveCheckpointConfig"),
        "utils.CheckpointConfig.restore": _call("utils.RestoreCheckpointConfig"),
        "utils.SaveCheckpointConfig.keep": None,
        "trainer.Trainer.num_microbatches": None,
        "trainer.Trainer.learning_rate_fn": _call("utils.create_learning_rate_scheduler"),
        **macros,
        **settings,
    }


_RATE = "utils.create_learning_rate_scheduler"
_RUNS = {
    "t5x/configs/runs/pretrain.gin": _run(
        {"SHUFFLE_TRAIN_EXAMPLES": True},
        {
            "train/utils.DatasetConfig.shuffle": Macro("SHUFFLE_TRAIN_EXAMPLES"),
            "utils.RestoreCheckpointConfig.path": [],
            "utils.SaveCheckpointConfig.period": 1000,
            f"{_RATE}.factors": "constant * rsqrt_decay",
            f"{_RATE}.base_learning_rate": 1.0,
            f"{_RATE}.warmup_steps": 10_000,
        },
    ),
    "t5x/configs/runs/finetune.gin": _run(
        {
            "INITIAL_CHECKPOINT_PATH": _REQUIRED,
            "DROPOUT_RATE": 0.1,
            "EVAL_STEPS": 20,
            "EVAL_PERIOD": 1000,
        },
        {
            "train.eval_steps": Macro("EVAL_STEPS"),
            "train.eval_period": Macro("EVAL_PERIOD"),
            "train.infer_eval_dataset_cfg": _call("utils.DatasetConfig", "infer_eval"),
            **_data("infer_eval", split="validation", shuffle=False, seed=42, pack=False),
            "utils.RestoreCheckpointConfig.path": Macro("INITIAL_CHECKPOINT_PATH"),
            "utils.RestoreCheckpointConfig.mode": "specific",
            "utils.RestoreCheckpointConfig.dtype": "float32",
            "utils.SaveCheckpointConfig.period": 5000,
            f"{_RATE}.factors": "constant",
            f"{_RATE}.base_learning_rate": 0.001,
            f"{_RATE}.warmup_steps": 1000,
        },
    ),
}


def _model(
    preset: str,
    vocabulary: str | None = _T5_VOCABULARY,
    *,
    decoder_only: bool = False,
    scalable: bool = False,
) -> dict[str, Any]:
    """Returns the bindings of a model with a preset's sizes and T5X's optimizer and loss.

    `vocabulary` is a SentencePiece model, or None for bytes.
    """
    sizes = MODEL_PRESETS[preset]
    gated = sizes.family != "t5_1_0"
    same = ("vocab_size", "emb_dim", "num_heads", "head_dim", "mlp_dim")
    network = {
        "dtype": "bfloat16",
        "mlp_activations": ("gelu", "linear") if gated else ("relu",),
        "dropout_rate": Macro("DROPOUT_RATE"),
        "logits_via_embedding": decoder_only or not gated,
        **{name: getattr(sizes, name) for name in same},
    }
    if decoder_only:
        model, module, config = "DecoderOnlyModel", "DecoderWrapper", "TransformerConfig"
        network |= {"num_layers": sizes.num_decoder_layers}
        vocabularies = {"vocabulary": Macro("VOCABULARY")}
    else:
        model, module, config = "EncoderDecoderModel", "Transformer", "T5Config"
        network |= {
            "num_encoder_layers": sizes.num_encoder_layers,
            "num_decoder_layers": sizes.num_decoder_layers,
        }
        names = ("input_vocabulary", "output_vocabulary")
        vocabularies = dict.fromkeys(names, Macro("VOCABULARY"))
    if scalable:
        network |= {"scan_layers": True, "remat_policy": "minimal"}
    network_module = "t5x.examples.scalable_t5.network" if scalable else "network"
    arguments = {
        "module": _call(f"{network_module}.{module}"),
        "optimizer_def": Macro("OPTIMIZER"),
        "z_loss": Macro("Z_LOSS"),
        "label_smoothing": Macro("LABEL_SMOOTHING"),
        "loss_normalizing_factor": Macro("LOSS_NORMALIZING_FACTOR"),
        **vocabularies,
    }
    return {
        "Z_LOSS": 1e-4,
        "LABEL_SMOOTHING": 0.0,
        "LOSS_NORMALIZING_FACTOR": None,
        "DROPOUT_RATE": _REQUIRED,
        "VOCABULARY": _call(f"seqio.{'SentencePiece' if vocabulary else 'Byte'}Vocabulary"),
        **(
            {"seqio.SentencePieceVocabulary.sentencepiece_model_file": vocabulary}
            if vocabulary
            else {}
        ),
        "OPTIMIZER": _call("adafactor.Adafactor"),
        "adafactor.Adafactor.decay_rate": 0.8,
        "adafactor.Adafactor.step_offset": 0,
        "adafactor.Adafactor.logical_factor_rules": _call(
            "adafactor.standard_logical_factor_rules"
        ),
        "MODEL": _call(f"models.{model}"),
        **{f"models.{model}.{name}": value for name, value in arguments.items()},
        f"{network_module}.{module}.config": _call(f"{network_module}.{config}"),
        **{f"{network_module}.{config}.{name}": value for name, value in network.items()},
    }


def _models() -> dict[str, dict[str, Any]]:
    found = {
        f"t5x/examples/t5/t5_1_0/{each}.gin": _model(f"t5_1_0_{each.lower()}") for each in _1_0
    }
    for size in _1_1:
        t5, mt5 = f"t5_1_1_{size}", f"mt5_{size}"
        found |= {
            f"t5x/examples/t5/t5_1_1/{size}.gin": _model(t5),
            f"t5x/examples/t5/mt5/{size}.gin": _model(mt5, _MT5_VOCABULARY),
            f"t5x/examples/t5/byt5/{size}.gin": _model(f"byt5_{size}", None),
            f"t5x/examples/scalable_t5/t5_1_1/{size}.gin": _model(t5, scalable=True),
            f"t5x/examples/scalable_t5/mt5/{size}.gin": _model(mt5, _MT5_VOCABULARY, scalable=True),
        }
        if size != "small":
            path = f"t5x/examples/decoder_only/models/{size}.gin"
            found[path] = _model(t5, decoder_only=True)
    # In T5X, all four are the tiny T5 1.1 model.
    for family in ("t5_1_0", "t5_1_1", "mt5", "byt5"):
        found[f"t5x/examples/t5/{family}/tiny.gin"] = _model("t5_1_1_tiny")
    return found


def _c4(size: str, **settings: Any) -> dict[str, Any]:
    """Returns the bindings of T5X's example that pretrains on C4."""
    return {
        **_model(f"t5_1_1_{size}"),
        **_RUNS["t5x/configs/runs/pretrain.gin"],
        "MIXTURE_OR_TASK_NAME": "c4_v220_span_corruption",
        "TASK_FEATURE_LENGTHS": {"inputs": 512, "targets": 114},
        "DROPOUT_RATE": 0.0,
        "BATCH_SIZE": 256,
        **settings,
    }


_EXAMPLES = {
    f"t5x/examples/t5/t5_1_1/examples/{size}_c4_pretrain.gin": _c4(size, **settings)
    for size, settings in (
        ("base", {"TRAIN_STEPS": 100_000, "train.eval_period": 2000}),
        ("small", {"TRAIN_STEPS": 10_000}),
    )
}


def described(files: Mapping[str, Mapping[str, Any]]) -> Mapping[str, list[Binding]]:
    """Returns a file's path -> its bindings."""
    return {
        path: [binding(key, value, path) for key, value in settings.items()]
        for path, settings in files.items()
    }


DESCRIPTIONS = described({**_RUNS, **_models(), **_EXAMPLES})
# Macros that a file may set even if no other file reads them.
MACROS = {
    *("EVALUATOR_NUM_EXAMPLES", "EVALUATOR_USE_MEMORY_CACHE", "JSON_WRITE_N_RESULTS"),
    *(each.name for bound in DESCRIPTIONS.values() for each in bound if not each.argument),
}
