"""Trains a small language model in Flax NNX on batches of a cache; prints the loss of each update.

python examples/trainers/flax_nnx.py TASK CACHE_DIR [STEPS]
"""

import itertools
import sys

import jax
import optax
from flax import nnx

import palimpsest


class Model(nnx.Module):
    """One layer of attention between an embedding and its transpose."""

    def __init__(self, size, rngs):
        self.embed = nnx.Embed(size, 64, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 64, decode=False, rngs=rngs)
        self.norm = nnx.RMSNorm(64, rngs=rngs)

    def __call__(self, batch):
        x_BLD = self.embed(batch["decoder_input_tokens"])
        mask = nnx.make_causal_mask(batch["decoder_input_tokens"])
        return self.embed.attend(self.norm(x_BLD + self.attention(x_BLD, mask=mask)))


@nnx.jit
def update(model, optimizer, batch):
    def loss_of(model):
        losses = optax.softmax_cross_entropy_with_integer_labels(
            model(batch), batch["decoder_target_tokens"]
        )
        return losses.mean(where=batch["decoder_loss_weights"] > 0)

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def main(task, cache_dir, steps="10"):
    batches = palimpsest.batches(task, cache_dir=cache_dir, batch_size=8, lengths={"targets": 64})
    model = Model(batches.config["model"]["vocab_size"], nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    for batch in itertools.islice(batches, int(steps)):
        loss = update(model, optimizer, jax.device_put(batch))
        print(batches.state, f"{loss:.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
