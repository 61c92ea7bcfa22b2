"""Rows that sparse_patterns adds to tables of the core's tests."""

REFUSED = [
    ("lm", {"attention_pattern": "variable:windows=a"}, "windows is numbers joined by"),
    ("bert", {"attention_pattern": "local", "attention": "dot_product"}, "attention_pattern is"),
    (
        *("bert", {"attention_pattern": "local", "attention": "cudnn", "dtype": "bfloat16"}),
        "attention_pattern is",
    ),
    (
        "bert",
        {"attention": "pallas"} | {"attention_pattern": "local:block=48", "head_dim": 64},
        "attention_pattern",
    ),
]
