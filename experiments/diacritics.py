"""Restores diacritics of Romanian text: a pretrained model against random parameters.

    python -m experiments.diacritics --corpus='parquet:DATA/ro_*.parquet' --output=DIR

Makes a vocabulary, pairs of words without and with diacritics, and caches; pretrains a small
T5 on the same corpus; fine-tunes it and the same model from random parameters on the pairs, with
every seed; and prints a table. Finished parts are kept when the command is run again.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

from experiments import pairs
from tasks.storage import files
from tasks.terminal import command_line
from tasks.terminal.command_line import Parser, positive
from tasks.terminal.table import table

_METRICS = ("exact_match", "character_error_rate")
_PRETRAINED, _RANDOM = "pretrained", "random"
# Tokens of a row.
_INPUTS = _TARGETS = 16
# T5's objective "BERT-style" without its random and kept tokens: the whole text is predicted from a
# text with masks, so that a model learns to copy, which span corruption does not ask for.
_OBJECTIVE = "iid_15_m_f"


def main(argv: list[str]) -> int:
    parser = Parser(prog="python -m experiments.diacritics", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--corpus", required=True, help="Romanian text, as in pipeline.build")
    add("--output", required=True, help="local folder of everything that is made")
    add("--preset", default="t5_1_1_mini", help="the model; %(default)s if left out")
    add("--vocab_size", type=positive, default=500, help="pieces; %(default)s if left out")
    add("--pretrain_steps", type=positive, default=2000, help="updates; %(default)s if left out")
    add("--finetune_steps", type=positive, default=1000, help="updates; %(default)s if left out")
    add("--seeds", default="0,1,2", help="seeds of fine-tuning; %(default)s if left out")
    add("--examples", type=positive, default=200, help="pairs to evaluate; %(default)s")
    arguments = parser.parse_args(argv)
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    folder = arguments.output
    _prepare(arguments)
    results = {
        arm: [_finetuned(arguments, folder, arm, seed) for seed in seeds]
        for arm in (_PRETRAINED, _RANDOM)
    }
    print(_table(results))
    return 0


def _prepare(arguments: Any) -> None:
    """Makes the vocabulary, the pairs, the caches and the pretrained model."""
    folder, corpus = arguments.output, arguments.corpus
    vocabulary, caches = f"{folder}/vocabulary", f"{folder}/caches"
    if not files.exists(f"{vocabulary}/sentencepiece.model"):
        size = f"--vocab_size={arguments.vocab_size}"
        _run("vocab.train", f"--corpus={corpus}", size, f"--output={vocabulary}")
    pairs.write(corpus, "diacritics", f"{folder}/pairs")
    shared = (f"--vocabulary={vocabulary}", f"--cache_dir={caches}")
    _run("pipeline.build", f"--task=ro_{_OBJECTIVE}", f"--corpus={corpus}", *shared)
    given = f"json:{folder}/pairs/*.jsonl?split=train&inputs=inputs&targets=targets"
    limits = (f"--max_inputs={_INPUTS}", f"--max_targets={_TARGETS}")
    _run("pipeline.build", "--task=diacritics_supervised", f"--corpus={given}", *shared, *limits)
    _run(
        *("trainer.pretrain", f"--preset={arguments.preset}", f"--task=ro_{_OBJECTIVE}"),
        *(f"--cache_dir={caches}", f"--model_dir={folder}/pretrained"),
        f"--train_steps={arguments.pretrain_steps}",
        *(f"--lengths.inputs={_INPUTS}", f"--lengths.targets={_TARGETS}"),
        *_updates(arguments.pretrain_steps),
        *("--optimizer.learning_rate=0.03", "--optimizer.warmup_steps=100"),
        "--optimizer.schedule=constant * linear_warmup * cosine_decay",
        f"--optimizer.steps_per_cycle={arguments.pretrain_steps}",
    )


def _updates(steps: int) -> tuple[str, ...]:
    return (
        *("--batch_size=64", "--metrics.every_steps=50", "--metrics.tensorboard=false"),
        *(f"--evaluation.every_steps={steps}", f"--checkpoint.every_steps={steps}"),
    )


def _finetuned(arguments: Any, folder: str, arm: str, seed: int) -> dict[str, float]:
    """Returns the metrics after fine-tuning, with the pretrained or with random parameters."""
    model_dir = f"{folder}/{arm}_{seed}"
    steps = arguments.finetune_steps
    begin = ["trainer.finetune", f"--init_from={folder}/pretrained"]
    if arm == _RANDOM:
        begin = ["trainer.pretrain", f"--preset={arguments.preset}", "--model.dropout_rate=0.1"]
        begin.append("--optimizer_preset=t5x_finetune")
    _run(
        *begin,
        *("--task=diacritics_supervised", f"--cache_dir={folder}/caches"),
        *(f"--model_dir={model_dir}", f"--seed={seed}", f"--train_steps={steps}"),
        *(f"--lengths.inputs={_INPUTS}", f"--lengths.targets={_TARGETS}", *_updates(steps)),
        # The constant rate of 1e-3 is for models of 60 million parameters and more.
        "--optimizer.learning_rate=0.01",
        f"--evaluation.metrics={','.join(_METRICS)}",
        *(f"--evaluation.examples={arguments.examples}", "--evaluation.batch_size=100"),
    )
    text = files.read_bytes(f"{model_dir}/metrics.jsonl").decode()
    lines = [json.loads(line) for line in text.splitlines()]
    last = [line["metrics"] for line in lines if line["split"] == "validation"][-1]
    return {name: last[name] for name in ("loss", *_METRICS)}


def _run(module: str, *flags: str) -> None:
    """Runs one of the project's commands; ends with its exit code if it fails."""
    print(f"\n$ python -m {module} {' '.join(flags)}", flush=True)
    code = subprocess.run([sys.executable, "-m", module, *flags], check=False).returncode
    if code:
        sys.exit(code)


def _table(results: dict[str, list[dict[str, float]]]) -> str:
    """Returns mean and standard deviation over seeds of each metric."""
    names = ("loss", *_METRICS)
    rows = []
    for arm, by_seed in results.items():
        columns = [[each[name] for each in by_seed] for name in names]
        spread = (statistics.stdev(column) if len(column) > 1 else 0.0 for column in columns)
        means = (statistics.fmean(column) for column in columns)
        rows.append([arm, *(f"{a:.2f} ± {b:.2f}" for a, b in zip(means, spread, strict=True))])
    return table(["begins with", *names], rows)


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
