"""Every field has words; --help shows them by group; --print_config with them."""

from tests.support import in_process
from trainer.config import Config, changes, field_paths
from trainer.config.presets import MODEL_PRESETS
from trainer.pretrain import main

CONFIG = Config("t5_1_1_small", MODEL_PRESETS["t5_1_1_small"])
PATHS = [path for path, _ in field_paths.leaves(CONFIG)]
GROUPS = ["run", *dict.fromkeys(path.partition(".")[0] for path in PATHS if "." in path)]


def shown(capsys, *flags):
    assert main(list(flags)) == 0
    return capsys.readouterr().out


def test_every_field_has_words_and_an_effect():
    for path in PATHS:
        words = field_paths.metadata(CONFIG, path).get("words")
        assert words, f"{path} has no help text"
        assert not words.endswith(".")
        assert "(default" not in words
    assert changes("model.emb_dim") == "results"
    assert changes("seed") == changes("lengths.inputs") == "batches"
    assert changes("checkpoint.keep") == changes("evaluation.decoding.method") == "nothing"
    assert changes("mesh.data") == changes("model.attention") == "rounding"
    # Not the attention's implementation, as a comparison of the beginnings of names had it.
    assert changes("model.attention_scale") == "results"


def test_help_fits_a_screen(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = shown(capsys, "--help")
    lines = text.splitlines()
    assert len(lines) <= 48
    assert sum(line.startswith("  --") for line in lines) >= 30
    assert max(len(line) for line in lines if line.startswith("  --")) <= 80
    for name in GROUPS:
        assert name in lines[-1] or name in text.rpartition("--help=GROUP")[2]


def test_help_of_all_shows_every_field_in_its_group(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = shown(capsys, "--help=all")
    groups = GROUPS
    starts = [text.index(f"\n{group}:\n") for group in groups]
    assert starts == sorted(starts)
    for group, start, end in zip(groups, starts, [*starts[1:], len(text)], strict=True):
        for path in PATHS:
            own = (path.partition(".")[0] if "." in path else "run") == group
            shown_there = any(f"\n  --{path}{end_of}" in text[start:end] for end_of in "= ,\n")
            assert shown_there == own, path
    assert "lm_1b" not in text
    assert "--loss.z_loss=X" in text
    assert "(default: 0.0001)" in " ".join(text.split())


def test_help_of_a_group_shows_that_group_alone(capsys):
    text = shown(capsys, "--help=optimizer")
    assert text.startswith("optimizer:\n  The optimizer and its learning-rate schedule\n")
    for path in PATHS:
        assert (f"--{path}=" in text) == path.startswith("optimizer.")
    assert "{adafactor,adamw,adamw_rms,lion" in text
    run = shown(capsys, "--help=run")
    assert "--train_steps=N" in run
    assert "--optimizer." not in run
    assert "--mesh.tensor=N, --mesh.num_partitions=N" in shown(capsys, "--help=mesh")
    text = shown(capsys, "--help=presets")
    for name in MODEL_PRESETS:
        assert f"\n  {name} " in text
    (row,) = (line for line in text.splitlines() if line.split()[:1] == ["t5_1_1_small"])
    assert row.split()[1:] == ["512", "6", "64", "1024", "32128", "8", "+", "8"]
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
