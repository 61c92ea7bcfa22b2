"""Models of transformers: the same numbers, both ways."""

import json
import math

import jax
import numpy as np
import optax
import pytest

from tasks.terminal.command_line import UserError
from tasks.vocabulary import SpecialIds
from tests.support.cases import entries, rows
from tests.support.parameters import slow_unless
from tests.support.totals import parameter_total
from tests.trainer.huggingface.random_shapes import ARCHITECTURES, SHAPES
from trainer.config import LossConfig
from trainer.config.optimizer import OptimizerConfig
from trainer.config.presets import MODEL_PRESETS
from trainer.data.features import target_side
from trainer.decoding.decoder import Decoder, Decoding
from trainer.engine.loss import decoder_loss, model_loss
from trainer.huggingface import configs, load, model_config, parity, weights
from trainer.huggingface.config_json import from_config
from trainer.huggingface.kinds import KINDS
from trainer.model.spec import model_spec
from trainer.model.transformer import build_model
from trainer.optim.optimizer import optimizer_of

pytestmark = pytest.mark.torch

# These have the parts of the others.
FEW = [*rows("FEW_SHAPES")]
# Those that generate text.
GENERATING = [
    name for name, (kind, _) in SHAPES.items() if "MaskedLM" not in ARCHITECTURES.get(kind, "")
]


def assert_parity(ours, theirs, batch):
    found = parity.compare(ours, theirs, [batch])
    assert found.holds, str(found)
    assert found.agreement == 1.0
    assert found.difference <= 1e-4
    assert np.abs(theirs(batch)[0]).max() > 1


# Other shapes have their parts.
REPEATED = ("longt5", "longt5, scaled", "switch, everywhere")
MOST = [name for name in SHAPES if name not in REPEATED]


@pytest.mark.parametrize("name", slow_unless(MOST, SHAPES))
def test_logits_of_a_folder_of_transformers(theirs, name):
    made = theirs(name)
    ours = parity.our_logits(made.config, made.params)
    assert_parity(ours, parity.their_logits(made.model()), made.batch)


# What a configuration does not say is that it is mT5's.
@pytest.mark.parametrize("name", slow_unless(MOST, [each for each in SHAPES if each != "mt5"]))
def test_an_export_has_the_same_type_tensors_and_logits(theirs, name, tmp_path):
    made = theirs(name)
    written = configs.to_config(made.config, 64, special=SpecialIds(pad=made.pad))
    assert written["model_type"] == made.written["model_type"]
    assert written["architectures"] == [made.architecture]
    tensors = made.tensors(made.params)
    originals, kept = made.read(weights.read(str(made.folder))), made.read(tensors)
    assert kept.keys() == originals.keys()
    for tensor, array in kept.items():
        np.testing.assert_array_equal(array, originals[tensor], tensor)
    (tmp_path / "config.json").write_text(json.dumps(written))
    weights.write(str(tmp_path), tensors, 10**9)
    assert configs.same_model(model_config(str(tmp_path)), made.config)
    again = parity.their_logits(parity.their_model(str(tmp_path), written))
    assert_parity(parity.our_logits(made.config, made.params), again, made.batch)


@pytest.mark.parametrize("name", slow_unless(FEW, GENERATING))
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
RATE, EPSILON, DECAY = 1e-3, 1e-4, 0.1


# Without tied logits, RoBERTa has two biases for one.
LEARNING = [name for name in SHAPES if name != "roberta, untied"]


