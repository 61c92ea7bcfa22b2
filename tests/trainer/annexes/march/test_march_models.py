"""MARCH's variants of T5, compared with the whole model written in NumPy in float64."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tasks.terminal.command_line import UserError
from tests.support import runs
from tests.trainer.model.conftest import TinyModel, unboxed
from trainer.annexes.march.layers import MixedMlp, SummedHeads, TokenDropping, ValuesRelu
from trainer.config import stored_model
from trainer.config.presets import MODEL_PRESETS
from trainer.model.attention import DotProductAttention
from trainer.model.dense import Shared
from trainer.model.masks import Rows
from trainer.model.mixers import View
from trainer.model.parametrisation import StandardParametrisation
from trainer.model.paths import named
from trainer.model.positions import Positions, T5RelativePosition

pytestmark = pytest.mark.processes

V, S, L = 40, 8, 6
# Both halves of a stack differ, and what they leave.
VARIANTS = {
    "plain": {},
    "no_ff": {"feed_forward": "none"},
    "mixed": {"feed_forward": "mixed"},
    "mixed_sum": {"feed_forward": "mixed:mean=false"},
    "values_relu": {"mixer": "values_relu", "feed_forward": "none"},
    "first_ff": {"mixer": "values_relu:kernels=1", "feed_forward": "none"},
    "tp_weights": {"mixer": "role_attention"},
    "tp_embeddings": {"mixer": "role_attention:vectors=5"},
    "summed": {"mixer": "summed_heads"},
    "fcabs": {"stack_parts": "token_dropping:count=2"},
    "fcabs_nothing": {"stack_parts": "token_dropping:count=5"},
    "fcabs_rotary": {"stack_parts": "token_dropping:count=2", "position": "rotary:cross=true"},
    "fcabs_per_layer": {"stack_parts": "token_dropping:count=2", "position": "relative_per_layer"},
    "merged": {"cross_attention": "merged"},
    "merged_rotary": {"cross_attention": "merged", "position": "rotary:cross=true"},
    "merged_unrotated": {"cross_attention": "merged", "position": "rotary"},
    "merged_per_layer": {"cross_attention": "merged", "position": "relative_per_layer"},
    "merged_fcabs": {"cross_attention": "merged", "stack_parts": "token_dropping:count=2"},
    "encoder_keys": {"cross_attention": "encoder_keys"},
    "encoder_keys_rotary": {
        "cross_attention": "encoder_keys",
        "position": "rotary:cross=true",
        "num_kv_heads": 1,
    },
    "layerwise": {"cross_attention": "layerwise"},
    "database": {"stack_parts": "database_entries:count=5"},
    "halves": {"stack_parts": "halves:first=2,second=0.5"},
    "halves_constant": {"stack_parts": "halves:first=2,second=0.5,constant=true"},
    "no_residual": {"norm_placement": "pre_without_mixer_residual"},
}
# Variants that repeat others with other positions.
SLOW = ("plain", "mixed_sum", "summed", "tp_weights", "halves_constant", "merged_fcabs")
SLOW += ("fcabs_nothing", "fcabs_rotary", "fcabs_per_layer")
SLOW += ("merged_rotary", "merged_per_layer", "encoder_keys_rotary")
NAMES = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in VARIANTS]


def dropped_by(config):
    chosen = config.stack_choices.get("token_dropping")
    return chosen.options.count if chosen else 0


SEGMENTS = {
    "encoder": np.array([[1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1, 0, 0]]),
    "decoder": np.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 0]]),
}


def packed_batch():
    """Returns rows in which every position of both sides has an id of its own."""
    ids = np.random.default_rng(3).permutation(np.arange(1, V))
    source = np.stack([ids[:S], ids[S : 2 * S]])
    targets = np.stack([ids[2 * S : 2 * S + L], ids[2 * S + L : 2 * S + 2 * L]])
    return {
        "encoder_input_tokens": np.where(SEGMENTS["encoder"] > 0, source, 0),
        "decoder_input_tokens": targets,
        "decoder_target_tokens": (SEGMENTS["decoder"] > 0).astype(int),
        **{f"{name}_segment_ids": segments for name, segments in SEGMENTS.items()},
    }


class Model(TinyModel):
    """A T5 of two layers a stack, its parameters a little smaller than those of other tiny models.

    `run` returns ((a mix of the logits of a position, all logits), gradients).
    """

    def __init__(self, changes):
        layers = {"num_encoder_layers": 2, "num_decoder_layers": 2}
        super().__init__("t5_1_0", **layers | changes)
        self.params = jax.tree.map(lambda leaf: 0.75 * leaf, self.params)

        def mix(params, batch, at):
            logits_BLV = self.model.apply({"params": params}, batch)
            mix_V = jax.random.normal(jax.random.key(1), (V,))
            return logits_BLV[0, at] @ mix_V, logits_BLV

        self.run = jax.jit(jax.value_and_grad(mix, has_aux=True))


model = cache(lambda name: Model(VARIANTS[name]))


# ---- The same models in NumPy. ------------------------------------------------------------------


def kernel(node, name):
    return np.asarray(node[name]["kernel"], np.float64)


def norm(x, node):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * np.asarray(node["scale"])


def relu(x):
    return np.maximum(x, 0)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rotated(x, places):
    """Rotates pairs (i, i + K / 2) of [heads, length, K] by place * 10000^(-2 i / K)."""
    width = x.shape[-1]
    z = x[..., : width // 2] + 1j * x[..., width // 2 :]
    z = z * np.exp(1j * places[:, None] * 10_000.0 ** (-2 * np.arange(width // 2) / width))
    return np.concatenate([z.real, z.imag], -1)


class Side:
    """One row on one side: segments, places within examples and in the row, biases."""

    def __init__(self, segments, both_ways):
        self.segments, self.both_ways = segments, both_ways
        self.index = np.arange(len(segments))
        starts = [np.flatnonzero(segments == each)[0] for each in segments]
        self.places = self.index - np.array(starts)

    def cut(self, kept):
        other = Side(self.segments, self.both_ways)
        for name in ("segments", "index", "places"):
            setattr(other, name, getattr(self, name)[kept])
        return other


class Reference:
    def __init__(self, model):
        self.config, self.params = model.config, model.params
        self.rotary = self.config.position_scheme == "rotary"
        self.part = self.config.part("mixer")

    def split(self, joined, width):
        return joined.reshape(len(joined), -1, width).swapaxes(0, 1)

    def own_logits(self, stack, layer, side, heads):
        """Returns the bias and the mask of positions of one side by one another."""
        seen = (side.segments[:, None] == side.segments) & (side.segments > 0)
        if not side.both_ways:
            seen &= side.index <= side.index[:, None]
        if self.rotary:
            return 0, seen
        node = self.params[stack]
        node = node[f"layers_{layer}"] if "relpos_bias" in node[f"layers_{layer}"] else node
        tables = [value for name, value in node.items() if name.startswith("relpos_bias")]
        (table,) = (each["rel_embedding"] for each in tables if len(each["rel_embedding"]) == heads)
        distance = side.index - side.index[:, None]
        buckets = T5RelativePosition(side.both_ways).bucket(distance)
        return np.asarray(table, np.float64)[:, buckets], seen

    def finish(self, node, weights, v, x):
        heads, groups = len(weights), len(v)
        mixed = np.stack([weights[h] @ v[h * groups // heads] for h in range(heads)], 1)
        if self.part.name == "summed_heads" and "mixer_is" in node:
            pairs = [mixed[:, i] + mixed[:, i + 1] for i in range(0, heads, 2)]
            mixed = np.stack(pairs, 1)
        joined = mixed.reshape(len(mixed), -1)
        if "mixed" in node and "vectors" in node["mixed"]:
            vectors = np.asarray(node["mixed"]["vectors"], np.float64)
            vectors = vectors / np.sqrt((vectors**2).sum(-1, keepdims=True))
            joined = joined * (softmax(joined @ kernel(node["mixed"], "role")) @ vectors)
        elif "mixed" in node:
            joined = joined * (x @ kernel(node["mixed"], "role"))
        return joined @ kernel(node, "out")

    def attend(self, node, x, places, source, source_places, bias, seen, heads):
        """Returns output, weights, keys and values of one attention; a source may be both."""
        q = self.split(x @ kernel(node, "query"), kernel(node, "query").shape[1] // heads)
        if isinstance(source, tuple):
            k, v = source
        else:
            v = source @ kernel(node, "value")
            if "values" in node:
                v = relu(v @ kernel(node["values"], "wi"))
                v = v @ kernel(node["values"], "wo") if "wo" in node["values"] else v
            k, v = (self.split(each, q.shape[-1]) for each in (source @ kernel(node, "key"), v))
        turned = k
        if places is not None:
            q, turned = rotated(q, places), rotated(k, source_places)
        logits = np.stack([q[h] @ turned[h * len(k) // heads].T for h in range(heads)]) + bias
        weights = softmax(np.where(seen, logits, -1e10))
        return self.finish(node, weights, v, x), weights, k, v

    def layer(self, stack, number, x, side, memory):
        node = self.params[stack][f"layers_{number}"]
        name = "attention" if stack == "encoder" else "self_attention"
        heads = (4, 1)[number] if "halves" in self.config.stack_choices else 2
        bias, seen = self.own_logits(stack, number, side, heads)
        y = norm(x, node[f"pre_{name}_layer_norm"])
        places = side.places if self.rotary else None
        source, source_places = y, places
        if memory is not None and self.config.cross_attention == "merged":
            states, there, _ = memory
            source = np.concatenate([states, y])
            across = (side.segments[:, None] == there.segments) & (there.segments > 0)
            seen = np.concatenate([across, seen], 1)
            if self.rotary:
                turned = self.config.part("position").options.cross
                source_places = np.concatenate([there.places * turned, places])
            else:
                bias = np.concatenate([np.zeros((heads, len(y), len(states))), bias], 2)
        own = {**node[name], "mixer_is": 1}
        a, weights, k, v = self.attend(own, y, places, source, source_places, bias, seen, heads)
        x = a if "without" in self.config.value("norm_placement") else x + a
        drop = dropped_by(self.config) if stack == "encoder" else 0
        if drop and 2 * drop <= len(x):
            worth = weights[:, side.segments > 0].sum((0, 1))
            worth = np.where(side.segments > 0, worth, -1)
            kept = np.sort(np.argsort(-worth, kind="stable")[: len(x) - drop])
            x, side = x[kept], side.cut(kept)
        if memory is not None and self.config.cross_attention != "merged":
            states, there, layers = memory
            source = {"attention": states}.get(self.config.cross_attention, layers[number])
            across = (side.segments[:, None] == there.segments) & (there.segments > 0)
            y = norm(x, node["pre_cross_attention_layer_norm"])
            own = node["encoder_decoder_attention"]
            far = there.places if self.rotary else None
            x = x + self.attend(own, y, places, source, far, 0, across, heads)[0]
        if "database" in self.params[stack]:
            entries = self.params[stack]["database"]
            source = tuple(np.asarray(entries[each], np.float64)[None] for each in ("key", "value"))
            y = norm(x, node["pre_database_layer_norm"])
            own = node["database_attention"]
            x = x + self.attend(own, y, None, source, None, 0, True, heads)[0]
        if "mlp" in node:
            y, mlp = norm(x, node["pre_mlp_layer_norm"]), node["mlp"]
            if "wi" in mlp:
                hidden = relu(y @ kernel(mlp, "wi"))
            else:
                hidden = 1 / (1 + np.exp(-(y @ kernel(mlp, "wi_0")))) + relu(
                    y @ kernel(mlp, "wi_1")
                )
                hidden = hidden / 2 if self.config.part("feed_forward").options.mean else hidden
            x = x + hidden @ kernel(mlp, "wo")
        left = {"layerwise": x, "encoder_keys": (k, v)}.get(self.config.cross_attention)
        return x, side, left

    def row(self, batch, row):
        table = np.asarray(self.params["token_embedder"]["embedding"], np.float64)
        memory = None
        for stack, both_ways in (("encoder", True), ("decoder", False)):
            side = Side(np.asarray(batch[f"{stack}_segment_ids"][row]), both_ways)
            x, layers = table[batch[f"{stack}_input_tokens"][row]], []
            for number in range(2):
                x, side, left = self.layer(stack, number, x, side, memory)
                layers.append(left)
            if f"{stack}_norm" in self.params[stack]:
                last = self.params[stack][f"{stack}_norm"]
                x = norm(x, last)
                if self.config.cross_attention == "layerwise":
                    layers = [norm(each, last) for each in layers]
            memory = (x, side, layers)
        return x @ kernel(self.params["decoder"], "logits_dense")


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_formulas(name):
    batch, it = packed_batch(), model(name)
    logits, reference = it.run(it.params, batch, 0)[0][1], Reference(it)
    for row in range(2):
        tokens = SEGMENTS["decoder"][row] > 0
        expected = reference.row(batch, row)[tokens]
        assert np.abs(expected).max() > 0.3
        size = np.abs(expected).max()
        np.testing.assert_allclose(logits[row][tokens] / size, expected / size, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_decoder_sees_what_it_should_and_every_parameter_learns(name):
    batch, it = packed_batch(), model(name)
    drops = dropped_by(it.config) == 2
    learns = jax.tree.map(lambda leaf: np.zeros(leaf.shape, bool), it.params)
    for at, segment in enumerate(SEGMENTS["decoder"][0][:5]):
        gradients = it.run(it.params, batch, at)[1]
        learns = jax.tree.map(lambda was, now: was | (np.asarray(now) != 0), learns, gradients)
        seen = np.any(np.asarray(gradients["token_embedder"]["embedding"]) != 0, axis=1)
        for key, other in enumerate(SEGMENTS["decoder"][0]):
            token = batch["decoder_input_tokens"][0, key]
            assert seen[token] == (segment == other and key <= at), (at, key)
        for key, other in enumerate(SEGMENTS["encoder"][0]):
            token = batch["encoder_input_tokens"][0, key]
            # What is dropped after a mixer has been seen by others in it.
            assert seen[token] == (segment == other) or other == 0 or drops, (at, key)
            assert not seen[token] or segment == other
    for path, leaf in named(learns).items():
        # Nothing reads what an encoder's last layer makes of its keys and values.
        dead = path.startswith("encoder/layers_1") and not path.endswith(READ)
        assert leaf.any() != (dead and "encoder_keys" in name), path


READ = ("key/kernel", "value/kernel", "pre_attention_layer_norm/scale")


@pytest.mark.parametrize(
    ("drop", "padding", "lengths"), [(2, 0, [6, 4]), (2, 3, [6, 4]), (4, 5, [4, 4]), (5, 0, [8, 8])]
)
def test_dropped_are_those_that_receive_least(drop, padding, lengths):
    dropping = TokenDropping(drop)
    assert [dropping.length_after(S), dropping.length_after(dropping.length_after(S))] == lengths
    random = np.random.default_rng(1)
    weights = random.dirichlet(np.ones(S), (3, 2, S)).astype(np.float32)
    tokens = np.arange(S) < np.array([[S - padding]] * 3)
    kept = np.asarray(dropping.most_watched(jnp.asarray(weights), jnp.asarray(tokens)))
    assert kept.shape == (3, lengths[0])
    for row in range(3):
        received = weights[row].astype(np.float64)[:, tokens[row]].sum((0, 1))
        dropped = sorted(set(range(S)) - set(kept[row].tolist()))
        assert list(kept[row]) == sorted(kept[row])
        if lengths[0] == S:
            assert not dropped
        else:
            order = sorted(range(S), key=lambda each: (tokens[row, each], received[each]))
            if padding >= drop:
                assert all(not tokens[row, each] for each in dropped)
            else:
                assert dropped == sorted(order[:drop])


def test_an_encoder_with_dropping_returns_what_is_left():
    it = model("fcabs")
    states = it.apply(packed_batch(), method="encode")
    assert states.shape == (2, S - 2 * 2, 12)


SHARED = Shared(64, 40, "float32", 0.0, StandardParametrisation())
DROPS = Shared(64, 40, "float32", 0.25, StandardParametrisation())


def test_dropout_of_sigmoids_spares_the_other_arm():
    module = MixedMlp(64, sigmoid_dropout=0.25).build(SHARED, "mlp")
    x = np.random.default_rng(0).normal(size=(3, 5, 64)).astype(np.float32)
    params = unboxed(module.init(jax.random.key(0), x, None, True)["params"])
    params["wo"]["kernel"] = jnp.eye(64)
    rngs = {"dropout": jax.random.key(1)}
    output = module.apply({"params": params}, x, None, False, rngs=rngs)
    sigmoid, relu = jax.nn.sigmoid(x @ params["wi_0"]["kernel"]), x @ params["wi_1"]["kernel"]
    kept = (2 * output - jnp.maximum(relu, 0)) / sigmoid
    dropped = np.isclose(kept, 0, atol=1e-4)
    np.testing.assert_allclose(np.where(dropped, 4 / 3, kept), 4 / 3, rtol=1e-4)
    assert 0.1 < dropped.mean() < 0.4


def test_dropout_of_values_is_before_one_square_product():
    module = ValuesRelu(None).build(DROPS, "unboxed")
    params = {"wi": {"kernel": jnp.eye(64)}}
    ones, rngs = jnp.ones((3, 5, 64)), {"dropout": jax.random.key(1)}
    output = np.asarray(module.apply({"params": params}, ones, False, rngs=rngs))
    assert set(np.unique(output.round(4)).tolist()) == {0.0, np.float32(1.3333).item()}


def test_values_of_summed_heads_start_narrower():
    rows = Rows(jnp.ones((1, 2), int))
    view, x = View(jnp.ones((1, 1, 1), bool), Positions(), rows, rows), jnp.ones((1, 2, 64))
    module = DotProductAttention(8, 16, mixed_part=SummedHeads(4)).build(SHARED, "it")
    params = unboxed(module.init(jax.random.key(0), x, x, view, True)["params"])
    assert params["out"]["kernel"].shape == (8 // 4 * 16, 64)
    for name, expected in (("key", 64**-0.5), ("value", (64 * 4) ** -0.5)):
        np.testing.assert_allclose(np.std(params[name]["kernel"]), expected, rtol=0.05)


def test_dropping_that_never_happens_is_refused(text_cache):
    dropping = "--model.stack_parts=token_dropping:count="
    run = runs.run_of(text_cache, f"{dropping}32", lengths=(64, 20))
    assert dropped_by(run.config.model) == 32
    with pytest.raises(UserError, match="count=33 has no effect on rows of 64 inputs"):
        runs.run_of(text_cache, f"{dropping}33", lengths=(64, 20))


def test_fields_of_earlier_versions_are_read():
    stored = dataclasses.asdict(MODEL_PRESETS["t5_1_0_tiny"])
    old = {"database_entries": 0, "token_dropping": 0, "head_scaling": "none"}
    assert stored_model({**stored, **old}, "x").stack_parts == "none"
    old = {"database_entries": 5, "token_dropping": 8, "head_scaling": "halves:first=2"}
    expected = "database_entries:count=5+token_dropping+halves:first=2"
    assert stored_model({**stored, **old}, "x").explicit().stack_parts == expected
