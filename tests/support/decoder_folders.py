"""Small decoders, and folders of transformers with them."""

import json

from tests.trainer.huggingface.conftest import random_params
from trainer.huggingface import configs, names, weights
from trainer.model.config import ModelConfig

SIZES = {"emb_dim": 32, "num_heads": 4, "head_dim": 8, "mlp_dim": 48, "vocab_size": 704}
SIZES |= {"num_encoder_layers": 0, "num_decoder_layers": 2}
DECODERS = {
    "qwen3": ModelConfig(family="llama", query_key_norm=True, tied_logits=True, **SIZES),
    "llama": ModelConfig(family="llama", num_kv_heads=1, **SIZES),
}


def written(path, config, seed=1):
    """Writes a folder of transformers with random parameters, and returns these."""
    params = random_params(config, seed)
    found = configs.to_config(config, 64)
    (path / "config.json").write_text(json.dumps(found))
    tensors = names.to_tensors(params, config, found["model_type"])
    weights.write(str(path), tensors, 10**9)
    return params