@pytest.mark.parametrize("name", slow_unless(("t5", *FEW, *rows("LEARNING_SHAPES")), LEARNING))
def test_two_steps_of_adamw_are_those_of_torch(theirs, name):
    import torch

    made = theirs(name)
    spec, batch = model_spec(made.config), dict(made.batch)
    side = target_side(batch)
    targets = batch.setdefault(f"{side}_target_tokens", batch.get("encoder_input_tokens"))
    batch[f"{side}_loss_weights"] = targets > 0
    ours, module = build_model(spec), made.model().train()
    rates = {"beta1": 0.9, "beta2": 0.95, "epsilon": EPSILON, "weight_decay": DECAY}
    spared = {"no_weight_decay": ("scale$", "bias$", "rel_embedding$"), "schedule": "constant"}
    settings = OptimizerConfig(name="adamw", learning_rate=RATE, **rates, **spared)
    optimizer = optimizer_of(settings, spec)
    loss_config = LossConfig(z_loss=0.0, normalizer="num_real_target_tokens")

    def loss(params):
        logits = ours.apply({"params": params}, batch)
        of_batch = (
            decoder_loss
            if getattr(ours.spec, "sown", None) is not None
            else model_loss(ours).of_batch
        )
        return of_batch(logits, batch, loss_config)[0]

    @jax.jit
    def step(params, state):
        gradients = jax.grad(loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for each in module.modules():
        if isinstance(each, torch.nn.Embedding):
            each.padding_idx = None  # which would not learn
    # As in transformers' Trainer, weight decay spares norms and what is called a bias.
    groups = {True: [], False: []}
    for each, parameter in module.named_parameters():
        groups["norm" in each.lower() or "bias" in each].append(parameter)
    sparing = [{"params": groups[True], "weight_decay": 0.0}, {"params": groups[False]}]
    adamw = torch.optim.AdamW(sparing, lr=RATE, betas=(0.9, 0.95), eps=EPSILON, weight_decay=DECAY)
    tensor = {name: torch.from_numpy(np.asarray(each, np.int64)) for name, each in batch.items()}
    inputs, targets = (tensor[f"{side}_{which}_tokens"] for which in ("input", "target"))
    # A decoder's rows begin with the padding's id.
    mask = inputs > 0 if side == "encoder" else torch.ones_like(inputs)
    params, state = made.params, optimizer.init(made.params)
    for _ in range(2):
        params, state = step(params, state)
        adamw.zero_grad()
        given = {"input_ids": inputs, "attention_mask": mask}
        if made.config.has_both_stacks:
            sources = tensor["encoder_input_tokens"]
            given = {f"decoder_{key}": each for key, each in given.items()}
            given |= {"input_ids": sources, "attention_mask": (sources > 0).long()}
        logits = module(**given).logits
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=0
        ).backward()
        adamw.step()
    mine, before = (made.read(made.tensors(tree)) for tree in (params, made.params))
    left = {
        # Folders of T5Gemma 2 have other names than its class.
        name.replace("encoder.text_model.", "encoder."): each.detach().numpy()
        for name, each in module.state_dict().items()
    }
    error = {name: np.abs(array - left[name]).max() for name, array in mine.items()}
    assert max(error.values()) < 0.02 * RATE, error
    assert max(np.abs(array - before[name]).max() for name, array in mine.items()) > 1.8 * RATE


# Source: config.json of google/gemma-2-2b, Qwen/Qwen2.5-0.5B, FacebookAI/roberta-base and
# answerdotai/ModernBERT-base on the Hub.
ON_THE_HUB = {**entries("CONFIGS_ON_THE_HUB")}


@pytest.mark.parametrize("name", ON_THE_HUB)
def test_config_json_on_the_hub_is_the_preset(name):
    found = from_config(ON_THE_HUB[name], "config.json")
    assert configs.different_fields(found, MODEL_PRESETS[name]) == []
    assert configs.same_model(found, MODEL_PRESETS[name])


PRESETS = [name for name in MODEL_PRESETS if name.startswith(tuple(rows("BEGINNINGS_OF_PRESETS")))]


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
    total, emb = parameter_total(config), config.emb_dim
    total += sum(map(math.prod, KINDS[written["model_type"]].blank(config).values()))
    if not config.has_decoder:  # whose head for the order of segments stays here
        total += emb * (name.startswith("roberta")) - (emb * emb + 3 * emb + 2)
    if name.startswith("longt5_"):  # transformers unties logits only if a folder has their kernel
        total -= emb * config.vocab_size
    assert sum(each.numel() for each in model.parameters()) == total


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


# GPT-2 with logits of its own is refused by its tensor, not by the field.
@pytest.mark.slow
@pytest.mark.parametrize("name", [each for each in SHAPES if each != "gpt2"])
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
