"""Folds muP's multipliers and norms without gains, which transformers lacks, into parameters.

The function is unchanged; initial values and learning rates, which only training needs, are lost.
"""

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from trainer.model.config import ModelConfig
from trainer.model.slot import Choice
from trainer.model.spec import model_spec
from trainer.model.transformer import parameter_facts

Tree = dict[str, Any]


def folded(config: ModelConfig) -> ModelConfig:
    """Returns the model for `fold`'s parameters; `config` itself if there is nothing to fold."""
    norm = config.part("norm")
    changed: dict[str, Any] = {}
    pre = config.value("norm_placement") == "pre"
    if pre and getattr(norm.options, "gain", "vector") in ("none", "scalar"):
        changed["norm"] = str(Choice(norm.name, replace(norm.options, gain="vector")))
    named = config.attention_scale, config.logits_scale
    foreign = config.part("parametrisation").name == "mup" or named != (None, None)
    if not config.query_key_norm and foreign:  # multipliers differ from the family's
        changed |= {"parametrisation": None, "attention_scale": None, "logits_scale": None}
    return replace(config, **changed) if changed else config


def fold(params: Tree, config: ModelConfig) -> Tree:
    """Converts unscanned parameters of `config` to parameters of `folded(config)`."""
    target = folded(config)
    if target == config:
        return params
    before, after = (model_spec(each).shared.parametrisation for each in (config, target))
    attention = before.attention_scale(config.head_dim) / after.attention_scale(config.head_dim)
    tied = bool(config.value("tied_logits"))
    logits = config.logits_scale or 1.0
    if tied:
        logits = config.logits_scale or before.tied_logits_multiplier(config.emb_dim)
        logits /= after.tied_logits_multiplier(config.emb_dim)
    gains = config.part("norm") != target.part("norm")
    last = ("decoder", "decoder_norm") if config.num_decoder_layers else ("encoder", "encoder_norm")
    offset = float(getattr(target.part("norm").options, "gain", "vector") == "offset")
    if not config.has_decoder:  # the head's norm comes last
        last, offset = ("mlm_head", "layer_norm"), 0.0

    def walk(tree: Tree, path: tuple[str, ...]) -> Tree:
        found: Tree = {}
        # With shared queries and keys, "query" makes both.
        scaled = "query_from_key" if "query_from_key" in tree else "query"
        for name, node in tree.items():
            here = (*path, name)
            if isinstance(node, dict):
                node = walk(node, here)
                if name == scaled:
                    node = {part: np.asarray(leaf) * attention for part, leaf in node.items()}
                if tied and here[-2:] == last:
                    node = {
                        part: (np.asarray(leaf) + offset * (part == "scale")) * logits
                        - offset * (part == "scale")
                        for part, leaf in node.items()
                    }
            elif name == "rel_embedding":
                node = np.asarray(node) * attention
            elif not tied and here[-2:] == ("logits_dense", "kernel"):
                node = np.asarray(node) * logits
            found[name] = node
        return found

    return walk(_with_gains(params, target) if gains else params, ())


def _with_gains(params: Tree, target: ModelConfig) -> Tree:
    """Returns parameters with the gains of all of `target`'s norms."""
    found: Tree = jax.tree.map(np.asarray, params)
    for path, facts in parameter_facts(model_spec(target)).items():
        *owners, name = path.split("/")
        if name == "scale":
            node = found
            for owner in owners:
                node = node.setdefault(owner, {})
            node["scale"] = np.ones(facts.shape, np.float32) * node.get("scale", 1.0)
    return found
