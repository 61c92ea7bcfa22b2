"""Checkpoints of Mesh TensorFlow, converted to transformers, compute the same."""

import pytest

from tests.trainer.annexes.t5x.test_mesh_checkpoints import (
    LEGACY,
    NEW,
    STEP,
    save,
    under_mesh_names,
)
from trainer.annexes.conversion import convert


def t5(gated):
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        **{"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "vocab_size": 384},
        **{"num_layers": 2, "num_decoder_layers": 2, "decoder_start_token_id": 0},
        feed_forward_proj="gated-gelu" if gated else "relu",
        tie_word_embeddings=not gated,
        scale_decoder_outputs=not gated,
    )
    model = T5ForConditionalGeneration(config).eval()
    if gated:  # transformers 5 ties the logits of every new T5
        model.lm_head.weight = torch.nn.Parameter(torch.randn(384, 32))
    return model


SIZES = [
    *("--model.emb_dim=32", "--model.head_dim=8", "--model.mlp_dim=64", "--model.num_heads=4"),
    *("--model.num_encoder_layers=2", "--model.num_decoder_layers=2"),
]


@pytest.mark.torch
@pytest.mark.parametrize(("gated", "norms"), [(False, LEGACY), (True, NEW)])
def test_a_t5_computes_the_same_after_it(gated, norms, tmp_path):
    import torch
    from transformers import AutoModelForSeq2SeqLM

    model = t5(gated)
    variables = under_mesh_names(model, norms)
    save(tmp_path / "mesh", variables, shards=2)
    preset = f"--preset=t5_1_{int(gated)}_tiny"
    flags = [f"--from={tmp_path / 'mesh'}", f"--to={tmp_path / 'hf'}", "--format=huggingface"]
    assert convert.main([*flags, preset, *SIZES]) == 0
    after = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf" / f"checkpoint_{STEP}").eval()
    ids = torch.arange(3, 43).reshape(2, 20)
    with torch.no_grad():
        before, found = (each(input_ids=ids, decoder_input_ids=ids) for each in (model, after))
    assert torch.equal(before.logits, found.logits)
