"""Values that a model's configuration refuses: each names its field and what fits."""

from dataclasses import fields

import pytest

from tests.support.cases import rows
from tests.trainer.model.conftest import tiny_config
from trainer.model import registry
from trainer.model.config import ModelConfig
from trainer.model.feedforward import ACTIVATIONS
from trainer.model.mixers import WEIGHTS

ODD_HEADS = {"num_heads": 4, "head_dim": 8, "tied_logits": False}
# Family, changes, the beginning of the line and what else it has.
REFUSED = [
    ("t5_1_1", {"family": "t5_1_2"}, "family is .*must be"),
    ("t5_1_1", {"vocab_size": 0}, "vocab_size is .*must be"),
    ("t5_1_1", {"num_encoder_layers": 0}, "num_encoder_layers is .*must be"),
    ("t5_1_1", {"num_decoder_layers": 0}, "num_decoder_layers is .*must be"),
    ("t5_1_1", {"dropout_rate": 1.0}, "dropout_rate is .*must be"),
    ("t5_1_1", {"mlp_activations": ("gleu",)}, "mlp_activations is .*must be"),
    ("bert", {"num_decoder_layers": 1}, "num_decoder_layers is .*must be"),
    ("lm", {"num_encoder_layers": 1}, "num_encoder_layers is 1; it must be 0"),
    ("bert", {"max_positions": 0}, "max_positions is .*must be"),
    # Positions.
    ("bert", {"position": "sinuous"}, "position is .*must be"),
    ("bert", {"position": "rotary", "head_dim": 12}, "head_dim is .*must be"),
    ("llama", {"attention_softcap": 1.0, "attention": "dot_product"},
     "attention_softcap is .*unset"),
    ("llama", {"attention_window": "sliding:layers=gg"}, "attention_window is .*letters l and g"),
    ("llama", {"attention_window": "sliding:reach=3"}, "attention_window is .*without reach"),
    ("lm", {"attention_window": "sliding:decoder=false"}, "attention_window is .*one stack"),
    ("t5_1_1", {"attention_window": "sliding:decoder=false,reach=3"},
     "attention_window is .*whose reach is left out"),
    ("lm", {"attention_window": "sliding:base=50"}, "attention_window is .*without base"),
    ("llama", {"query_key_norm_over": "joined"}, "query_key_norm_over is .*head"),
    ("bert", {"logits_softcap": 1.0}, "logits_softcap is .*unset"),
    ("bert", {"token_types": -1}, "token_types is -1; it must be 0 or more"),
    ("llama", {"token_types": 1}, "token_types is 1; it must be 2 in a model with a decoder"),
    ("t5_1_1", {"head_bias": False}, "head_bias is False; it must be True in a model with"),
    ("bert", {"norm_placement": "pre_but_first", "scan_layers": True}, "scan_layers is .*differ"),
    ("lm", {"norm_placement": "pre_but_first", "parallel_blocks": "one_norm"},
     "parallel_blocks is .*'pre_but_first'"),
    ("llama", {"head_dim": 3}, "head_dim is .*must be"),
    ("lm", {"position": "rotary:cross=true"}, "position is .*without cross=true"),
    ("lm", ODD_HEADS | {"position": "rotary:fraction=0.4"}, "head_dim is 8; .* even .* not 3.2"),
    # Implementations of attention.
    ("t5_1_1", {"attention": "dot_product", "dropout_rate": 0.1}, "dropout_rate .*with attention"),
    ("t5_1_1", {"attention": "cudnn"}, "dtype .*with attention"),
    ("lm", {"attention": "dot_product", "attention_weights": "elu"}, "attention_weights is 'elu'"),
    # Heads, scales and initial values.
    ("lm", ODD_HEADS | {"num_kv_heads": 3},
     "num_kv_heads is 3; .*divisor of num_heads, which is 4"),
    ("lm", {"attention_scale": 0.0}, "attention_scale is 0.0; .*above 0"),
    ("lm", {"logits_scale": float("nan")}, "logits_scale is nan"),
    ("lm", {"zero_init": ("keys",)}, "zero_init is .*logits, query, residual"),
    ("lm", {"zero_init": ("query", "query")}, "zero_init is .*each once"),
    ("lm", {"zero_init": ("logits",), "tied_logits": True}, "zero_init is .*tied"),
    ("lm", {"parametrisation": "mup:readout=zero", "tied_logits": True},
     "parametrisation .*readout: logits are"),
    # Norms, blocks and experts.
    ("lm", {"parallel_blocks": "one_norm", "norm_placement": "post"}, "parallel_blocks is 'one_"),
    ("lm", {"mixer": "mdah"}, "mixer is 'mdah'; it must be one of 'attention'"),
    ("lm", {"upstream_compat": True}, "upstream_compat is True; it must be False where"),
    ("t5_1_1", {"feed_forward": "none", "mlp_bias": True}, "mlp_bias is True"),
    ("llama", {"encoder_sizes": ("emb_dim=16",)}, "encoder_sizes is .*left out unless cross_att"),
    ("t5_1_1", {"encoder_sizes": ("width=16",)}, "encoder_sizes is .*sizes such as emb_dim=512"),
    (*("t5_1_1", {"encoder_sizes": ("emb_dim=12",), "shared_embedding": False}),
     "encoder_sizes is .*other than the decoder's"),
    ("llama", {"attention_window": "sliding:ahead=3"}, "attention_window is .*without reach and"),
    *rows("REFUSED"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "changes", "message"), REFUSED)
def test_what_does_not_fit_is_refused(family, changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        tiny_config(**{"family": family} | changes)


def test_names_that_need_no_jax_are_those_of_the_functions():
    assert {*registry.ACTIVATION_NAMES} == {*ACTIVATIONS}
    assert {*registry.WEIGHT_NAMES} == {*WEIGHTS}


def test_every_field_has_its_words():
    for each in fields(ModelConfig):
        assert len(each.metadata["words"]) > 20, each.name
