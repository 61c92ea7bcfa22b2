"""Random models of transformers in folders."""

import json

from tests.support.cases import entries
from tests.trainer.huggingface.conftest import random_batch
from tests.trainer.huggingface.sizes import LLAMA3, THEIR_DECODER, THEIR_T5, YARN
from trainer.huggingface import load, model_config, names, parity
from trainer.huggingface.kinds import KINDS

# Name -> (transformers' class without its ending, fields). Rows have up to 40 tokens, so windows
# and caps change the logits.
GATED = THEIR_T5 | {"feed_forward_proj": "gated-gelu"}
SHAPES = {
    **entries("SHAPES"),
    "llama, yarn": ("Llama", THEIR_DECODER | {"rope_parameters": YARN}),
    "llama 3": ("Llama", THEIR_DECODER | {"rms_norm_eps": 1e-5, "rope_parameters": LLAMA3}),
    "t5": ("T5", THEIR_T5),
    "t5, gated": ("T5", GATED | {"tie_word_embeddings": False}),
    "mt5": ("MT5", GATED),
    "umt5": ("UMT5", GATED),
}
ARCHITECTURES = {
    **entries("ARCHITECTURES"),
    "Bert": "BertForPreTraining",
    **{kind: f"{kind}ForConditionalGeneration" for kind in ("T5", "MT5", "UMT5")},
}
# Rows of a table that RoBERTa gives to no token, and we write as zeros.
UNUSED = "roberta.embeddings.position_embeddings.weight"


def write(kind, fields, folder, seed=0):
    """Writes a random model of transformers and returns the name of its class."""
    import torch
    import transformers

    architecture = ARCHITECTURES.get(kind, f"{kind}ForCausalLM")
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**fields)
    made = getattr(transformers, architecture)(config)
    with torch.no_grad():  # biases and gains start at 0 and 1, which hides mistakes
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        if kind == "Roberta":
            made.get_parameter(UNUSED)[: fields["pad_token_id"] + 1] = 0
            made.lm_head.decoder.bias.copy_(made.lm_head.bias)
    made.save_pretrained(folder)
    return architecture


class Theirs:
    """A random model of transformers in a folder, and what we read there."""

    def __init__(self, name, folder):
        self.folder, self.architecture = folder, write(*SHAPES[name], folder)
        self.written = json.loads((folder / "config.json").read_text())
        self.config = model_config(str(folder))
        self.params = load(str(folder), self.config)
        self.batch = random_batch(self.config)
        self.pad = self.written["pad_token_id"]

    def tensors(self, params):
        return names.to_tensors(params, self.config, self.written["model_type"], self.pad)

    def read(self, tensors):
        """Returns the tensors that our models have."""
        kind = KINDS[self.written["model_type"]]
        others = kind.unread + tuple(kind.blank(self.config))
        return {name: each for name, each in tensors.items() if not name.startswith(others)}

    def model(self):
        return parity.their_model(str(self.folder), self.written)
