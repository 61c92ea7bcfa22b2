"""Traces are exact for every objective, pages are valid."""

import io
import re

import numpy as np
import pytest

from tasks import registry, vocabulary
from tasks.annexes.inspecting import show
from tasks.annexes.inspecting.trace import trace
from tasks.cache.lineage import Part
from tasks.cache.windows import Place
from tasks.objectives import Lengths, Objective, noise
from tasks.objectives.masked_lm import MaskedLM
from tasks.reading import stdlib_docs
from tasks.task import TaskSpec
from tasks.vocabulary import EOS_ID
from tests.support.pages import Page
from tests.tasks.objectives.test_sentences import IDS, LENGTHS, windows_of
from tests.tasks.test_decode import SCRIPTS
from tests.tasks.test_decode import loaded as loaded

TASKS = {name: task for name, task in registry.tasks().items() if name.startswith("python_docs_")}


@pytest.fixture(scope="module")
def window(loaded):
    """Returns a function: number of tokens -> that many tokens of text with ends of documents."""
    stream = []
    for text in [*SCRIPTS, *list(stdlib_docs.documents().values())[:20]]:
        stream += [*loaded.processor.encode(text), EOS_ID]
    return lambda size: np.array(stream[40 : 40 + size], np.int32)


def example(task, window, loaded, seed, size=None):
    """Returns (trace, lengths) of a window of `size` tokens, by default the objective's window."""
    lengths = Lengths(task.lengths.inputs and 96, 96 if task.name.endswith("masked_lm") else 160)
    width = task.objective.window_tokens(lengths)
    key = noise.fold_in(seed, 7)
    return trace(task.objective, window(size or width), key, lengths, loaded.ids), lengths


@pytest.mark.parametrize("name", TASKS)
def test_every_token_has_its_place(name, window, loaded):
    for seed in range(8):
        made, lengths = example(TASKS[name], window, loaded, seed)
        assert made.exact
        keys = np.array([noise.fold_in(seed, 7)], np.uint64)
        tokens_N = made.window.tokens_L
        real = TASKS[name].objective.examples(
            tokens_N[None], np.array([len(tokens_N)]), keys, lengths, loaded.ids
        )
        for feature, side in (("inputs", made.inputs), ("targets", made.targets)):
            if feature not in real:
                assert side is None
                continue
            values, counts = real[feature]
            assert np.array_equal(side.tokens_L, values[0, : counts[0]])
            from_window = side.places_L >= 0
            assert np.array_equal(side.tokens_L[from_window], tokens_N[side.places_L[from_window]])
            # Other tokens are special tokens, or random pieces that replace a token.
            own = side.tokens_L[~from_window]
            signs = (own == EOS_ID) | (own >= loaded.first_sentinel)
            assert (signs | (side.spans_L[~from_window] >= 0)).all()


@pytest.mark.parametrize(
    "name", [name for name in TASKS if name.endswith(("_u_u", "span_corruption", "ul2"))]
)
def test_sentinel_and_text_of_a_span_have_its_number(name, window, loaded):
    seen = 0
    for seed in range(8):
        made, _ = example(TASKS[name], window, loaded, seed)
        for number in range(made.window.spans_L.max(initial=-1) + 1):
            hidden = np.flatnonzero(made.window.spans_L == number)
            inputs = made.inputs.tokens_L[made.inputs.spans_L == number]
            assert not np.isin(hidden, made.inputs.places_L).any()
            targets = np.flatnonzero(made.targets.spans_L == number)
            text = made.targets.places_L[targets]
            assert np.array_equal(text[text >= 0], hidden)
            # Only UL2's sequential denoiser has no sentinel.
            assert len(inputs) == 1 or (name.endswith("ul2") and text[0] >= 0)
            if text[0] < 0:
                # The same sentinel on both sides, followed by the text in the targets.
                assert made.targets.tokens_L[targets[0]] == inputs[0] >= loaded.first_sentinel
                if hidden[0]:
                    assert np.array_equal(targets, np.arange(targets[0], targets[-1] + 1))
                    # In the inputs it follows the token before the span.
                    at = int(np.flatnonzero(made.inputs.spans_L == number)[0])
                    assert made.inputs.places_L[at - 1] == hidden[0] - 1
                seen += 1
    assert seen >= 8


