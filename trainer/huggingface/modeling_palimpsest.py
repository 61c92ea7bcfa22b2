"""A decoder-only model with T5's relative positions, for transformers: a file that stands alone.

`trainer.export --custom_code` puts it beside the weights; then

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

Rows begin with id 0. There is no cache of keys and values: `generate` computes the row again for
every token.

Dimensions: B batch, L length, D model, H heads, K head size, R relative buckets, V vocabulary.
"""

import math

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import CausalLMOutput


class PalimpsestConfig(PreTrainedConfig):
    """Sizes by Llama's names, and those of the table of relative positions by T5's."""

    model_type = "palimpsest"

    def __init__(
        self,
        vocab_size=32128,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=64,
        hidden_act="gelu_new",
        rms_norm_eps=1e-6,
        relative_attention_num_buckets=32,
        relative_attention_max_distance=128,
        tie_word_embeddings=True,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.hidden_act = hidden_act
        self.rms_norm_eps = rms_norm_eps
        self.relative_attention_num_buckets = relative_attention_num_buckets
        self.relative_attention_max_distance = relative_attention_max_distance
        super().__init__(tie_word_embeddings=tie_word_embeddings, **{"use_cache": False, **kwargs})


class RMSNorm(nn.Module):
    """Division by the root mean square, with a scale (arXiv:1910.07467)."""

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.epsilon = config.rms_norm_eps

    def forward(self, x_BLD):
        mean_square = x_BLD.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (x_BLD * torch.rsqrt(mean_square + self.epsilon)).to(x_BLD.dtype)


class Attention(nn.Module):
    """Softmax attention without a factor: T5 folds it into the initial queries."""

    def __init__(self, config):
        super().__init__()
        inner = config.num_attention_heads * config.head_dim
        self.heads = config.num_attention_heads
        for letter in "qkv":
            self.add_module(f"{letter}_proj", nn.Linear(config.hidden_size, inner, bias=False))
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, x_BLD, bias_BHLL):
        q, k, v = (
            project(x_BLD).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        weights = torch.softmax(q.float() @ k.float().transpose(-1, -2) + bias_BHLL, dim=-1)
        return self.o_proj((weights.to(v.dtype) @ v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """The product of an activated projection and a plain one, projected back."""

    def __init__(self, config):
        super().__init__()
        sizes = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(*sizes, bias=False)
        self.up_proj = nn.Linear(*sizes, bias=False)
        self.down_proj = nn.Linear(*reversed(sizes), bias=False)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, x_BLD):
        return self.down_proj(self.activation(self.gate_proj(x_BLD)) * self.up_proj(x_BLD))


class Layer(nn.Module):
    """Attention and feed-forward, a norm before each."""

    def __init__(self, config):
        super().__init__()
        self.input_layernorm = RMSNorm(config)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config)
        self.mlp = FeedForward(config)

    def forward(self, x_BLD, bias_BHLL):
        x_BLD = x_BLD + self.self_attn(self.input_layernorm(x_BLD), bias_BHLL)
        return x_BLD + self.mlp(self.post_attention_layernorm(x_BLD))


class Decoder(nn.Module):
    """Token ids to normalised states [B, L, D]."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.relative_attention_bias = nn.Embedding(
            config.relative_attention_num_buckets, config.num_attention_heads
        )
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config)

    def forward(self, ids_BL, attention_mask, prefix_mask):
        length = ids_BL.shape[1]
        place = torch.arange(length, device=ids_BL.device)
        seen = (place[None, :] <= place[:, None])[None]
        if prefix_mask is not None:
            prefix = prefix_mask.bool()
            seen = seen | (prefix[:, :, None] & prefix[:, None, :])
        if attention_mask is not None:
            seen = seen & attention_mask[:, None, :].bool()
        table = self.relative_attention_bias(self.bucket(place[:, None] - place[None, :]))
        bias = table.float().permute(2, 0, 1)[None].masked_fill(~seen[:, None], -1e10)
        x_BLD = self.embed_tokens(ids_BL)
        for layer in self.layers:
            x_BLD = layer(x_BLD, bias)
        return self.norm(x_BLD)

    def bucket(self, behind):
        """T5's bucket of a distance to a key; 0 for keys that lie ahead (arXiv:1910.10683)."""
        buckets, distance = (
            self.config.relative_attention_num_buckets,
            self.config.relative_attention_max_distance,
        )
        behind, exact = behind.clamp(min=0), buckets // 2
        ratio = behind.clamp(min=1).float() / exact
        growth = torch.log(ratio) / math.log(distance / exact) * (buckets - exact)
        far = (exact + growth.long()).clamp(max=buckets - 1)
        return torch.where(behind < exact, behind, far)


class PalimpsestForCausalLM(PreTrainedModel, GenerationMixin):
    """Logits of the next token at every position."""

    config_class = PalimpsestConfig
    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def get_output_embeddings(self):
        return self.lm_head

    def prepare_inputs_for_generation(
        self, input_ids, attention_mask=None, prefix_mask=None, **kwargs
    ):
        if prefix_mask is not None:  # what is generated is no prefix
            more = input_ids.shape[1] - prefix_mask.shape[1]
            prefix_mask = nn.functional.pad(prefix_mask, (0, more))
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "prefix_mask": prefix_mask,
        }

    def forward(self, input_ids=None, attention_mask=None, prefix_mask=None, labels=None, **kwargs):
        """`prefix_mask` [B, L] marks positions that see one another in both directions; `labels`
        are input ids, -100 where there is no loss, and are shifted here."""
        states = self.model(input_ids, attention_mask, prefix_mask)
        if self.config.tie_word_embeddings:
            states = states * self.config.hidden_size**-0.5
        logits = self.lm_head(states)
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(
                logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
            )
        return CausalLMOutput(loss=loss, logits=logits)
