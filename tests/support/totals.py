"""Parameters of deep models, counted from two layers of each stack."""

from dataclasses import replace

from trainer.engine.cost import parameter_count
from trainer.model.config import ModelConfig
from trainer.model.spec import model_spec


def parameter_total(config: ModelConfig) -> int:
    """Returns `parameter_count` of a model whose stacks repeat one layer, many times faster."""
    layers = [layer for stack in model_spec(config).stacks.values() for layer in stack.layers]
    if len({layer.feed_forward for layer in layers}) > 1:
        return parameter_count(config)
    encoder, decoder = config.num_encoder_layers, config.num_decoder_layers

    def count(encoders: int, decoders: int) -> int:
        return parameter_count(
            replace(config, num_encoder_layers=encoders, num_decoder_layers=decoders)
        )

    first = (min(encoder, 1), min(decoder, 1))
    total = least = count(*first)
    if encoder > 1:
        total += (encoder - 1) * (count(2, first[1]) - least)
    if decoder > 1:
        total += (decoder - 1) * (count(first[0], 2) - least)
    return total
