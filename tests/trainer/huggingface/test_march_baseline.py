"""MARCH's first baseline is transformers' T5: the same logits, and the same step of AdamW."""

import jax
import numpy as np
import optax
import pytest

from tests.trainer.huggingface.conftest import random_batch
from trainer.config import LossConfig
from trainer.config.optimizer import OptimizerConfig
from trainer.engine.loss import model_loss
from trainer.huggingface import names, parity
from trainer.model.spec import model_spec
from trainer.model.transformer import build_model
from trainer.optim.optimizer import optimizer_of

pytestmark = pytest.mark.torch

RATE, DECAY = 1e-4, 0.1


def test_logits_and_a_step_of_adamw_are_those_of_torch(exported):
    """The largest difference of two parameters after it is at most 1e-6, a hundredth of the step.

    As transformers' Trainer does, torch's weight decay spares norms and what is called a bias.
    """
    import torch

    made = exported("t5_1_0")
    spec, batch = model_spec(made.config), random_batch(made.config)
    batch["decoder_loss_weights"] = batch["decoder_target_tokens"] > 0
    ours, theirs = build_model(spec), parity.their_model(str(made.folder), made.written).train()
    for module in theirs.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    rates = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": DECAY}
    spared = {"no_weight_decay": ("_norm/scale$", "rel_embedding$"), "schedule": "constant"}
    settings = OptimizerConfig(name="adamw", learning_rate=RATE, **rates, **spared)
    optimizer = optimizer_of(settings, spec)
    config = LossConfig(z_loss=0.0, normalizer="num_real_target_tokens")

    def loss(params):
        logits = ours.apply({"params": params}, batch)
        return model_loss(ours).of_batch(logits, batch, config)[0], logits

    @jax.jit
    def step(params):
        found, gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, _ = optimizer.update(gradients, optimizer.init(params), params)
        return *found, optax.apply_updates(params, updates)

    value, logits, stepped = step(made.params)
    groups = {True: [], False: []}
    for name, parameter in theirs.named_parameters():
        groups["norm" in name or "bias" in name].append(parameter)
    sparing = [{"params": groups[True], "weight_decay": 0.0}, {"params": groups[False]}]
    adamw = torch.optim.AdamW(sparing, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=DECAY)
    tensor = {name: torch.from_numpy(np.asarray(each, np.int64)) for name, each in batch.items()}
    sources, targets = tensor["encoder_input_tokens"], tensor["decoder_target_tokens"]
    output = theirs(
        input_ids=sources,
        attention_mask=(sources > 0).long(),
        decoder_input_ids=tensor["decoder_input_tokens"],
        labels=targets.masked_fill(targets == 0, -100),
    )
    output.loss.backward()
    adamw.step()
    real = batch["decoder_target_tokens"] > 0
    np.testing.assert_allclose(logits[real], output.logits.detach().numpy()[real], atol=5e-5)
    np.testing.assert_allclose(float(value), float(output.loss.detach()), rtol=1e-6)
    mine, before = (names.to_tensors(tree, made.config, "t5") for tree in (stepped, made.params))
    state = {name: each.numpy() for name, each in theirs.state_dict().items()}
    assert max(np.abs(array - before[name]).max() for name, array in mine.items()) > 0.9 * RATE
    assert max(np.abs(array - state[name]).max() for name, array in mine.items()) <= 1e-6
