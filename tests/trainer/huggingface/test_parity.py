"""Tests that transformers computes our logits, and that usual mistakes of conversion are found."""

import re
from dataclasses import replace

import numpy as np
import pytest

from tasks.terminal.command_line import UserError
from tests.support.cases import rows
from tests.support.parameters import slow_unless
from trainer.config.presets import model_preset
from trainer.huggingface import configs, parity
from trainer.huggingface.parity import Parity

pytestmark = pytest.mark.torch

IN_TRANSFORMERS = (
    *("t5_1_0", "t5_1_1", "t5_1_1_tied", "t5_squared_relu", "mt5", "bert", "bert_untied", "llama"),
    *("t5_buckets", "mup_decoder", "mup_t5", "mup_t5_tied"),
    *("llama_tied", "llama3", "llama_linear", "umt5", "umt5_tied", "t5_unscaled"),
    *rows("NAMES_IN_TRANSFORMERS"),
)


# Their parts are those of others: tied or untied logits and muP, each in another family.
REPEATED = {"bert_untied", "llama_tied", "mup_t5", "umt5_tied"}


@pytest.mark.parametrize("name", slow_unless({*IN_TRANSFORMERS} - REPEATED, IN_TRANSFORMERS))
def test_logits_of_transformers_equal_ours(exported, name):
    model = exported(name)
    found = model.parity()
    assert found.holds, str(found)
    assert found.agreement == 1.0
    # Only float32's rounding differs, and logits are not all 0.
    assert found.difference <= 1e-4
    assert found.rows == 4
    assert found.positions > 80
    assert np.abs(model.logits[0]).max() > 1


CUSTOM_CODE = ("lm", "lm_untied", "lm_of_pieces", *rows("CUSTOM_CODE"))


@pytest.mark.parametrize(
    ("name", "prefix"), [(name, False) for name in CUSTOM_CODE] + [("lm", True)]
)
def test_logits_of_the_modelling_file_equal_ours(exported, models, name, prefix):
    from trainer.huggingface.modeling_palimpsest import PalimpsestForCausalLM

    model, config = exported(name), models[name]
    batch = model.batch
    if prefix:
        marks = np.arange(batch["decoder_input_tokens"].shape[1]) < 9
        batch["decoder_causal_attention"] = np.tile(marks, (4, 1)).astype(np.int32)
    theirs = PalimpsestForCausalLM.from_pretrained(model.folder).eval()
    ours = parity.our_logits(config, model.params)
    found = parity.compare(ours, parity.their_logits(theirs), [batch])
    assert found.holds, str(found)


def test_padding_before_a_row_has_no_effect(exported):
    import torch

    from trainer.huggingface.modeling_palimpsest import PalimpsestForCausalLM

    model = PalimpsestForCausalLM.from_pretrained(exported("primer_ez").folder).eval()
    row = torch.tensor([[0, 7, 8, 9, 10]])
    padded, mask = (torch.nn.functional.pad(part, (3, 0)) for part in (row, torch.ones_like(row)))
    with torch.no_grad():
        alone = model(row).logits
        behind = model(padded, attention_mask=mask).logits[:, 3:]
        made = model.generate(padded, attention_mask=mask, max_new_tokens=4, do_sample=False)
        expected = model.generate(row, max_new_tokens=4, do_sample=False)
    np.testing.assert_allclose(behind, alone, atol=1e-4)
    assert made[:, 3:].tolist() == expected.tolist()


def reverse_table(model):
    name = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    model.tensors[name] = model.tensors[name][::-1]


def swap_wi(model):
    for name in [name for name in model.tensors if name.endswith("wi_0.weight")]:
        other = name.replace("wi_0", "wi_1")
        model.tensors[name], model.tensors[other] = model.tensors[other], model.tensors[name]


@pytest.mark.parametrize(
    ("name", "mistake", "least"),
    [
        # "gated-gelu_python" is the exact GELU, not the approximation by tanh.
        ("t5_1_1", {"feed_forward_proj": "gated-gelu_python"}, 1e-4),
        ("t5_1_1", reverse_table, 1e-2),
        ("t5_1_1", swap_wi, 1e-1),
        ("t5_1_1", {"tie_word_embeddings": True, "scale_decoder_outputs": True}, 1e-1),
        ("t5_1_0", {"tie_word_embeddings": False, "scale_decoder_outputs": False}, 1e-1),
        ("bert", {"hidden_act": "gelu_new"}, 1e-4),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 9e3}}, 1e-4),
    ],
    ids=["erf", "table", "wi", "tied_scale", "untied_scale", "bert_tanh", "rope"],
)
def test_mistakes_are_found(exported, name, mistake, least):
    model = exported(name)
    if callable(mistake):
        mistake(model)
        found = model.parity(changed=model.written)
    else:
        found = model.parity(changed=mistake)
    assert not found.holds
    assert found.difference > least


