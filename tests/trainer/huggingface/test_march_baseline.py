"""MARCH's first baseline is transformers' T5: the same logits, and the same step of AdamW."""

from functools import cache

import jax
import numpy as np
import optax

from trainer.config import LossConfig
from trainer.config.optimizer import OptimizerConfig
from trainer.engine.loss import model_loss
from trainer.huggingface import names
from trainer.model.config import ModelConfig
from trainer.model.spec import model_spec
from trainer.model.transformer import build_model, init_params
from trainer.optim.optimizer import optimizer_of

RATE, DECAY = 1e-4, 0.1
# The shape of t5-base, narrower.
CONFIG = ModelConfig(
    family="t5_1_0",
    vocab_size=128,
    emb_dim=32,
    num_heads=4,
    head_dim=8,
    mlp_dim=64,
    num_encoder_layers=2,
    num_decoder_layers=2,
)
ROWS, SOURCES, TARGETS = 4, 20, 12


@cache
def model():
    """Returns our model and its initial parameters."""
    spec = model_spec(CONFIG)
    return spec, build_model(spec), init_params(spec, jax.random.key(0))


@cache
def batch():
    random = np.random.default_rng(0)
    lengths = random.integers(TARGETS // 2, TARGETS + 1, ROWS)

    def tokens(length, kept):
        drawn = random.integers(3, CONFIG.vocab_size, (ROWS, length))
        return np.where(np.arange(length) < kept[:, None], drawn, 0)

    targets = tokens(TARGETS, lengths)
    return {
        "encoder_input_tokens": tokens(SOURCES, lengths + 8),
        "decoder_input_tokens": np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
        "decoder_target_tokens": targets,
        "decoder_loss_weights": targets > 0,
    }


def their_model():
    """Returns transformers' T5 with our parameters, made from its own configuration."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    # The fields of t5-base's config.json, with our sizes; dropout off.
    config = T5Config(
        vocab_size=CONFIG.vocab_size,
        d_model=CONFIG.emb_dim,
        d_kv=CONFIG.head_dim,
        d_ff=CONFIG.mlp_dim,
        num_layers=CONFIG.num_encoder_layers,
        num_decoder_layers=CONFIG.num_decoder_layers,
        num_heads=CONFIG.num_heads,
        relative_attention_num_buckets=32,
        relative_attention_max_distance=128,
        dropout_rate=0.0,
        layer_norm_epsilon=1e-6,
        feed_forward_proj="relu",
        tie_word_embeddings=True,
        decoder_start_token_id=0,
    )
    theirs = T5ForConditionalGeneration(config).float().train()
    tensors = names.to_tensors(model()[2], CONFIG, "t5")
    state = {name: torch.from_numpy(np.array(array)) for name, array in tensors.items()}
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    # These are the shared table.
    tied = ("lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    assert set(missing) <= set(tied)
    assert not unexpected
    theirs.tie_weights()
    return theirs


def their_output(theirs):
    import torch

    tensor = {
        name: torch.from_numpy(np.asarray(array, np.int64)) for name, array in batch().items()
    }
    sources, targets = tensor["encoder_input_tokens"], tensor["decoder_target_tokens"]
    return theirs(
        input_ids=sources,
        attention_mask=(sources > 0).long(),
        decoder_input_ids=tensor["decoder_input_tokens"],
        labels=targets.masked_fill(targets == 0, -100),
    )


def test_logits_are_those_of_transformers():
    _, ours, params = model()
    mine = np.asarray(ours.apply({"params": params}, batch()))
    theirs = their_output(their_model()).logits.detach().numpy()
    tokens = batch()["decoder_target_tokens"] > 0
    assert np.abs(theirs[tokens]).max() > 1
    np.testing.assert_allclose(mine[tokens], theirs[tokens], rtol=0, atol=1e-5)


def test_a_step_of_adamw_is_that_of_torch():
    """The largest difference of two parameters after it is at most 1e-6, a hundredth of the step.

    As transformers' Trainer does, torch's weight decay spares norms and what is called a bias.
    """
    import torch

    spec, ours, params = model()
    optimizer = optimizer_of(
        OptimizerConfig(
            name="adamw",
            learning_rate=RATE,
            schedule="constant",
            beta1=0.9,
            beta2=0.95,
            epsilon=1e-8,
            weight_decay=DECAY,
            no_weight_decay=("_norm/scale$", "rel_embedding$"),
        ),
        spec,
    )
    config = LossConfig(z_loss=0.0, normalizer="num_real_target_tokens")

    def loss(params):
        output = ours.apply({"params": params}, batch())
        return model_loss(ours).of_batch(output, batch(), config)[0]

    @jax.jit
    def step(params):
        value, gradients = jax.value_and_grad(loss)(params)
        updates, _ = optimizer.update(gradients, optimizer.init(params), params)
        return value, optax.apply_updates(params, updates)

    value, stepped = step(params)
    theirs = their_model()
    sparing: dict[bool, list] = {True: [], False: []}
    for name, parameter in theirs.named_parameters():
        sparing["norm" in name or "bias" in name].append(parameter)
    groups = [{"params": sparing[True], "weight_decay": 0.0}, {"params": sparing[False]}]
    torch_optimizer = torch.optim.AdamW(
        groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=DECAY
    )
    output = their_output(theirs)
    output.loss.backward()
    torch_optimizer.step()
    np.testing.assert_allclose(float(value), float(output.loss.detach()), rtol=0, atol=1e-6)
    mine = names.to_tensors(stepped, CONFIG, "t5")
    before = names.to_tensors(params, CONFIG, "t5")
    state = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    moved = apart = 0.0
    for name, array in mine.items():
        moved = max(moved, float(np.abs(array - before[name]).max()))
        apart = max(apart, float(np.abs(array - state[name]).max()))
    assert moved > 0.9 * RATE
    assert apart <= 1e-6
