"""Layouts are their definitions block by block, and groups and tables visit what they visit."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.terminal.command_line import UserError
from trainer.annexes.sparse_patterns.groups import groups_of
from trainer.annexes.sparse_patterns.sparse_layouts import BigBird, Dilated, Fixed, Local, Variable
from trainer.config.presets import model_preset
from trainer.engine.cost import flops_per_step
from trainer.huggingface.formats import KINDS
from trainer.huggingface.names import places
from trainer.model.sparsity import visited, visited_pairs

# Pattern, and whether block i of queries sees block j of keys, of N blocks in head h.
DEFINITIONS = {
    "local": (Local(window=5), lambda i, j, n, h: abs(i - j) <= 2),
    "longformer": (
        Local(window=1, global_blocks="0+3"),
        lambda i, j, n, h: i == j or i in (0, 3) or j in (0, 3),
    ),
    "dilated": (Dilated(window=5, dilation=3), lambda i, j, n, h: abs(i - j) in (0, 3, 6)),
    # DeepSpeed's: of a short last window the block at the same place or, if that is not there, the
    # last one.
    "fixed": (
        Fixed(window=4, head_patterns=3),
        lambda i, j, n, h: i // 4 == j // 4 or j == min(j // 4 * 4 + 3 - h % 3, n - 1),
    ),
    "fixed, horizontal": (
        Fixed(window=4, global_blocks=2, horizontal=True),
        lambda i, j, n, h: (
            i // 4 == j // 4
            or any(min(k // 4 * 4 + 2, n - 2) <= k < min(k // 4 * 4 + 4, n) for k in (i, j))
        ),
    ),
    "variable": (
        Variable(windows="1+3", global_blocks="2", horizontal=False),
        lambda i, j, n, h: (i + 2) // 3 == (j + 2) // 3 or j == 2,
    ),
}


@pytest.mark.parametrize("blocks", [1, 7, 12])
@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_layout_is_its_definition(name, blocks):
    pattern, sees = DEFINITIONS[name]
    layout = pattern.layout(4, blocks, causal=False)
    for head in range(len(layout)):
        expected = [[sees(i, j, blocks, head) for j in range(blocks)] for i in range(blocks)]
        np.testing.assert_array_equal(layout[head], expected)
    assert len(layout) == (4 if name == "fixed" else 1)
    causal = visited(pattern, 4, blocks * pattern.block, causal=True)
    np.testing.assert_array_equal(causal, np.tril(layout)[: len(causal)])


@pytest.mark.parametrize("causal", [False, True])
def test_random_blocks_come_from_the_seed_and_are_others(causal):
    pattern = BigBird(window=1, random_blocks=2, per_head=True)
    without = replace(pattern, random_blocks=0, per_head=False).layout(4, 12, causal)[0]
    layout = pattern.layout(4, 12, causal)
    assert layout.shape == (4, 12, 12)
    for head in layout:
        assert (head >= without).all()
        drawn = (head & ~without).sum(axis=1)
        # The first rows of a decoder have nothing else before them.
        left = (~without & np.tri(12, dtype=bool) if causal else ~without).sum(axis=1)
        np.testing.assert_array_equal(drawn, np.minimum(left, 2))
        assert not (causal and (head & ~without & ~np.tri(12, dtype=bool)).any())
    assert len({head.tobytes() for head in layout}) == 4
    np.testing.assert_array_equal(layout, pattern.layout(4, 12, causal))
    assert (layout != replace(pattern, seed=1).layout(4, 12, causal)).any()
    one = replace(pattern, per_head=False).layout(4, 12, causal)
    np.testing.assert_array_equal(one, layout[:1])


def test_the_bits_of_a_draw_do_not_change():
    (layout,) = BigBird(window=1).layout(1, 6, causal=False)
    assert [" ".join("#" if each else "·" for each in row) for row in layout] == [
        "# # # # # #",
        "# # · · · #",
        "# · # · · #",
        "# · # # · ·",
        "# # · · # ·",
        "# · # · · #",
    ]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 30), st.integers(1, 3), st.floats(0, 1))
def test_groups_visit_what_the_layout_does(seed, blocks, heads, density):
    random = np.random.default_rng(seed)
    layout = random.random((heads, blocks, blocks)) < density * random.random((1, blocks, 1))
    layout |= np.eye(blocks, dtype=bool)
    again = np.zeros_like(layout)
    groups = groups_of(layout)
    for query_n, key_PnM, real_PnM in groups:
        for head, n, m in np.argwhere(real_PnM):
            assert not again[head, query_n[n], key_PnM[head, n, m]]
            again[head, query_n[n], key_PnM[head, n, m]] = True
    np.testing.assert_array_equal(again, layout)
    assert sorted(np.concatenate([group.query_n for group in groups])) == [*range(blocks)]
    assert len(groups) <= 8


def test_rows_with_global_blocks_pad_no_others():
    layout = visited(BigBird(16), 1, 4096, causal=False)
    computed = sum(group.key_PnM.size for group in groups_of(layout))
    assert computed < 1.05 * layout.sum()


@pytest.mark.parametrize("causal", [False, True])
def test_pairs_are_those_in_visited_blocks(causal):
    pattern = BigBird(4, 1, per_head=True)
    layout = visited(pattern, 3, 18, causal)
    spread = np.kron(layout, np.ones((4, 4)))[:, :18, :18]
    assert visited_pairs(pattern, 3, 18, causal) == spread.sum() / 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("local:block=0", "block is above 0"),
        ("local:window=2", "window is odd"),
        ("local:global_blocks=0-3", "global_blocks is none, or different numbers joined by +"),
        ("local:global_blocks=0+0", "global_blocks is none, or different numbers joined by +"),
        ("bigbird:random_blocks=0,per_head=true", "per_head is false without random blocks"),
        ("bigbird:random_blocks=0,seed=3", "seed is left out without random blocks"),
        ("variable:seed=5", "seed is left out without random blocks"),
        (f"bigbird:seed={2**64}", "seed is from 0 to 2^64 - 1"),
        ("bigbird:global=1", "options block"),
        ("local:", "'local' with options block"),
        ("local:block=16,,window=1", "'local' with options block"),
        ("fixed:global_blocks=0", "global_blocks is above 0"),
        ("fixed:window=4,global_blocks=3", "global_blocks is a divisor of window"),
        ("fixed:head_patterns=5", "head_patterns is at most"),
        ("variable:windows=0+4", "windows is without 0"),
        ("variable:horizontal=true,global_blocks=none", "horizontal is false"),
        ("dilated:window=1", "window is odd and above 1"),
        ("dilated:dilation=1", "dilation is 2 or more"),
        ("sparse", "bigbird"),
    ],
)
def test_options_that_make_no_sense_are_refused(make_config, text, words):
    with pytest.raises(ValueError, match=r"^attention_pattern is") as error:
        make_config("bert", attention_pattern=text)
    assert words in str(error.value)


def test_patterns_are_texts_that_other_projects_do_not_have(make_config):
    config = make_config("bert", attention_pattern="bigbird:window=3,block=16,seed=0")
    assert config.explicit().attention_pattern == "bigbird:block=16"
    assert make_config("bert").attention_pattern == "full"
    bert = make_config("bert", attention_pattern="bigbird:block=16")
    assert "bert" in KINDS
    with pytest.raises(UserError, match="attention_pattern bigbird:block=16"):
        places(bert, "bert")


def test_operations_follow_the_density(make_config):
    def flops(**changes):
        config = make_config("lm", num_decoder_layers=3, **changes)
        return flops_per_step(config, 2, 0, 256)

    full, sparse = flops(), flops(attention_pattern="local:block=16")
    pairs = visited_pairs(Local(16), 2, 256, causal=True)
    assert full - sparse == 6 * 2 * 3 * 2 * 2 * 4 * (256**2 - pairs)


def test_the_preset_of_bert_has_a_layout_for_each_head():
    config = model_preset("bert_base_bigbird")
    name, pattern = config.part("attention_pattern")
    assert (name, pattern) == ("bigbird", BigBird(16, 1, 1, 1, per_head=True))
    layout = visited(pattern, config.num_heads, 512, causal=False)
    assert layout.shape == (12, 32, 32)
    assert len({each.tobytes() for each in layout}) == 12
    # Itself, the global block and a random one.
    assert {*layout[:, 2:].sum(axis=2).flat} == {3}
