"""Decoder-only models with T5's relative positions, including Primer, for transformers.

This file needs only torch and transformers. `trainer.export --custom_code` writes it beside the
weights; load the model with

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

Rows begin with id 0. `generate` caches keys, values and the last inputs of convolutions in a
`PalimpsestCache`.

Dimensions: B batch, L length, S length of the keys, D model, C channels, H heads, K head size,
V vocabulary.
"""

import math

import torch
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast


class PalimpsestConfig(PretrainedConfig):
    """Configuration that uses Llama's names for sizes and T5's for relative positions.

    `mixer` is "attention", "mdha" or "mdha_shared_qk"; `norm` is "rms_norm", "layer_norm" or
    "primer_norm"; `norm_placement` is "pre" or "primer_alternating".
    """

    model_type = "palimpsest"

    defaults = {
        "vocab_size": 32128,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "head_dim": 64,
        "hidden_act": "gelu_new",
        "gated_mlp": True,
        "mlp_bias": False,
        "mixer": "attention",
        "norm": "rms_norm",
        "norm_placement": "pre",
        "rms_norm_eps": 1e-6,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "family": "lm",
    }

    def __init__(self, tie_word_embeddings=True, **kwargs):
        for name, value in self.defaults.items():
            setattr(self, name, kwargs.pop(name, value))
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)


class PalimpsestCache(DynamicCache):
    """Keys and values of earlier positions, and the last inputs of convolutions."""

    def __init__(self):
        super().__init__()
        self.inputs = {}  # (layer number, projection letter) -> [B, 2, C]

    def _change(self, function):
        self.inputs = {name: function(each) for name, each in self.inputs.items()}

    def reorder_cache(self, beam_idx):
        super().reorder_cache(beam_idx)
        self._change(lambda x_BLC: x_BLC.index_select(0, beam_idx.to(x_BLC.device)))

    def batch_repeat_interleave(self, repeats):
        super().batch_repeat_interleave(repeats)
        self._change(lambda x_BLC: x_BLC.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices):
        super().batch_select_indices(indices)
        self._change(lambda x_BLC: x_BLC[indices])


class Norm(nn.Module):
    """RMSNorm (arXiv:1910.07467), LayerNorm (arXiv:1607.06450) or Primer's (arXiv:2109.08668)."""

    def __init__(self, config):
        super().__init__()
        self.kind, self.epsilon = config.norm, config.rms_norm_eps
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        if self.kind != "rms_norm":
            self.bias = nn.Parameter(torch.zeros(config.hidden_size))

    def forward(self, x_BLD):
        centred = x = x_BLD.float()
        if self.kind != "rms_norm":
            centred = x - x.mean(-1, keepdim=True)
        square = (x if self.kind == "primer_norm" else centred) * centred
        scale = torch.rsqrt(square.mean(-1, keepdim=True).clamp(min=0) + self.epsilon)
        normalised = self.weight * (centred * scale).to(x_BLD.dtype)
        return normalised if self.kind == "rms_norm" else normalised + self.bias


class Convolution(nn.Module):
    """Causal depthwise convolution over the current position and the two before it.

    Maps [B, L, C] and the preceding inputs, [B, 2, C] or None for zeros, to [B, L, C] and the last
    two inputs. Padding, which may precede a row's tokens, counts as 0.
    Source: So et al. 2021 (arXiv:2109.08668), section 3.1.
    """

    def __init__(self, channels):
        super().__init__()
        self.tap_0, self.tap_1, self.tap_2 = (nn.Parameter(torch.zeros(channels)) for _ in range(3))

    def forward(self, x_BLC, is_token_BL1, before_BLC=None):
        x_BLC = x_BLC * is_token_BL1
        if before_BLC is None:
            behind = nn.functional.pad(x_BLC, (0, 0, 2, 0))
        else:
            behind = torch.cat([before_BLC, x_BLC], dim=1)
        out = self.tap_0 * x_BLC + self.tap_1 * behind[:, 1:-1] + self.tap_2 * behind[:, :-2]
        return out, behind[:, -2:]