def test_a_tensor_missing_in_transformers_is_named(exported):
    model = exported("t5_1_1")
    del model.tensors["encoder.final_layer_norm.weight"]
    model.write(model.written, model.tensors)
    with pytest.raises(UserError, match=r"missing_keys: encoder\.final_layer_norm\.weight"):
        model.parity()


def test_nan_and_another_most_likely_token_are_found():
    zeros = np.zeros((1, 2, 3), np.float32)
    batch = {"decoder_target_tokens": np.array([[5, 0]]), "decoder_input_tokens": zeros}

    def against(theirs):
        return parity.compare(lambda batch: [zeros], lambda batch: [theirs], [batch])

    assert against(zeros) == Parity(1, 1, 0.0, 1.0)
    assert against(zeros).holds
    # What lies on padding does not count; on the one token all does.
    padding, nan, close = zeros.copy(), zeros.copy(), zeros.copy()
    padding[0, 1], nan[0, 0, 1], close[0, 0, 1] = 9.0, np.nan, 1e-6
    assert against(padding).holds
    assert not against(nan).holds
    assert against(close).difference < 1e-5
    assert not against(close).holds  # the most likely token is 1, not 0


def test_only_the_first_example_of_packed_rows_is_compared():
    seen = []

    def model(batch):
        seen.append(batch)
        return [np.zeros((1, 4, 3), np.float32)]

    batch = {
        "decoder_target_tokens": np.array([[5, 6, 7, 0]]),
        "decoder_input_tokens": np.array([[0, 5, 0, 0]]),
        "decoder_segment_ids": np.array([[1, 1, 2, 0]]),
        "decoder_positions": np.array([[0, 1, 0, 0]]),
    }
    assert parity.compare(model, model, [batch]).positions == 2
    assert seen[0]["decoder_target_tokens"].tolist() == [[5, 6, 0, 0]]
    assert seen[0]["decoder_segment_ids"].tolist() == [[1, 1, 0, 0]]
    assert seen[0].keys() == batch.keys() - {"decoder_positions"}


@pytest.mark.parametrize(
    ("preset", "changes", "reason"),
    [
        ("lm_tiny", {}, "family lm .* --custom_code"),
        ("bert_tiny", {"family": "bert_pre_ln"}, "norms after the sublayers"),
        ("bert_tiny", {"position": "relative"}, "learned positions, but this model uses"),
        ("bert_tiny", {"head_dim": 16}, "no bert model with head_dim 16"),
        ("bert_tiny", {"mlp_activations": ("gelu", "linear")}, "no bert model with mlp_activ"),
        ("t5_1_1_tiny", {"mlp_activations": ("gelu", "silu")}, "no t5_1_1 model with mlp_activ"),
        ("t5_1_1_tiny", {"position": "absolute"}, "no t5_1_1 model with position absolute"),
        ("llama_tiny", {"position": "relative"}, "no llama model with position relative"),
        ("llama_tiny", {"mlp_activations": ("relu",)}, "no llama model with mlp_activations"),
        ("t5_1_0_tiny", {"feed_forward": "none"}, "feed_forward none"),
        *rows("WITHOUT_TRANSFORMERS"),
    ],
)
def test_models_unknown_to_transformers_are_rejected_with_a_reason(preset, changes, reason):
    found = configs.refusal(replace(model_preset(preset), **changes))
    assert re.search(reason, found)
    assert "\n" not in found


@pytest.mark.parametrize(
    ("preset", "changes", "reason"),
    [
        ("lm_tiny", {"position": "absolute"}, "no lm model with position absolute$"),
        *rows("WITHOUT_CUSTOM_CODE"),
    ],
)
def test_models_unsupported_by_the_modelling_file_are_rejected(preset, changes, reason):
    found = configs.refusal(replace(model_preset(preset), **changes), custom_code=True)
    assert re.search(reason, found), found


def test_supported_models_are_accepted(models):
    for name, config in models.items():
        assert configs.refusal(config, custom_code=True) is None, name
