"""Objectives: how examples are made from windows of tokens."""

from tasks.objectives.denoising import (
    DENOISING,
    AutoregressiveLM,
    DecoderPrefixLM,
    Denoising,
    Examples,
    Lengths,
    Objective,
    RandomPrefix,
    prefix_lm,
    span_corruption,
    span_corruption_lengths,
    with_eos,
)
from tasks.objectives.masked_lm import MaskedLM
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
    "prefix_lm",
    "span_corruption",
    "span_corruption_lengths",
    "ul2_denoisers",
    "with_eos",
]