def test_replacements_belong_to_the_spans_that_they_hide(window, loaded):
    kinds = {"masked": 0, "random": 0, "kept": 0}
    for seed in range(20):
        made, _ = example(TASKS["python_docs_masked_lm"], window, loaded, seed)
        learned = made.weights_L > 0
        assert np.array_equal(made.inputs.spans_L >= 0, learned)
        assert np.array_equal(made.targets.spans_L >= 0, learned)
        mask = made.inputs.tokens_L == loaded.size - 1
        same = made.inputs.places_L >= 0
        kinds["masked"] += int((learned & mask).sum())
        kinds["kept"] += int((learned & same).sum())
        kinds["random"] += int((learned & ~mask & ~same).sum())
        assert set(made.more) == {"segments", "order"}
    assert kinds["masked"] > 5 * kinds["random"] > 0
    assert kinds["masked"] > 5 * kinds["kept"] > 0


def test_words_begin_after_eos(window, loaded):
    tokens_N = window(93).copy()
    tokens_N[::4] = EOS_ID
    for seed in range(10):
        made, _ = example(TASKS["python_docs_masked_lm"], lambda size: tokens_N, loaded, seed)
        assert made.exact


def test_predicted_tokens_without_a_sentinel(window, loaded):
    prefix, _ = example(TASKS["python_docs_prefix_lm"], window, loaded, 1)
    split = int(np.flatnonzero(prefix.window.spans_L == 0)[0])
    assert np.array_equal(prefix.inputs.places_L[:-1], np.arange(split))
    assert np.array_equal(prefix.window.spans_L >= 0, np.arange(95) >= split)
    decoder, _ = example(TASKS["python_docs_decoder_prefix_lm"], window, loaded, 1)
    assert decoder.inputs is None
    assert np.array_equal(decoder.targets.spans_L >= 0, decoder.weights_L > 0)
    assert 0 < decoder.weights_L.sum() < len(decoder.weights_L)
    plain, _ = example(TASKS["python_docs_autoregressive_lm"], window, loaded, 1)
    assert (plain.window.spans_L < 0).all()


def test_shuffled_inputs_are_recognised(window, loaded):
    made, _ = example(TASKS["python_docs_deshuffling"], window, loaded, 1)
    assert made.shuffled
    assert sorted(made.inputs.places_L[:-1]) == list(range(95))
    assert np.array_equal(made.window.spans_L[made.inputs.places_L[:-1]], made.inputs.spans_L[:-1])
    # Two swapped segments do not count as shuffled.
    for seed in range(4):
        assert not example(TASKS["python_docs_masked_lm"], window, loaded, seed)[0].shuffled


def test_ul2_leaves_tokens_out_and_shows_its_mode(window, loaded):
    task = TASKS["python_docs_ul2"]
    modes = set()
    for seed in range(30):
        made, _ = example(task, window, loaded, seed)
        used = np.flatnonzero(made.used_N)
        shown = {*made.inputs.places_L.tolist(), *made.targets.places_L.tolist()}
        assert {*used.tolist()} == shown - {-1}
        assert np.array_equal(used, np.arange(used[0], used[-1] + 1))
        assert made.inputs.places_L[0] == -1
        assert made.inputs.spans_L[0] == -1
        mode = vocabulary.sentinel_piece(loaded.size - 1 - int(made.inputs.tokens_L[0]))
        assert f"mode {mode}:" in task.objective.describe(noise.fold_in(seed, 7))
        modes.add(mode)
    assert len(modes) == 3


class Sorting(Objective):
    """A user's objective that depends on the values of the tokens."""

    features = ("inputs", "targets")

    def window_tokens(self, lengths):
        return lengths.inputs

    def sentinels(self, lengths):
        return 0

    def examples(self, tokens_WN, lengths_W, keys_W, lengths, ids):
        return {
            "inputs": (np.sort(tokens_WN % 500, axis=1), lengths_W),
            "targets": (tokens_WN, lengths_W),
        }


def test_an_objective_that_cannot_be_traced_has_no_colours(window, loaded):
    task = TaskSpec("python_docs_sorting", "", Sorting(), Lengths(96, 96))
    made, lengths = example(task, window, loaded, 1)
    assert not made.exact
    assert made.used_N.all()
    strips = show.strips(sample(made, lengths), loaded.ids)
    assert [strip.name for strip in strips] == ["window", "inputs", "targets"]
    assert "unknown for this objective" in strips[0].note


