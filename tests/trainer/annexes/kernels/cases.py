"""Rows that kernels adds to tables of the core's tests."""

_PALLAS, _WIDE = {"attention": "pallas"}, {"head_dim": 64}
REFUSED = [
    ("t5_1_1", _PALLAS | {"head_dim": 80}, "head_dim .*with attention"),
    # Kernels cannot drop other weights for each query.
    ("bert", _PALLAS | {"dropout_rate": 0.1}, "dropout_rate .*with attention 'pallas'"),
    ("lm", _PALLAS | {"position": "alibi"}, "position is 'alibi'; .*'pallas'"),
    ("bert", _PALLAS | _WIDE | {"attention_pattern": "local:block=48"}, "attention_pattern"),
]

ALIKE = [
    ("lm", {"dropout_rate": 0.3} | _WIDE, _PALLAS | {"remat": "dots"}),
    ("t5_1_1", _WIDE, _PALLAS),
    ("t5_1_1", _WIDE, _PALLAS | {"remat": "dots"}),
    ("bert", _WIDE, _PALLAS),
]
