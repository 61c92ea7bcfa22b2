"""A run's configuration is printed whatever becomes of the store with its cache."""

import time

import pytest

from tasks.storage.retries import Unreachable
from tasks.terminal.command_line import UserError
from trainer import setup, training
from trainer.config.from_flags import build_config


def printed(capsys, cache_dir="gs://bucket/cache"):
    flags = ["--task=rlm_span_corruption", f"--cache_dir={cache_dir}", "--model_dir=gs://b/m"]
    assert training.start(*build_config("t5_1_1_tiny", flags), "values") == 0
    warning, *lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("model.emb_dim ") for line in lines)
    return warning


def test_the_configuration_is_printed_without_a_store(monkeypatch, capsys):
    def refuse(*_):
        raise Unreachable("gs://bucket/cache: no credentials", "log in")

    monkeypatch.setattr(setup, "prepare", refuse)
    said = "warning: nothing is taken from gs://bucket/cache: "
    assert printed(capsys) == f"{said}gs://bucket/cache: no credentials"
    monkeypatch.setattr(training, "_PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(setup, "prepare", lambda *_: time.sleep(10))
    began = time.monotonic()
    assert printed(capsys) == f"{said}no answer for 0 s"
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("cache_dir", ["gs://bucket/cache", "cache"])
def test_a_mistake_about_the_cache_is_no_matter_of_the_store(monkeypatch, capsys, cache_dir):
    def refuse(*_):
        raise UserError("no cache for task rlm_span_corruption")

    monkeypatch.setattr(setup, "prepare", refuse)
    with pytest.raises(UserError, match="no cache for task"):
        printed(capsys, cache_dir)
