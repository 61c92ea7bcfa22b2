"""Rows that sparse_patterns adds to tables of the core's tests."""

REFUSED = [
    ("lm", {"attention_pattern": "variable:windows=a"}, "attention_pattern .*windows is numb"),
    ("bert", {"attention_pattern": "local", "attention": "dot_product"}, "attention_pattern is"),
    (
        *("bert", {"attention_pattern": "local", "attention": "cudnn", "dtype": "bfloat16"}),
        "attention_pattern is",
    ),
]
