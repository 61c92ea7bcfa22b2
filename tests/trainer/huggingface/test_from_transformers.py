"""Random models made and saved by transformers compute the same logits here."""

import numpy as np
import pytest

from tests.trainer.huggingface.conftest import random_batch
from trainer.huggingface import load, model_config, parity

SIZES = {"vocab_size": 384, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 0}
DECODER = SIZES | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
T5 = SIZES | {"d_model": 32, "d_kv": 24, "d_ff": 48, "num_layers": 2, "num_heads": 4}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS = {
    "Llama": DECODER
    | {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_parameters": LLAMA3_ROPE},
    "Gemma": DECODER | {"num_key_value_heads": 1, "head_dim": 16},
    "GPT2": SIZES | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "UMT5": T5 | {"feed_forward_proj": "gated-gelu"},
    "MT5": T5 | {"feed_forward_proj": "gated-gelu"},
    "T5": T5 | {"feed_forward_proj": "gated-gelu", "relative_attention_num_buckets": 16},
    "T5, logits of its own": T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}
HEADS = {"Llama": "ForCausalLM", "Gemma": "ForCausalLM", "GPT2": "LMHeadModel"}


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_a_folder_of_transformers(name, tmp_path):
    import torch
    import transformers

    kind = name.partition(",")[0]
    config = getattr(transformers, f"{kind}Config")(**MODELS[name])
    torch.manual_seed(0)
    made = getattr(transformers, kind + HEADS.get(kind, "ForConditionalGeneration"))(config)
    with torch.no_grad():  # biases and gains start at 0 and 1, which hides mistakes
        for parameter in made.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    made.save_pretrained(tmp_path)
    ours = model_config(str(tmp_path))
    batch = random_batch(ours)
    written = config.to_dict() | {"architectures": [type(made).__name__]}
    theirs = parity.their_logits(parity.their_model(str(tmp_path), written))
    found = parity.compare(parity.our_logits(ours, load(str(tmp_path), ours)), theirs, [batch])
    assert found.holds, str(found)
    assert np.abs(theirs(batch)[0]).max() > 0.1


def test_fields_that_transformers_fills_in(exported):
    """Missing fields have the values that transformers gives them."""
    gemma = exported("gemma")
    gemma.write({**gemma.written, "hidden_act": None}, gemma.tensors)
    assert model_config(str(gemma.folder)).mlp_activations == ("gelu", "linear")
    llama = exported("llama3")
    rope = {**llama.written["rope_parameters"], "original_max_position_embeddings": None}
    llama.write({**llama.written, "rope_parameters": rope}, llama.tensors)
    assert "original_positions=64" in model_config(str(llama.folder)).position
