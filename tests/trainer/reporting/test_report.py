"""The table of a run's results."""

import shlex

import pytest

from trainer import report
from trainer.config import save_config
from trainer.pretrain import build_config
from trainer.report import summary
from trainer.reporting.metrics import MetricsWriter


@pytest.mark.parametrize(
    ("entropy", "says"),
    [(5.688, "5.688 nats, 1.061 above the loss"), (2.0, "2.000 nats, 2.627 below the loss")],
)
def test_the_unigram_entropy_may_be_below_the_loss(entropy, says):
    values = {"loss": 4.627, "perplexity": 102.2, "accuracy": 0.3, "unigram_entropy": entropy}
    lines = [{"step": 5, "split": split, "metrics": values} for split in ("train", "validation")]
    assert says in summary(build_config("t5_1_1_tiny", [])[0], lines)


def test_every_command_to_run_next_can_be_pasted(tmp_path, capsys):
    folder = tmp_path / "my model"
    folder.mkdir()
    flags = [f"--model_dir={folder}", "--train_steps=20", "--metrics.tensorboard=false"]
    config, origins = build_config("t5_1_1_tiny", flags)
    save_config(config, origins)
    values = {"loss": 4.6, "perplexity": 102.2, "accuracy": 0.3, "unigram_entropy": 5.0}
    writer = MetricsWriter(config, 0)
    for split in ("train", "validation"):
        writer.write(20, split, values)
    report.main([f"--model_dir={folder}"])
    lines = capsys.readouterr().out.partition("Next:\n")[2].splitlines()
    assert not any("…" in line for line in lines)
    assert lines[0].endswith("run the same command of trainer.pretrain with --train_steps=40")
    assert shlex.split(lines[1])[-2:] == [f"--model_dir={folder}", "--steps=all"]
    assert shlex.split(lines[2])[-1] == f"--logdir={folder}/tensorboard"
