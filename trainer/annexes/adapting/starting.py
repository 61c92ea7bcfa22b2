"""The parameters of a model made of decoders."""

from dataclasses import replace
from typing import Any

import jax

from tasks.terminal.command_line import UserError
from trainer import huggingface
from trainer.annexes.adapting import adapting
from trainer.annexes.adapting.options import AdaptingConfig
from trainer.config import Config, from_transformers
from trainer.initialization import vocabularies
from trainer.model.config import ModelConfig
from trainer.model.paths import named
from trainer.model.spec import model_spec
from trainer.model.transformer import init_params, parameter_facts


def leaves(config: Config, folder: str, theirs: ModelConfig) -> dict[str, Any]:
    """Returns the leaves of a model made of decoders; the run's seed draws new ones."""
    settings: AdaptingConfig = config.adapting  # type: ignore[attr-defined]
    decoder = encoder = named(huggingface.load(folder, theirs))
    if settings.encoder is not None:
        other = settings.encoder.removeprefix(from_transformers.PREFIX)
        if config.model.shared_embedding:
            raise UserError("--adapt_encoder: two embeddings need --model.shared_embedding=false")
        vocabularies.check_same(folder, other, theirs)
        encoder = named(huggingface.load(other, huggingface.model_config(other)))
    new = settings.to == "encoder_decoder" and adapting.has_new_cross(config.model, settings.cross)
    found = adapting.parameters(decoder, encoder, config.model, new)
    model = replace(config.model, scan_layers=False, vocab_size=theirs.vocab_size)
    spec = model_spec(model)
    missing = [path for path in parameter_facts(spec) if path not in found]
    drawn = [path for path in missing if adapting.is_new(path, model)]

    def draw(key: jax.Array) -> dict[str, jax.Array]:
        leaves = named(init_params(spec, key))
        return {path: leaves[path] for path in drawn}

    return {**found, **(jax.jit(draw)(jax.random.key(config.seed)) if drawn else {})}
