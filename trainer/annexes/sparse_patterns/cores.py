"""Block-sparse attention as an attention core. No JAX."""

from __future__ import annotations

from trainer.model.attention_cores import EINSUM, Core, Reason, Request


def _supports(request: Request) -> Reason | None:
    return Reason("attention", "another one") if request.cached else None


# It is what written-out products are for a pattern.
SPARSE = Core(EINSUM, "trainer.annexes.sparse_patterns.sparse_core:run", _supports)
