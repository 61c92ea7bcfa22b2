"""Every field has words; --help shows them by group; --print_config with them."""

import dataclasses

import pytest

from tests.support import in_process
from trainer.config import Config, fields, help
from trainer.config.presets import MODEL_PRESETS
from trainer.pretrain import main

CONFIG = Config("t5_1_1_small", MODEL_PRESETS["t5_1_1_small"])
PATHS = [path for path, _ in fields.leaves(CONFIG)]


def shown(capsys, *flags):
    with pytest.raises(SystemExit) as ended:
        main(list(flags))
    assert not ended.value.code
    return capsys.readouterr().out


def test_every_field_has_words():
    for path in PATHS:
        words = fields.metadata(CONFIG, path).get("words")
        assert words, f"{path} has no help text"
        assert not words.endswith(".")
        assert "(default" not in words


def test_every_group_has_words():
    groups = [
        field
        for field in dataclasses.fields(Config)
        if dataclasses.is_dataclass(getattr(CONFIG, field.name))
    ]
    assert [field.name for field in groups] == [name for name in help.groups() if name != help.RUN]
    assert all(field.metadata["words"] for field in groups)


def test_help_shows_every_field_in_its_group(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = shown(capsys, "--help")
    starts = [text.index(f"\n{group}:\n") for group in help.groups()]
    assert starts == sorted(starts)
    for group, start, end in zip(help.groups(), starts, [*starts[1:], len(text)], strict=True):
        for path in PATHS:
            if path != "preset":
                own = (path.partition(".")[0] if "." in path else help.RUN) == group
                assert (start < text.index(f"\n  --{path} ") < end) == own
    assert "lm_1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "--loss.z_loss X" in text
    assert "(default: 0.0001)" in text


def test_help_of_a_group_shows_that_group_alone(capsys):
    text = shown(capsys, "--help=optimizer")
    assert text.startswith("optimizer:\n  The optimizer and its learning-rate schedule\n")
    for path in PATHS:
        assert (f"--{path} " in text) == path.startswith("optimizer.")
    assert "{adafactor,adamw,adamw_rms,lion,muon}" in text
    run = shown(capsys, "--help=run")
    assert "--train_steps N" in run
    assert "--optimizer." not in run


def test_help_shows_former_names(capsys):
    assert "--mesh.tensor N, --mesh.num_partitions N" in shown(capsys, "--help=mesh")


def test_help_of_presets_is_a_table_by_family(capsys):
    text = shown(capsys, "--help=presets")
    for name in MODEL_PRESETS:
        assert f"\n  {name} " in text
    (row,) = (line for line in text.splitlines() if line.split()[:1] == ["t5_1_1_small"])
    assert row.split()[1:] == ["512", "6", "64", "1024", "32128", "8", "+", "8"]


def test_an_unknown_group_is_refused_by_name():
    result = in_process.run("trainer.pretrain", "--help=optimiser")
    assert result.returncode == 2
    assert "did you mean optimizer?" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_print_config_shows_words_on_request(capsys):
    flags = ("--preset=t5_1_1_small", "--mesh.num_partitions=2")
    assert main([*flags, "--print_config"]) == 0
    plain = capsys.readouterr().out
    assert main([*flags, "--print_config=words"]) == 0
    with_words = capsys.readouterr().out
    lines = [line for line in with_words.splitlines() if not line.startswith("    # ")]
    assert lines == plain.splitlines()
    assert "weight of log(Z)^2" not in plain
    assert "    # weight of log(Z)^2 in the loss" in with_words
