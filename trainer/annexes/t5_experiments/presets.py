"""Presets of t5-experiments' models.

Source: yurakuratov/t5-experiments, `t5configs/*.json` and `bert_configs/*.json`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainer.config.presets import model_preset
from trainer.model.config import ModelConfig
from trainer.model.registry import SLOTS


def presets() -> Iterator[tuple[str, ModelConfig]]:
    """Yields (name, model)."""
    small, base = model_preset("t5_1_0_small"), model_preset("t5_1_0_base")
    yield "t5_1_0_micro", replace(small, num_encoder_layers=4, num_decoder_layers=4)
    for count in (10, 20):
        tokens = f"memory_tokens:count={count}"
        yield f"t5_1_0_small_memory_{count}", replace(small, stack_parts=tokens)
    # Conditional queries in half of the heads, or in all.
    yield "t5_1_0_base_cdq", replace(base, mixer="cdq:conditional_heads=6")
    yield "t5_1_0_base_only_cdq", replace(base, mixer="cdq")
    for size in ("tiny", "mini", "base", "large"):
        yield f"bert_{size}_pre_ln", replace(model_preset(f"bert_{size}"), family="bert_pre_ln")
    # Its 4-layer models have the widths of base.
    bert = model_preset("bert_base")
    yield "bert_base_4l", replace(bert, num_encoder_layers=4)
    for position in ("relative", "rotary"):
        model = replace(bert, family="bert_pre_ln", num_encoder_layers=4, position=position)
        yield f"bert_base_4l_pre_ln_{position}", model
    # Its example of DeepSpeed's sparse attention: a window of one block, one global block and one
    # random block, drawn for each head; blocks have 16 tokens. The layout is another annex's.
    if "bigbird" in SLOTS["attention_pattern"]:
        blocks = "bigbird:block=16,window=1,global_blocks=1,random_blocks=1,per_head=true"
        yield "bert_base_bigbird", replace(bert, attention_pattern=blocks)
