"""Muon's entry in the table of optimizers. No JAX.

Source of the defaults: Liu et al. 2025 (arXiv:2502.16982) for the momentum and Adam's betas, and
measurements for the parameter scale (dev/LOG.md, 2026-11-21).
"""

from trainer.config.optimizer import OTHERS, Optimizer

MUON = Optimizer(
    "trainer.annexes.muon.muon:direction",
    {**OTHERS, "momentum": 0.95, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8},
    rate_exponent="trainer.annexes.muon.muon:rate_exponent",
)
