"""Times T5X's training step; benchmarks.step runs this program, the only one that needs T5X.

The argument is the model's sizes as JSON. Prints "seconds WALL CORE", wall and processor
time: first for compiling, then, for each number read from stdin, for that many steps.
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
    partitioner = partitioning.PjitPartitioner(
        num_partitions=1, logical_axis_rules=partitioning.standard_logical_axis_rules()
    )
    run = make_trainer(sizes, partitioner)
    state, batch = run.train_state, jax.device_put(make_batch(sizes))
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


def make_trainer(
    sizes: dict, partitioner: partitioning.PjitPartitioner, abstract: bool = False
) -> trainer.Trainer:
    """Returns T5X's `Trainer` with the settings of the examples' gin files.

    An `abstract` one has a state of shapes, whose step can be compiled but not run.
    """
    module, model_class = _network(sizes)
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
    batch = make_batch(sizes)
    initializer = utils.TrainStateInitializer(
        optimizer_def=model.optimizer_def,
        init_fn=model.get_initial_variables,
        input_shapes={name: feature.shape for name, feature in batch.items()},
        input_types={name: feature.dtype for name, feature in batch.items()},
        partitioner=partitioner,
    )
    return trainer.Trainer(
        model=model,
        train_state=initializer.global_train_state_shape
        if abstract
        else initializer.from_scratch(jax.random.PRNGKey(0)),
        partitioner=partitioner,
        eval_names=[],
        summary_dir=None,
        train_state_axes=initializer.train_state_axes,
        # The bits of PRNGKey(0), without a device that they would be bound to.
        rng=np.zeros(2, np.uint32),
        learning_rate_fn=utils.create_learning_rate_scheduler(
            factors="constant * rsqrt_decay", base_learning_rate=1.0, warmup_steps=10_000
        ),
        num_microbatches=sizes["microbatches"] if sizes["microbatches"] > 1 else None,
    )


def _network(sizes: dict) -> tuple[flax.linen.Module, type]:
    fields = {**sizes["network"], "mlp_activations": tuple(sizes["network"]["mlp_activations"])}
    if sizes["decoder_only"]:
        from t5x.examples.decoder_only import network

        del fields["num_encoder_layers"]
        fields["num_layers"] = fields.pop("num_decoder_layers")
        config = network.TransformerConfig(**fields)
        return network.DecoderWrapper(config=config), models.DecoderOnlyModel
    from t5x.examples.t5 import network

    return network.Transformer(config=network.T5Config(**fields)), models.EncoderDecoderModel


def make_batch(sizes: dict) -> dict[str, np.ndarray]:
    """Returns a batch of random ids, int32."""
    random = np.random.default_rng(0)
    lengths = {} if sizes["decoder_only"] else {"encoder_input_tokens": sizes["inputs"]}
    lengths |= {"decoder_target_tokens": sizes["targets"]}
    batch = {
        name: random.integers(
            1, sizes["network"]["vocab_size"], (sizes["batch_size"], length), np.int32
        )
        for name, length in lengths.items()
    }
    shifted = np.roll(batch["decoder_target_tokens"], 1, axis=1)
    shifted[:, 0] = 0
    weights = np.ones_like(shifted)
    return {**batch, "decoder_input_tokens": shifted, "decoder_loss_weights": weights}


if __name__ == "__main__":
    main()
