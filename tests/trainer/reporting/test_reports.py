"""The lines and the bar that a run shows while it trains."""

import re
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from tests.support.runs import config_of, stub
from trainer import training
from trainer.config.from_flags import build_config
from trainer.engine.guard import new_guard
from trainer.initialization import resume
from trainer.reporting import numbers, reports, startup
from trainer.reporting.evaluations import evaluation_table


def optimizer_line(preset, *flags, optimizer_preset=None):
    ((subject, words), *_) = startup._rates(*build_config(preset, flags, optimizer_preset))
    assert subject == "optimizer"
    return words


@pytest.fixture
def shown(monkeypatch):
    """Returns a function that reports updates 1 to `last`, and returns the notes by update."""
    monkeypatch.setattr(reports, "Speed", SimpleNamespace(of=lambda *_: None))

    def notes(last):
        found = reports.Reports(stub(config_of()), None, None, None, None)
        by_update = {}
        for step in range(1, last + 1):
            loss = jnp.float32(step), jnp.float32(2)
            found.after(step, SimpleNamespace(metrics={"loss": loss}, guard=new_guard()))
            by_update[step] = found.note
        return by_update

    return notes


def test_the_loss_is_shown_before_the_first_report(shown):
    notes = shown(10)
    assert notes[1] == ""
    assert notes[2] == "loss 0.500"
    assert notes[3] == notes[4] == "loss 1.000"
    assert notes[5] == notes[8] == "loss 2.000"
    assert notes[9] == notes[10] == "loss 4.000"


def test_lines_fit_the_terminal_and_stay_whole_in_files(monkeypatch):
    line = f"{'this run':<13} {'words of a run ' * 10}".rstrip()
    assert startup._filled(line) == line
    monkeypatch.setattr(startup.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    broken = startup._filled(line).split("\n")
    assert len(broken) == 4
    assert all(len(each) <= 60 for each in broken)
    assert all(each.startswith(" " * 14) for each in broken[1:])


def test_a_folder_of_other_things_is_named(tmp_path):
    assert resume._strangers(str(tmp_path / "new")) == ""
    (tmp_path / ".lock").touch()
    assert resume._strangers(str(tmp_path)) == ""
    for name in ("vocabulary", "cache", "model"):
        (tmp_path / name).mkdir()
    assert resume._strangers(str(tmp_path)) == (
        " in a folder that already holds cache, model, vocabulary"
    )
    (tmp_path / "config.json").touch()
    assert resume._strangers(str(tmp_path)) == ""


@pytest.mark.parametrize(
    ("preset", "source"),
    [
        ("t5_1_1_small", ""),
        ("t5_1_0_base", ""),
        ("mup_dm1024", "--optimizer_preset=mu_transformer"),
        ("bert_base", "AdamW at 1e-4 with a linear schedule (docs/presets.md)"),
        ("llama_1b", "AdamW with a cosine schedule and clipping (docs/presets.md)"),
    ],
)
def test_a_run_with_the_default_optimizer_names_that_of_the_models_source(preset, source):
    hint = f"; the source of {preset} trains with {source}" if source else ""
    assert optimizer_line(preset) == f"adafactor, T5X's default{hint}"
    found = re.fullmatch("--optimizer_preset=(.+)", source)
    if found:
        line = optimizer_line(preset, optimizer_preset=found[1])
        assert line == f"adamw, optimizer preset {found[1]}"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--optimizer.name=lion", "--optimizer.learning_rate=1e-4"), "lion, command line"),
        (("--optimizer.name=adafactor",), "adafactor, command line"),
        (("--optimizer.schedule=constant",), "adafactor, T5X's default"),
    ],
)
def test_a_run_says_where_its_optimizer_comes_from(flags, says):
    assert optimizer_line("mup_dm1024", *flags) == says


@pytest.mark.parametrize(
    ("preset", "uses"),
    [
        ("t5_1_1_tiny", "trainer.generate, trainer.evaluate, trainer.export"),
        ("llama_tiny", "with --model_dir='my runs/1': trainer.generate, trainer.evaluate"),
        ("bert_tiny", "1': trainer.evaluate, trainer.export"),
    ],
)
def test_a_finished_run_says_what_is_next(preset, uses):
    text = training._next(config_of("--model_dir=my runs/1", preset=preset))
    assert text.startswith("next")
    assert uses in text


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (1e308, "{:.3f} nats per token", "1e+308 nats per token"),
        (12345.6789, "{:,.1f}", "12,345.7"),
        (float("nan"), "{:.3f}", "nan"),
        (float("-inf"), "{:.3f}", "-inf"),
    ],
)
def test_very_large_values_are_short(value, form, text):
    assert numbers.shown(value, form) == text


def test_the_results_of_a_run_that_diverged_are_short():
    row = {"loss": 1e308, "unigram_entropy": 4.0, "perplexity": 1e300, "tokens": 5}
    assert max(map(len, evaluation_table({1: {"validation": row}}).splitlines())) < 120
    assert len(reports._shown(row)) < 60
