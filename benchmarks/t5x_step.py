"""Times T5X's training step; benchmarks.step runs this program.

The argument is the model's sizes as JSON. Prints "seconds WALL CORE", by the clock and of the
processor: first for compiling, then, for each number read from stdin, for that many steps.
"""

import json
import sys
import time

import flax
import jax
import numpy as np
import seqio
from t5x import adafactor, models, partitioning, trainer, utils


def main() -> None:
    sizes = json.loads(sys.argv[1])
    module, model_class = _network(sizes)
    # The settings of the examples' gin files; sizes, dtype and dropout are given by the caller.
    vocabulary = seqio.PassThroughVocabulary(sizes["network"]["vocab_size"])
    vocabularies = (
        {"vocabulary": vocabulary}
        if sizes["decoder_only"]
        else {"input_vocabulary": vocabulary, "output_vocabulary": vocabulary}
    )
    model = model_class(
        module=module,
        **vocabularies,
        optimizer_def=adafactor.Adafactor(
            decay_rate=0.8,
            step_offset=0,
            logical_factor_rules=adafactor.standard_logical_factor_rules(),
        ),
        z_loss=1e-4,
        label_smoothing=0.0,
        loss_normalizing_factor=None,
    )
    batch = _batch(sizes)
    partitioner = partitioning.PjitPartitioner(
        num_partitions=1, logical_axis_rules=partitioning.standard_logical_axis_rules()
    )
    initializer = utils.TrainStateInitializer(
        optimizer_def=model.optimizer_def,
        init_fn=model.get_initial_variables,
        input_shapes={name: array.shape for name, array in batch.items()},
        input_types={name: array.dtype for name, array in batch.items()},
        partitioner=partitioner,
    )
    state = initializer.from_scratch(jax.random.PRNGKey(0))
    run = trainer.Trainer(
        model=model,
        train_state=state,
        partitioner=partitioner,
        eval_names=[],
        summary_dir=None,
        train_state_axes=initializer.train_state_axes,
        rng=jax.random.PRNGKey(0),
        learning_rate_fn=utils.create_learning_rate_scheduler(
            factors="constant * rsqrt_decay", base_learning_rate=1.0, warmup_steps=10_000
        ),
        num_microbatches=sizes["microbatches"] if sizes["microbatches"] > 1 else None,
    )
    batch = jax.device_put(batch)
    started, core = time.perf_counter(), time.process_time()
    step = partitioner.compile(run._partitioned_train_step, state, batch)
    print("seconds", time.perf_counter() - started, time.process_time() - core, flush=True)
    state, _ = step(state, batch)
    for line in sys.stdin:
        jax.block_until_ready(state)
        started, core = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        print("seconds", time.perf_counter() - started, time.process_time() - core, flush=True)


def _network(sizes: dict) -> tuple[flax.linen.Module, type]:
    fields = {**sizes["network"], "mlp_activations": tuple(sizes["network"]["mlp_activations"])}
    if not sizes["decoder_only"]:
        from t5x.examples.t5 import network

        return network.Transformer(config=network.T5Config(**fields)), models.EncoderDecoderModel
    from t5x.examples.decoder_only import network

    del fields["num_encoder_layers"]
    fields["num_layers"] = fields.pop("num_decoder_layers")
    config = network.TransformerConfig(**fields)
    return network.DecoderWrapper(config=config), models.DecoderOnlyModel


def _batch(sizes: dict) -> dict[str, np.ndarray]:
    rows, random = sizes["batch_size"], np.random.default_rng(0)

    def tokens(length: int) -> np.ndarray:
        return random.integers(1, sizes["network"]["vocab_size"], (rows, length), np.int32)

    batch = {} if sizes["decoder_only"] else {"encoder_input_tokens": tokens(sizes["inputs"])}
    targets = tokens(sizes["targets"])
    shifted = np.roll(targets, 1, axis=1)
    shifted[:, 0] = 0
    return {
        **batch,
        "decoder_target_tokens": targets,
        "decoder_input_tokens": shifted,
        "decoder_loss_weights": np.ones_like(targets),
    }


if __name__ == "__main__":
    main()
