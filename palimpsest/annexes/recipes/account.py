"""The account of a recipe, in Markdown: its data, training, results, and how to repeat it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from palimpsest.annexes.recipes import lock
from palimpsest.annexes.recipes.derived_flags import RUNS
from palimpsest.annexes.recipes.products import Product
from palimpsest.annexes.recipes.recipe import Recipe, Stage
from tasks.storage import files
from tasks.terminal.table import table
from trainer.reporting.metrics import OF_DATA

FILE = "RECIPE.md"
# How many characters of a hash tell it from others.
_SHORT = 12


def write(recipe: Recipe, made: Mapping[str, Product | None]) -> str:
    """Writes the account of the finished stages to the recipe's folder; returns its path."""
    done = [
        (stage, product) for stage in recipe.stages if (product := made[stage.name]) is not None
    ]
    parts = {
        "Data": _data(done),
        "Training": _training(done),
        "Evaluation": _evaluations(done),
        "Repeat it": _repeat(recipe),
    }
    lines = [f"# {recipe.head.get('title', recipe.path.stem)}"]
    if source := recipe.head.get("source"):
        lines += ["", f"After {source}."]
    for title, part in parts.items():
        if written := list(part):
            lines += ["", f"## {title}", "", *written]
    path = files.join(recipe.folder, FILE)
    files.write_bytes(path, ("\n".join(lines) + "\n").encode())
    return path


def _data(done: Sequence[tuple[Stage, Product]]) -> Iterator[str]:
    rows = []
    for stage, made in done:
        if stage.kind == "cache":
            corpus = " ".join(stage.flags.get("corpus", ()))
            rows += [_cache(name, corpus, each) for name, each in made.items()]
        elif stage.kind == "dedup":
            yield f"{made['entries']:,} duplicates were left out (sha256 {_short(made['sha256'])})."
            yield ""
        elif stage.kind == "vocabulary":
            hashes = ", ".join(f"{n} {_short(made[n])}" for n in made if isinstance(made[n], str))
            yield f"Vocabulary by sha256: {hashes}."
            yield ""
    if rows:
        header = ("cache", "corpus", "documents", "tokens", "MB", "sha256", "left out")
        yield table(header, rows, markdown=True)


def _cache(name: str, corpus: str, made: Mapping[str, Any]) -> tuple[str, ...]:
    found = made["corpus"]
    identity = found.get("revision") or _short(found.get("sha256", ""))
    counts = (f"{made['documents']:,}", f"{made['tokens']:,}", f"{made['text_bytes'] / 1e6:,.1f}")
    dropped = ", ".join(f"{reason} {count:,}" for reason, count in made["dropped"].items())
    source = f"`{corpus}` {identity}" if corpus else identity
    return (name, source, *counts, _short(made["sha256"]), dropped or "none")


def _training(done: Sequence[tuple[Stage, Product]]) -> Iterator[str]:
    rows = [_run(stage, made) for stage, made in done if stage.kind in RUNS]
    if rows:
        header = ("run", "updates", "hours", "hardware", "checkpoint's sha256")
        yield table(header, rows, markdown=True)
        yield ""
        versions = (f"{name} {version}" for name, version in lock.software().items())
        yield f"Software: {', '.join(versions)}."


def _run(stage: Stage, made: Mapping[str, Any]) -> tuple[str, ...]:
    from trainer.reporting import history

    run = history.load(stage.output, stage.name)
    hours = f"{run.hours([made['step']])[0]:,.2f}"
    found = run.software.get("hardware", {})
    kind = found.get("device_kind") or found.get("cpu") or found.get("platform", "?")
    hardware = f"{found.get('devices', '?')} x {kind}"
    return (stage.name, f"{made['step']:,}", hours, hardware, _short(made["sha256"]))


def _evaluations(done: Sequence[tuple[Stage, Product]]) -> Iterator[str]:
    rows = []
    for stage, made in done:
        if found := made.get("metrics"):
            step = max(found, key=int)
            rows += [
                (stage.name, step, split, name, f"{value:,.4f}")
                for split, metrics in found[step].items()
                for name, value in metrics.items()
                if isinstance(value, int | float) and name not in OF_DATA
            ]
    if rows:
        yield table(("stage", "step", "split", "metric", "value"), rows, markdown=True)


def _repeat(recipe: Recipe) -> Iterator[str]:
    name = recipe.path.name
    yield f"`palimpsest run {name} --folder=OTHER --locked` makes the same, or says what differs"
    yield f"from `{lock.path_of(recipe).name}`, which has the hashes of everything. The recipe:"
    yield ""
    yield "```toml"
    yield recipe.text.strip()
    yield "```"


def _short(text: str) -> str:
    return text[:_SHORT]
