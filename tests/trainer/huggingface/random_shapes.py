"""Random models of transformers beyond T5, Llama, Gemma, GPT-2 and BERT, in folders.

python -m tests.trainer.huggingface.random_shapes     # compares their logits with ours
"""

import json
import pathlib
import tempfile

import numpy as np

from tasks.vocabulary import SpecialIds
from tests.trainer.huggingface.conftest import random_batch
from trainer.huggingface import configs, load, model_config, names, parity, weights
from trainer.huggingface.kinds import KINDS
from trainer.model.paths import named

SIZES = {"vocab_size": 384, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 0}
DECODER = SIZES | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GEMMA = DECODER | {"head_dim": 12, "sliding_window": 7, "query_pre_attn_scalar": 20}
# Name -> (transformers' class without its ending, fields). Rows have up to 40 tokens, so windows
# and caps change the logits.
T5GEMMA = {
    stack: {
        **{**GEMMA, "num_hidden_layers": layers},
        **{"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
    }
    for stack, layers in (("encoder", 2), ("decoder", 3))
} | {"vocab_size": 384}
GEMMA3 = GEMMA | {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
T5GEMMA2 = {
    "encoder": {
        "text_config": GEMMA3 | {"sliding_window": 8},
        "vision_config": {
            "model_type": "siglip_vision_model",
            **dict.fromkeys(("hidden_size", "intermediate_size"), 4),
            **dict.fromkeys(("image_size", "patch_size", "num_attention_heads"), 2),
            "num_hidden_layers": 1,
        },
        "mm_tokens_per_image": 1,
    },
    "decoder": GEMMA3 | {"sliding_window": 8},
    "vocab_size": 384,
}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 4.0},
    "original_max_position_embeddings": 16,
}
UNEQUAL = {
    "encoder": T5GEMMA["encoder"]
    | {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
    | {"intermediate_size": 40, "head_dim": 10},
    "decoder": T5GEMMA["decoder"],
    "vocab_size": 384,
}
T5 = SIZES | {
    **{"d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2},
    **{"num_heads": 4, "dropout_rate": 0.0, "initializer_factor": 0.5, "decoder_start_token_id": 0},
    **{"relative_attention_num_buckets": 16, "relative_attention_max_distance": 30},
}
LONGT5 = T5 | {"local_radius": 6, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
SWITCH = T5 | {"num_experts": 4, "expert_capacity": 7, "router_jitter_noise": 0.0}
SWITCH |= {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
SHAPES = {
    "qwen2": ("Qwen2", DECODER),
    "qwen2, windows": (
        "Qwen2",
        DECODER | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", DECODER | {"head_dim": 12, "attention_bias": True}),
    "mistral": ("Mistral", DECODER | {"head_dim": 12, "sliding_window": 5}),
    "olmo2": ("Olmo2", DECODER | {"rms_norm_eps": 1e-5}),
    "gemma2": (
        "Gemma2",
        GEMMA | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
    ),
    "gemma3_text": ("Gemma3Text", GEMMA3),
    "qwen3, yarn": ("Qwen3", DECODER | {"head_dim": 12, "rope_parameters": YARN}),
    "qwen2, yarn": (
        "Qwen2",
        DECODER
        | {"rope_parameters": YARN | {"mscale": 2.0, "mscale_all_dim": 0.7, "truncate": False}},
    ),
    "t5gemma": ("T5Gemma", T5GEMMA | {"tie_word_embeddings": False}),
    "t5gemma, tied, no windows": (
        "T5Gemma",
        T5GEMMA
        | {
            stack: T5GEMMA[stack] | {"layer_types": ["full_attention"] * layers}
            for stack, layers in (("encoder", 2), ("decoder", 3))
        },
    ),
    "t5gemma, stacks of other sizes": ("T5Gemma", UNEQUAL),
    "t5gemma2": ("T5Gemma2", T5GEMMA2),
    "t5gemma2, untied": ("T5Gemma2", T5GEMMA2 | {"tie_word_embeddings": False}),
    "longt5": ("LongT5", LONGT5),
    "longt5, scaled": (
        "LongT5",
        LONGT5 | {"tie_word_embeddings": True, "local_radius": 0, "num_decoder_layers": 1},
    ),
    "switch": ("SwitchTransformers", SWITCH),
    "switch, everywhere": (
        "SwitchTransformers",
        SWITCH
        | {"num_layers": 3, "num_sparse_encoder_layers": 3}
        | {"num_sparse_decoder_layers": 2, "dense_act_fn": "silu"},
    ),
    "longt5, blocks": (
        "LongT5",
        LONGT5 | {"encoder_attention_type": "transient-global", "global_block_size": 4},
    ),
}
DECODERS = [*SHAPES]
ENCODER = {name: each for name, each in DECODER.items() if name != "num_key_value_heads"}
ROBERTA = ENCODER | {"pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
ROBERTA |= {"max_position_embeddings": 66, "hidden_dropout_prob": 0.0}
ROBERTA |= {"attention_probs_dropout_prob": 0.0}
MODERNBERT = ENCODER | {
    "local_attention": 6,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 160_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
SHAPES |= {
    "roberta": ("Roberta", ROBERTA),
    "roberta, untied": ("Roberta", ROBERTA | {"tie_word_embeddings": False, "pad_token_id": 0}),
    "modernbert": ("ModernBert", MODERNBERT),
    "modernbert, biases": (
        "ModernBert",
        MODERNBERT
        | dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True)
        | {"tie_word_embeddings": False, "layer_types": ["sliding_attention"] * 3},
    ),
}
ARCHITECTURES = {
    "Gemma3Text": "Gemma3ForCausalLM",
    "T5Gemma": "T5GemmaForConditionalGeneration",
    "T5Gemma2": "T5Gemma2ForConditionalGeneration",
    "LongT5": "LongT5ForConditionalGeneration",
    "SwitchTransformers": "SwitchTransformersForConditionalGeneration",
    "Roberta": "RobertaForMaskedLM",
    "ModernBert": "ModernBertForMaskedLM",
    "GPT2": "GPT2LMHeadModel",
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


def table(folder):
    """Yields a row of Markdown for each shape: its parameters, and differences of logits.

    First the folder is read here and by transformers, then its export.
    """
    yield "| shape | parameters | theirs here | ours there | largest logit |"
    yield "|---|---:|---:|---:|---:|"
    for name in SHAPES:
        made, again = Theirs(name, folder / name), folder / f"{name}, exported"
        ours = parity.our_logits(made.config, made.params)
        theirs = parity.their_logits(made.model())
        written = configs.to_config(made.config, 64, special=SpecialIds(pad=made.pad))
        again.mkdir()
        (again / "config.json").write_text(json.dumps(written))
        weights.write(str(again), made.tensors(made.params), 10**9)
        back = parity.their_logits(parity.their_model(str(again), written))
        both = [parity.compare(ours, each, [made.batch]).difference for each in (theirs, back)]
        total = sum(each.size for each in named(made.params).values())
        largest = np.abs(theirs(made.batch)[0]).max()
        yield f"| {name} | {total:,} | {both[0]:.1e} | {both[1]:.1e} | {largest:.1f} |"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        for line in table(pathlib.Path(temporary)):
            print(line, flush=True)