def sample(made, lengths, names=("one<script>alert(1)</script>", "two&co:17")):
    """Returns a window of two documents, the second of which begins at token 30."""
    size = len(made.window.tokens_L)
    parts = (
        Part(names[0], "", 0, 30, first=12, whole=42),
        Part(names[1], "two&co", 30, size - 30, first=0, whole=size),
    )
    place = Place(0, "train.tfrecord-00000-of-00001", "documents", 3, 7, size)
    return show.Sample(
        "Window 1", (("task", "<b>&"),), (place,), parts, "json:<i>", made.window.tokens_L, made,
        lengths,
    )  # fmt: skip


def squeezed(text):
    """Removes spaces, EOS, and bytes of cut characters, which are shown as pieces."""
    return re.sub(r"\s|EOS|\ufffd|<0x..>", "", show.printable(text))


@pytest.mark.parametrize("pairs", ["order", "next"])
def test_inspection_shows_the_places_of_tokens(pairs):
    objective = MaskedLM(split="sentences", pairs=pairs, short_share=0.5)
    tokens, _, keys = windows_of(objective, 8)
    for row in range(8):
        assert trace(objective, tokens[row], keys[row], LENGTHS, IDS).exact


@pytest.mark.parametrize("name", TASKS)
def test_the_page_is_complete_escaped_and_self_contained(name, window, loaded):
    made, lengths = example(TASKS[name], window, loaded, 3)
    one = sample(made, lengths)
    page = show.page("A <page>", [one, one], loaded.ids)
    assert not re.search(r"https?:|url\(|@import|<link (?!rel=icon href='data:,'>)|src=", page)
    assert "prefers-color-scheme: dark" in page
    parsed = Page(page)
    assert [tag for tag, _ in parsed.tags].count("script") == 1
    text = parsed.text
    assert "one<script>alert(1)</script>" in text
    assert "two&co:17" in text
    shown = squeezed(text)
    for part in one.parts:
        assert squeezed(one.text(part, loaded.ids)) in shown
    directions = [attributes["dir"] for _, attributes in parsed.tags if "dir" in attributes]
    assert set(directions) == {"auto"}
    assert len(directions) == 2 * (3 + (made.inputs is not None))
    # A span has the same colour everywhere; ids and pieces are those of the tokens.
    colours = {}
    for _, attributes in parsed.tags:
        if "data-s" in attributes:
            (colour,) = re.findall(r"\bc\d\b", attributes["class"])
            colours.setdefault(attributes["data-s"], set()).add(colour)
    assert all(len(each) == 1 for each in colours.values())
    ids = [int(attributes["data-i"]) for tag, attributes in parsed.tags if tag == "i"]
    sides = [made.window, made.inputs, made.targets]
    tokens = [side.tokens_L for side in sides if side is not None]
    assert ids == 2 * np.concatenate(tokens).tolist()


def terminal(monkeypatch, samples, ids, **environment):
    for variable in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in {"COLUMNS": "80", "TERM": "xterm-256color", **environment}.items():
        monkeypatch.setenv(variable, value)
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    show.print_samples(samples, ids)
    return out.getvalue()


@pytest.mark.parametrize("name", TASKS)
def test_no_control_characters_reach_the_terminal(name, window, loaded, monkeypatch):
    made, lengths = example(TASKS[name], window, loaded, 3)
    one = sample(made, lengths, ("an\x1b[31mid", "two"))
    plain = terminal(monkeypatch, [one], loaded.ids)
    assert "\x1b" not in plain
    assert "an␛[31mid" in plain
    from rich.cells import cell_len

    assert max(map(cell_len, plain.splitlines())) <= 80
    coloured = terminal(monkeypatch, [one], loaded.ids, FORCE_COLOR="1")
    assert "an␛[31mid" in coloured
    spans = (made.window.spans_L >= 0).any()
    assert ("\x1b[30;48;5;" in coloured) == spans == ("⟦" in plain)
    assert "⟦" not in coloured


def test_control_characters_become_pictures():
    assert show.printable("a\x00\x1b\x7f\x9b\n\tb") == "a␀␛␡�↵\n\tb"