class Attention(nn.Module):
    """Softmax attention without scaling: T5 folds the factor into the initial queries."""

    def __init__(self, config, number):
        super().__init__()
        self.number = number  # the layer's index
        inner = config.num_attention_heads * config.head_dim
        self.heads = config.num_attention_heads
        self.shared = config.mixer == "mdha_shared_qk"
        self.convolves = config.mixer != "attention"
        for letter in "qv" if self.shared else "qkv":
            self.add_module(f"{letter}_proj", nn.Linear(config.hidden_size, inner, bias=False))
            if self.convolves:
                self.add_module(f"{letter}_conv", Convolution(inner))
        if self.shared:
            self.q_from_k = nn.Linear(inner, inner, bias=False)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, x_BLD, bias_BHLS, is_token_BL1, cache):
        kept = {} if cache is None else cache.inputs

        def project(letter):
            projected = getattr(self, f"{letter}_proj")(x_BLD)
            if not self.convolves:
                return projected
            convolve, name = getattr(self, f"{letter}_conv"), (self.number, letter)
            out, kept[name] = convolve(projected, is_token_BL1, kept.get(name))
            return out

        q, v = project("q"), project("v")
        if self.shared:
            q, k = self.q_from_k(q), q
        else:
            k = project("k")
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        if cache is not None:
            k, v = cache.update(k, v, self.number)
        weights = torch.softmax(q.float() @ k.float().transpose(-1, -2) + bias_BHLS, dim=-1)
        return self.o_proj((weights.to(v.dtype) @ v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Projection and activation, times a second projection if gated, then an output projection."""

    def __init__(self, config):
        super().__init__()
        sizes, bias = (config.hidden_size, config.intermediate_size), config.mlp_bias
        self.up_proj = nn.Linear(*sizes, bias=bias)
        self.gate_proj = nn.Linear(*sizes, bias=bias) if config.gated_mlp else None
        self.down_proj = nn.Linear(*reversed(sizes), bias=bias)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, x_BLD):
        if self.gate_proj is None:
            return self.down_proj(self.activation(self.up_proj(x_BLD)))
        return self.down_proj(self.activation(self.gate_proj(x_BLD)) * self.up_proj(x_BLD))


class Layer(nn.Module):
    """Attention and feed-forward, each after a norm; Primer's second norm follows its branch."""

    def __init__(self, config, number):
        super().__init__()
        self.alternating = config.norm_placement == "primer_alternating"
        self.input_layernorm = Norm(config)
        self.self_attn = Attention(config, number)
        second = "feedforward" if self.alternating else "attention"
        self.add_module(f"post_{second}_layernorm", Norm(config))
        self.mlp = FeedForward(config)

    def forward(self, x_BLD, bias_BHLS, is_token_BL1, cache):
        x_BLD = x_BLD + self.self_attn(self.input_layernorm(x_BLD), bias_BHLS, is_token_BL1, cache)
        if self.alternating:
            return x_BLD + self.post_feedforward_layernorm(self.mlp(x_BLD))
        return x_BLD + self.mlp(self.post_attention_layernorm(x_BLD))


class Decoder(nn.Module):
    """Maps token ids [B, L] to normalised states [B, L, D].

    With a cache, the ids follow the cached positions; masks cover all positions [B, S].
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.relative_attention_bias = nn.Embedding(
            config.relative_attention_num_buckets, config.num_attention_heads
        )
        self.layers = nn.ModuleList(
            Layer(config, number) for number in range(config.num_hidden_layers)
        )
        self.norm = Norm(config)

    def forward(self, ids_BL, attention_mask, prefix_mask, cache=None):
        length, before = ids_BL.shape[1], 0 if cache is None else cache.get_seq_length()
        key = torch.arange(before + length, device=ids_BL.device)
        query = key[before:]
        seen = (key[None, :] <= query[:, None])[None]
        if prefix_mask is not None:
            prefix = prefix_mask.bool()
            seen = seen | (prefix[:, before:, None] & prefix[:, None, :])
        if attention_mask is not None:
            seen = seen & attention_mask[:, None, :].bool()
        table = self.relative_attention_bias(self.bucket(query[:, None] - key[None, :]))
        bias = table.float().permute(2, 0, 1)[None].masked_fill(~seen[:, None], -1e10)
        x_BLD = self.embed_tokens(ids_BL)
        mask = torch.ones_like(ids_BL) if attention_mask is None else attention_mask
        is_token_BL1 = mask[:, -length:, None].to(x_BLD.dtype)
        for layer in self.layers:
            x_BLD = layer(x_BLD, bias, is_token_BL1, cache)
        return self.norm(x_BLD)

    def bucket(self, behind):
        """Returns T5's bucket for the distance to a key; 0 for later keys (arXiv:1910.10683)."""
        buckets = self.config.relative_attention_num_buckets
        distance = self.config.relative_attention_max_distance
        behind, exact = behind.clamp(min=0), buckets // 2
        ratio = behind.clamp(min=1).float() / exact
        growth = torch.log(ratio) / math.log(distance / exact) * (buckets - exact)
        far = (exact + growth.long()).clamp(max=buckets - 1)
        return torch.where(behind < exact, behind, far)


class PalimpsestForCausalLM(PreTrainedModel, GenerationMixin):
    """Language model that returns next-token logits at every position."""

    config_class = PalimpsestConfig
    base_model_prefix = "model"
    _is_stateful = True  # inputs of convolutions cannot be rolled back
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
        self, input_ids, attention_mask=None, prefix_mask=None, past_key_values=None, **kwargs
    ):
        if prefix_mask is not None:  # generated tokens are not part of the prefix
            more = input_ids.shape[1] - prefix_mask.shape[1]
            prefix_mask = nn.functional.pad(prefix_mask, (0, more))
        if past_key_values is not None:
            input_ids = input_ids[:, past_key_values.get_seq_length() :]
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "prefix_mask": prefix_mask,
            "past_key_values": past_key_values,
            "use_cache": kwargs.get("use_cache"),
        }

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        prefix_mask=None,
        past_key_values=None,
        labels=None,
        use_cache=None,
        **kwargs,
    ):
        """Returns logits [B, L, V], and the loss if `labels` are given.

        `prefix_mask` [B, L] marks positions that attend to one another in both directions. `labels`
        [B, L] are input ids, -100 for positions without loss; they are shifted here.
        `past_key_values` is None or the `PalimpsestCache` of an earlier call; the masks then also
        cover its positions. With `use_cache`, returns a cache for the next call.
        """
        cache = past_key_values
        if use_cache and not isinstance(cache, PalimpsestCache):
            cache = PalimpsestCache()  # replaces the empty cache that `generate` begins with
        states = self.model(input_ids, attention_mask, prefix_mask, cache)
        if self.config.tie_word_embeddings:
            states = states * self.config.hidden_size**-0.5
        logits = self.lm_head(states)
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(
                logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
            )
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
