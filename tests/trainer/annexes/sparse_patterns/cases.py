"""Rows that sparse_patterns adds to tables of the core's tests."""

REFUSED = [
    ("lm", {"attention_pattern": "variable:windows=a"}, "attention_pattern .*windows is numb"),
    ("bert", {"attention_pattern": "local", "attention": "dot_product"}, "attention_pattern is"),
    (
        *("bert", {"attention_pattern": "local", "attention": "cudnn", "dtype": "bfloat16"}),
        "attention_pattern is",
    ),
]

DECODED_PIECES = {
    "window": ("lm_tiny", {"attention_pattern": "local:block=2,window=3"}),
    # As many blocks as in the row of the parallel pass: their number decides over the draw.
    "random_blocks": (
        *(
            "llama3_1b",
            {"attention_pattern": "bigbird:block=3,window=1,random_blocks=1,per_head=true"},
        ),
    ),
    "fixed_blocks": (
        *("t5_1_1_tiny", {"attention_pattern": "fixed:block=1,window=2,head_patterns=2"}),
    ),
}
