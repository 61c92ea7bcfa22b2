"""Objectives make examples from windows of tokens. A new one subclasses `Objective`."""

from tasks.objectives.denoising import (
    DENOISING,
    Denoising,
    prefix_lm,
    span_corruption,
    span_corruption_lengths,
)
from tasks.objectives.language_model import AutoregressiveLM, DecoderPrefixLM
from tasks.objectives.masked_lm import MaskedLM
from tasks.objectives.masks import RandomPrefix
from tasks.objectives.objective import Examples, Lengths, Objective, with_eos
from tasks.objectives.supervised import Supervised
from tasks.objectives.ul2 import MixtureOfDenoisers, ul2_denoisers

__all__ = [
    "DENOISING",
    "AutoregressiveLM",
    "DecoderPrefixLM",
    "Denoising",
    "Examples",
    "Lengths",
    "MaskedLM",
    "MixtureOfDenoisers",
    "Objective",
    "RandomPrefix",
    "Supervised",
    "prefix_lm",
    "span_corruption",
    "span_corruption_lengths",
    "ul2_denoisers",
    "with_eos",
]
