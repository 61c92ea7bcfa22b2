"""T5X's training program, for the processes that run or compile it.

Only this module and those that import it need T5X.
"""

import flax
import jax
import numpy as np
import seqio
from t5x import adafactor, models, partitioning, trainer, utils


def make_trainer(
    sizes: dict, partitioner: partitioning.PjitPartitioner, abstract: bool = False
) -> trainer.Trainer:
    """Returns T5X's `Trainer` with the settings of the examples' gin files.

    Args:
      sizes: those of `benchmarks.t5x.sizes`.
      partitioner: of the devices.
      abstract: True makes a state of shapes, with which the step can be compiled but not run.
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
    shapes = batch_shapes(sizes)
    initializer = utils.TrainStateInitializer(
        optimizer_def=model.optimizer_def,
        init_fn=model.get_initial_variables,
        input_shapes={name: feature.shape for name, feature in shapes.items()},
        input_types={name: feature.dtype for name, feature in shapes.items()},
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


def batch_shapes(sizes: dict) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a batch's features, int32."""
    lengths = {
        **({} if sizes["decoder_only"] else {"encoder_input_tokens": sizes["inputs"]}),
        "decoder_target_tokens": sizes["targets"],
        "decoder_input_tokens": sizes["targets"],
        "decoder_loss_weights": sizes["targets"],
    }
    rows = sizes["batch_size"]
    return {
        name: jax.ShapeDtypeStruct((rows, length), np.int32) for name, length in lengths.items()
    }


def _network(sizes: dict) -> tuple[flax.linen.Module, type]:
    fields = {**sizes["network"], "mlp_activations": tuple(sizes["network"]["mlp_activations"])}
    if sizes["decoder_only"]:
        from t5x.examples.decoder_only import network

        del fields["num_encoder_layers"]
        fields["num_layers"] = fields.pop("num_decoder_layers")
        config = network.TransformerConfig(**fields)
        return network.DecoderWrapper(config=config), models.DecoderOnlyModel
    if sizes.get("remat_policy"):
        from t5x.examples.scalable_t5 import network

        fields |= {"scan_layers": True, "remat_policy": sizes["remat_policy"]}
    else:
        from t5x.examples.t5 import network
    return network.Transformer(config=network.T5Config(**fields)), models.EncoderDecoderModel
