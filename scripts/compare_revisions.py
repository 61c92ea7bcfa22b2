"""Compares what two checkouts compute: a vocabulary, caches, runs drawn at random, exports.

    git worktree add ../before v0.1.0
    python scripts/compare_revisions.py ../before . --output=same --runs=40

Every command runs in the checkout under test, so a change that should not alter any number can
be checked against the revision before it. Results are kept in `--output` and not computed twice.
The exit code is 1 if anything differs.
"""

import argparse
import hashlib
import json
import os
import pathlib
import random
import subprocess
import sys

# Task -> lengths of its features.
TASKS = {
    "span_corruption": ("--lengths.inputs=128", "--lengths.targets=29"),
    "ul2": ("--lengths.inputs=128", "--lengths.targets=128"),
    "prefix_lm": ("--lengths.inputs=64", "--lengths.targets=64"),
    "autoregressive_lm": ("--lengths.targets=128",),
    "masked_lm": ("--lengths.inputs=128", "--lengths.targets=128"),
}
# Family -> presets, tasks and options that fit it.
FAMILIES = {
    "encoder_decoder": (
        (
            *("t5_1_0_tiny", "t5_1_1_tiny", "t5_1_1_tiny_primer_ez", "t5_1_1_mini"),
            *("mup_t5_1_1_mini", "mini_march_v1", "mini_march_v2", "mini_march_geglu"),
        ),
        ("span_corruption", "ul2"),
    ),
    "decoder": (
        (
            *("lm_tiny", "llama_tiny", "llama_tiny_dynamic_tanh", "tiny_transformer_vanilla"),
            *("tiny_transformer_mdha", "tiny_primer", "tiny_primer_ez", "tiny_primer_as_released"),
            *("tiny_switch_primer", "tiny_synthesizer", "tiny_synthesizer_dense"),
            "tiny_evolved_transformer",
        ),
        ("autoregressive_lm", "prefix_lm"),
    ),
    "encoder": (("bert_tiny", "bert_tiny_pre_ln", "bert_mini"), ("masked_lm",)),
}
# Options of a run, each drawn or left out.
OPTIONS = (
    ("--optimizer.name=adamw", "--optimizer.learning_rate=0.001"),
    ("--optimizer.name=lion", "--optimizer.learning_rate=0.0003"),
    ("--model.dropout_rate=0.1",),
    ("--microbatches=2",),
    ("--data.shuffle=block",),
    ("--loss.z_loss=0.0001",),
    ("--optimizer.clip_norm=1.0",),
    ("--model.scan_layers=true",),
    ("--model.remat=full",),
    ("--model.dtype=bfloat16",),
    ("--data.segment_documents=true",),
    ("--model.tied_logits=false",),
)
# Prefixes of metrics that depend on the machine.
_OF_MACHINE = ("speed", "seconds", "time", "memory")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", nargs=2, metavar="CHECKOUT", type=pathlib.Path)
    parser.add_argument("--output", required=True, type=pathlib.Path, help="folder for results")
    parser.add_argument("--runs", type=int, default=40, help="runs to draw (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed (default: %(default)s)")
    flags = parser.parse_args()
    results = [
        results_of(checkout.resolve(), flags.output.resolve() / name, drawn(flags.runs, flags.seed))
        for checkout, name in zip(flags.checkouts, ("before", "after"), strict=True)
    ]
    differing = [name for name in results[0] if results[0][name] != results[1][name]]
    for name in differing:
        print(f"DIFFERS {name}\n  {results[0][name]}\n  {results[1][name]}")
    failed = sum(isinstance(value, str) and "exit " in value for value in results[0].values())
    print(f"{len(results[0])} results, {failed} refused by both, {len(differing)} differ")
    return 1 if differing else 0


