"""Models of transformers beyond T5, Llama, Gemma, GPT-2 and BERT: the same numbers, both ways."""

import json
from functools import cache

import jax
import numpy as np
import optax
import pytest

from tasks.terminal.command_line import UserError
from tests.support.parameters import slow_unless
from tests.support.totals import parameter_total
from tests.trainer.huggingface.conftest import random_batch
from trainer.config import LossConfig
from trainer.config.optimizer import OptimizerConfig
from trainer.config.presets import MODEL_PRESETS
from trainer.decoding.decoder import Decoder, Decoding
from trainer.engine.loss import model_loss
from trainer.huggingface import configs, load, model_config, names, parity, weights
from trainer.model.spec import model_spec
from trainer.model.transformer import build_model
from trainer.optim.optimizer import optimizer_of

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
    "gemma3_text": (
        "Gemma3Text",
        GEMMA
        | {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "t5gemma": ("T5Gemma", T5GEMMA | {"tie_word_embeddings": False}),
    "t5gemma, tied": ("T5Gemma", T5GEMMA),
}
# These have the parts of the others.
FEW = ("qwen2, windows", "olmo2", "gemma3_text", "t5gemma")
ARCHITECTURES = {
    "Gemma3Text": "Gemma3ForCausalLM",
    "T5Gemma": "T5GemmaForConditionalGeneration",
}


class Theirs:
    """A random model of transformers in a folder, and what we read there."""

    def __init__(self, name, folder):
        import torch
        import transformers

        kind, fields = SHAPES[name]
        self.folder, self.architecture = folder, ARCHITECTURES.get(kind, f"{kind}ForCausalLM")
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**fields)
        made = getattr(transformers, self.architecture)(config)
        with torch.no_grad():  # biases and gains start at 0 and 1, which hides mistakes
            for parameter in made.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        made.save_pretrained(folder)
        self.written = json.loads((folder / "config.json").read_text())
        self.config = model_config(str(folder))
        self.params = load(str(folder), self.config)
        self.batch = random_batch(self.config)

    def model(self):
        return parity.their_model(str(self.folder), self.written)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Returns a function that makes each model once."""
    return cache(lambda name: Theirs(name, tmp_path_factory.mktemp("shapes") / "model"))


def assert_parity(ours, theirs, batch):
    found = parity.compare(ours, theirs, [batch])
    assert found.holds, str(found)
    assert found.agreement == 1.0
    assert found.difference <= 1e-4
    assert np.abs(theirs(batch)[0]).max() > 1


@pytest.mark.parametrize("name", SHAPES)
def test_logits_of_a_folder_of_transformers(theirs, name):
    made = theirs(name)
    ours = parity.our_logits(made.config, made.params)
    assert_parity(ours, parity.their_logits(made.model()), made.batch)


@pytest.mark.parametrize("name", SHAPES)
def test_an_export_has_the_same_type_tensors_and_logits(theirs, name, tmp_path):
    made = theirs(name)
    written = configs.to_config(made.config, 64)
    assert written["model_type"] == made.written["model_type"]
    assert written["architectures"] == [made.architecture]
    tensors = names.to_tensors(made.params, made.config, written["model_type"])
    originals = weights.read(str(made.folder))
    assert tensors.keys() == originals.keys()
    for tensor, array in tensors.items():
        np.testing.assert_array_equal(array, originals[tensor], tensor)
    (tmp_path / "config.json").write_text(json.dumps(written))
    weights.write(str(tmp_path), tensors, 10**9)
    assert configs.same_model(model_config(str(tmp_path)), made.config)
    again = parity.their_logits(parity.their_model(str(tmp_path), written))
    assert_parity(parity.our_logits(made.config, made.params), again, made.batch)


@pytest.mark.parametrize("name", slow_unless(FEW, SHAPES))
def test_greedy_ids_are_those_of_transformers(theirs, name):
    import torch

    made = theirs(name)
    # Longer than the windows, before and during decoding.
    prompts = [np.array([17, 300, 41]), np.arange(20, 36)]
    decoder = Decoder(made.config, Decoding(max_new_tokens=12))
    model = made.model()
    for prompt, found in zip(prompts, decoder(made.params, prompts), strict=True):
        if made.config.num_encoder_layers:
            ids = torch.from_numpy(prompt)[None]
            made_ids = model.generate(ids, max_new_tokens=12, do_sample=False)
            assert found.ids.tolist() == made_ids[0, 1:].tolist()
            continue
        ids = torch.from_numpy(np.concatenate([[0], prompt]))[None]
        # Our rows begin with the padding's id, which transformers would mask.
        mask = torch.ones_like(ids)
        made_ids = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
        assert found.ids.tolist() == made_ids[0, ids.shape[1] :].tolist()


# An epsilon above the rounding of gradients, which Adam would otherwise divide by themselves.
RATE, EPSILON = 1e-3, 1e-4


@pytest.mark.parametrize("name", slow_unless(FEW, SHAPES))
def test_two_steps_of_adamw_are_those_of_torch(theirs, name):
    import torch

    made = theirs(name)
    spec, batch = model_spec(made.config), dict(made.batch)
    batch["decoder_loss_weights"] = batch["decoder_target_tokens"] > 0
    ours, module = build_model(spec), made.model().train()
    settings = OptimizerConfig(
        name="adamw",
        learning_rate=RATE,
        beta1=0.9,
        beta2=0.95,
        epsilon=EPSILON,
        schedule="constant",
    )
    optimizer = optimizer_of(settings, spec)
    loss_config = LossConfig(z_loss=0.0, normalizer="num_real_target_tokens")

    def loss(params):
        logits = ours.apply({"params": params}, batch)
        return model_loss(ours).of_batch(logits, batch, loss_config)[0]

    @jax.jit
    def step(params, state):
        gradients = jax.grad(loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for each in module.modules():
        if isinstance(each, torch.nn.Embedding):
            each.padding_idx = None  # which would not learn
    adamw = torch.optim.AdamW(
        module.parameters(), lr=RATE, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.0
    )
    tensor = {name: torch.from_numpy(np.asarray(each, np.int64)) for name, each in batch.items()}
    targets = tensor["decoder_target_tokens"]
    params, state = made.params, optimizer.init(made.params)
    for _ in range(2):
        params, state = step(params, state)
        adamw.zero_grad()
        given = {"input_ids": tensor["decoder_input_tokens"]}
        if made.config.num_encoder_layers:
            sources = tensor["encoder_input_tokens"]
            given = {
                "input_ids": sources,
                "attention_mask": (sources > 0).long(),
                "decoder_input_ids": tensor["decoder_input_tokens"],
                "decoder_attention_mask": torch.ones_like(targets),
            }
        logits = module(**given).logits
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=0
        ).backward()
        adamw.step()
    kind = made.written["model_type"]
    mine, before = (names.to_tensors(tree, made.config, kind) for tree in (params, made.params))
    left = {name: each.detach().numpy() for name, each in module.state_dict().items()}
    error = {name: np.abs(array - left[name]).max() for name, array in mine.items()}
    assert max(error.values()) < 0.02 * RATE, error
    assert max(np.abs(array - before[name]).max() for name, array in mine.items()) > 1.8 * RATE


PRESETS = [
    name
    for name in MODEL_PRESETS
    if name.startswith(("gemma2_", "gemma3_", "qwen", "mistral_", "olmo2_", "t5gemma_"))
]


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_parameters_that_transformers_gives_them(name):
    import torch
    import transformers

    config = MODEL_PRESETS[name]
    written = configs.to_config(config, 64)
    made = transformers.AutoConfig.for_model(**written)
    with torch.device("meta"):
        model = getattr(transformers, written["architectures"][0])(made)
    assert sum(each.numel() for each in model.parameters()) == parameter_total(config)


def others(value):
    """Returns other values for a field of config.json."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value * 2, value / 2 if isinstance(value, float) else max(value // 2, 1), None]
    if isinstance(value, list):
        return [value[::-1]]
    if isinstance(value, dict):
        return [
            {**value, name: other} for name, each in value.items() for other in others(each)[:1]
        ]
    return [None] if isinstance(value, str) else [1, 0.5, True]


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_a_changed_field_changes_our_numbers_too_or_is_refused(theirs, name, tmp_path):
    import torch
    import transformers

    made, accepted, refused = theirs(name), set(), {}
    kind = getattr(transformers, f"{SHAPES[name][0]}Config")
    state = made.model().state_dict()
    for number, (field, value) in enumerate(
        (field, other) for field, each in made.written.items() for other in others(each)
    ):
        folder = tmp_path / str(number)
        try:
            config = kind(**{**made.written, field: value})
            changed = getattr(transformers, made.architecture)(config).eval()
            changed.load_state_dict(state)
            with torch.no_grad():
                wanted = parity.their_logits(changed)(made.batch)
        except Exception:  # transformers refuses it, or the sizes are others
            continue
        changed.save_pretrained(folder)
        text = (folder / "config.json").read_text()
        (folder / "config.json").write_text(json.dumps({**json.loads(text), field: value}))
        try:
            ours = model_config(str(folder))
            params = load(str(folder), ours)
        except UserError as error:
            refused[field] = str(error)
            continue
        accepted.add(field)
        found = parity.compare(parity.our_logits(ours, params), lambda _, w=wanted: w, [made.batch])
        assert found.difference <= 1e-4, (field, value, str(found))
    assert len(accepted) > 10
    assert refused
    assert all(field.partition("_")[0] in text for field, text in refused.items()), refused