def drawn(count: int, seed: int) -> dict[str, list[str]]:
    """Returns the flags of `count` runs by name."""
    draw, runs = random.Random(seed), {}
    for number in range(count):
        presets, tasks = FAMILIES[draw.choice(("encoder_decoder", "decoder", "encoder"))]
        task = draw.choice(tasks)
        chosen = draw.sample(OPTIONS, draw.randint(0, 3))
        runs[f"run {number:02}"] = [
            f"--preset={draw.choice(presets)}",
            f"--task=python_docs_{task}",
            *TASKS[task],
            *(flag for option in chosen for flag in option),
        ]
    return runs


def results_of(checkout: pathlib.Path, folder: pathlib.Path, runs: dict[str, list[str]]) -> dict:
    """Returns what a checkout computes: name of a result -> plain data."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "results.json"
    found = json.loads(kept.read_text()) if kept.exists() else {}

    def result(name, make):
        if name not in found:
            found[name] = make()
            kept.write_text(json.dumps(found, indent=1))
            print(f"{folder.name}: {name}", flush=True)

    def run(*command):
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        done = subprocess.run(
            [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True
        )
        lines = (done.stderr.strip() or " ").splitlines()
        return None if done.returncode == 0 else f"exit {done.returncode}: {lines[-1]}"

    def vocabulary():
        command = ("vocab.train", "--corpus=python_docs", "--vocab_size=8000")
        return run("-m", *command, "--output=vocabulary") or hashes(folder / "vocabulary")

    def cache(task):
        flags = ("--vocabulary=vocabulary", "--cache_dir=cache", "--row_tokens=141")
        failed = run("-m", "pipeline.build", f"--task=python_docs_{task}", *flags)
        return failed or hashes(folder / "cache" / f"python_docs_{task}")

    def trained(name, flags):
        model = folder / name.replace(" ", "_")
        failed = run(
            *("-m", "trainer.pretrain", *flags, "--cache_dir=cache", f"--model_dir={model}"),
            *("--train_steps=6", "--batch_size=8", "--metrics.every_steps=1"),
            *("--evaluation.every_steps=3", "--checkpoint.every_steps=6"),
        )
        return failed or {"metrics": metrics(model), "parameters": checksums(model)}

    def exported(name):
        flags = (f"--model_dir={name}", f"--output={name}_exported", "--custom_code")
        failed = run("-m", "trainer.export", *flags)
        return failed or hashes(folder / f"{name}_exported")

    result("vocabulary", vocabulary)
    for task in TASKS:
        result(f"cache of {task}", lambda task=task: cache(task))
    for name, flags in runs.items():
        result(f"{name} {' '.join(flags)}", lambda name=name, flags=flags: trained(name, flags))
    for name in sorted(runs)[::4]:
        result(f"export of {name}", lambda name=name: exported(name.replace(" ", "_")))
    return found


def hashes(folder: pathlib.Path) -> dict[str, str]:
    """Returns file -> the first digits of its SHA-256, of JSON without versions and places."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes()
        if path.suffix == ".json":
            content = json.loads(data)
            software = ("software", "versions", "palimpsest_version")
            for name in (*software, "seconds", "created", "from"):
                content.pop(name, None) if isinstance(content, dict) else None
            data = json.dumps(content).encode()
        found[str(path.relative_to(folder))] = hashlib.sha256(data).hexdigest()[:12]
    return found


def metrics(model_dir: pathlib.Path) -> list[dict]:
    """Returns the lines of metrics without values that depend on the machine."""

    def plain(value):
        if not isinstance(value, dict):
            return value
        named = {name: each for name, each in value.items() if not name.startswith(_OF_MACHINE)}
        return {name: plain(each) for name, each in named.items()}

    lines = (model_dir / "metrics.jsonl").read_text().splitlines()
    return [plain(json.loads(line)) for line in lines]


def checksums(model_dir: pathlib.Path) -> dict:
    """Returns the checksums of all arrays that the newest checkpoint records."""
    (record,) = (model_dir / "checkpoint_6").rglob("run/metadata")
    return json.loads(record.read_text())["checksums"]


if __name__ == "__main__":
    sys.exit(main())
