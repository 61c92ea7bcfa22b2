"""Sections of a report that need the model: rows by loss, and generated text."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tasks import decode
from tasks.annexes.inspecting import show
from tasks.annexes.inspecting.trace import trace
from tasks.annexes.pages import document as html_page
from tasks.cache.lineage import Lineage
from tasks.objectives import noise
from tasks.vocabulary import TokenIds
from trainer.config.decoding import Decoding
from trainer.data.batches import BatchMaker, pad_rows
from trainer.data.cached_task import CachedTask
from trainer.data.features import target_side
from trainer.data.run import Data, Run
from trainer.engine.program import Program
from trainer.engine.sharding import put_batch
from trainer.evaluating import likelihood
from trainer.inference import text, trained_run
from trainer.inference.generator import Generator
from trainer.reporting.history import VALIDATION, History

# Rows per task whose losses are computed, spread evenly over the validation split.
EXAMINED = 256
_BATCH = 16
_COLOURS = 8
_SPLIT = VALIDATION


class _Row(NamedTuple):
    """A window of a task's validation split, and the mean loss of its targets in nats."""

    task: CachedTask
    maker: BatchMaker
    window: int
    loss: float


def examine(
    runs: Sequence[History], count: int | None, samples: int | None, cache_dir: str | None = None
) -> dict[str, str]:
    """Returns HTML sections by name, from the newest checkpoint of each run.

    `count` is the number of rows with the highest and with the lowest loss, `samples` the number of
    rows to complete; None leaves out the section. `cache_dir` is the folder of the tasks' caches,
    if moved. Raises UserError if a run has no checkpoint or its caches are missing.
    """
    lines, written = list[str](), list[str]()
    for number, history in enumerate(runs):
        run = trained_run.open_run(history.folder, cache_dir)
        heading = f"<h3>{html_page.text(history.name)}</h3>" if len(runs) > 1 else ""
        if not run.data.tasks:
            note = html_page.note(f"{history.name}: its data is not from a pipeline.build cache.")
            lines, written = [*lines, note], [*written, note]
            continue
        if count:
            lines.append(heading + _by_loss(run, run.data, count, f"r{number}-"))
        if samples:
            written.append(heading + _completed(run, run.data, samples, cache_dir))
    found = {"Rows by loss": show.LEGEND + "".join(lines)} if count else {}
    return found | ({"Samples": "".join(written)} if samples else {})


def _makers(data: Data) -> Iterator[tuple[CachedTask, BatchMaker]]:
    for task in data.tasks:
        if _SPLIT in task.manifest.splits:
            maker = data.maker(task, _SPLIT, keep_tails=True)
            if len(maker.windows):
                yield task, maker


def _spread(count: int, most: int) -> np.ndarray:
    """Returns at most `most` evenly spread indices below `count`, ascending, int64."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))


def _by_loss(run: Run, data: Data, count: int, prefix: str) -> str:
    step, params = trained_run.restore(run, None, trained_run.vocabulary_of(run, None))
    losses_of = _losses(Program(run))
    found: list[_Row] = []
    for task, maker in _makers(data):
        indices_W = _spread(len(maker.windows), EXAMINED)
        losses_W = losses_of(params, maker, indices_W, run.config.seed)
        pairs = zip(indices_W.tolist(), losses_W.tolist(), strict=True)
        found += [_Row(task, maker, window, loss) for window, loss in pairs if np.isfinite(loss)]
    if not found:
        return html_page.note("No validation row has a finite loss.")
    found.sort(key=lambda row: row.loss)
    shown = min(count, (len(found) + 1) // 2)
    parts = [("highest", found[::-1][:shown]), ("lowest", found[:shown])]
    note = f"{len(found):,} rows of {_SPLIT} by checkpoint {step:,}; loss in nats per target token."
    table = html_page.table(
        "Their documents",
        ("loss", "task", "window", "documents"),
        [
            (f"{row.loss:.4f}", row.task.task.name, f"{row.window:,}", _documents(row))
            for _, some in parts
            for row in some
        ],
    )
    ids = data.tasks[0].ids
    articles = "".join(
        show.article(f"{prefix}{name}{place}", _sample(row, name, place, run), ids)
        for name, some in parts
        for place, row in enumerate(some, 1)
    )
    return f"{html_page.note(note)}{table}<div class=samples>{articles}</div>"


def _losses(program: Program) -> Any:
    """Returns (params, maker, windows, seed) -> mean target loss of each window, float64 [W].

    It is NaN for a window without targets.
    """
    of_targets, mesh = likelihood.of_targets(program), program.mesh
    size = -(-_BATCH // mesh.size) * mesh.size

    def of(params: Any, maker: BatchMaker, indices_W: np.ndarray, seed: int) -> np.ndarray:
        found = []
        for some_W in np.split(indices_W, range(size, len(indices_W), size)):
            batch = pad_rows(maker.make(some_W, noise.evaluation_keys(seed, some_W)), size)
            log_WL = of_targets(params, put_batch(batch, mesh)).log_BL
            log_W = np.asarray(log_WL, np.float64).sum(axis=1)
            weights_W = batch[f"{target_side(batch)}_loss_weights"].sum(axis=1)
            with np.errstate(invalid="ignore"):
                found.append((-log_W / weights_W)[: len(some_W)])
        return np.concatenate(found)

    return of


def _lineage(row: _Row) -> tuple[Any, Any, str]:
    """Returns a row's places in its cache, its documents, and what a document is called."""
    lineage = Lineage(row.task.cache, row.task.manifest, _SPLIT)
    places = row.maker.windows.where(row.window)
    return places, lineage.parts(places), lineage.unit


def _documents(row: _Row) -> str:
    parts = _lineage(row)[1]
    return "; ".join(f"{part.id} [{part.first}:{part.first + part.tokens}]" for part in parts)


def _sample(row: _Row, name: str, place: int, run: Run) -> show.Sample:
    index = np.array([row.window])
    tokens_WN, lengths_W = row.maker.windows.read(index)
    tokens_N = tokens_WN[0, : int(lengths_W[0])]
    key = noise.evaluation_keys(run.config.seed, index)[0]
    lengths, objective = row.maker.example_lengths, row.maker.objective
    made = trace(objective, tokens_N, key, lengths, row.task.ids)
    places, parts, unit = _lineage(row)
    facts = (
        ("loss", f"{row.loss:.4f}"),
        ("task", row.task.task.name),
        ("window", f"{row.window:,}"),
        *show.features(made),
    )
    corpus = str(row.task.manifest.plan.corpus["spec"])
    title = f"{name.capitalize()} loss, {place}"
    return show.Sample(title, facts, places, parts, corpus, tokens_N, made, lengths, unit)


def _completed(run: Run, data: Data, count: int, cache_dir: str | None) -> str:
    """Returns validation rows with the model's text next to the original."""
    if not run.config.model.has_decoder:
        return html_page.note("Encoder-only models write no text.")
    makers = list(_makers(data))
    if not makers:
        return html_page.note("The caches have no validation rows.")
    most = run.lengths.targets or 0
    if not run.lengths.inputs:  # half of a row is the prompt
        most -= most // 2
    most = max(most, 16)
    decoding = Decoding(max_new_tokens=most, batch_size=min(count, _BATCH))
    generator = Generator(run.config.model_dir, decoding, cache_dir=cache_dir)
    shares = [len(part) for part in np.array_split(np.arange(count), len(makers))]
    parts = [html_page.note(f"By checkpoint {generator.step:,}, greedily; spans in colour.")]
    for (task, maker), share in zip(makers, shares, strict=True):
        if share:
            parts += _of_task(generator, task, maker, share, run.config.seed)
    return "".join(parts)


def _of_task(
    generator: Generator, task: CachedTask, maker: BatchMaker, count: int, seed: int
) -> Iterator[str]:
    windows = len(maker.windows)
    # The first and the last row may be short.
    indices_W = _spread(windows, count + 2)[1:-1] if windows > count + 1 else np.arange(windows)
    keys_W = noise.evaluation_keys(seed, indices_W)
    made = maker.objective.examples(
        *maker.windows.read(indices_W), keys_W, maker.example_lengths, task.ids
    )
    eos = generator.vocabulary.special.eos
    prompts, wanted = [], []
    for place in range(len(indices_W)):
        prompt, rest = (_feature(made, name, place) for name in ("inputs", "targets"))
        if not len(prompt):
            prompt, rest = np.split(rest, [max(1, len(rest) // 2)])
        prompts.append(prompt)
        wanted.append(rest)
    for place, found in enumerate(generator(prompts)):
        prompt = prompts[place][prompts[place] != eos]
        answers = (found.ids, wanted[place][wanted[place] != eos])
        heading = f"{task.task.name}, window {int(indices_W[place]):,}"
        strips = "".join(
            f"<section><h3>{name}</h3><div class=text dir=auto>"
            f"{_filled(task.ids, prompt, answer)}</div></section>"
            for name, answer in zip(("The model", "The text"), answers, strict=True)
        )
        yield (
            f"<article><h3>{html_page.text(heading)}</h3><div class='strips even'>{strips}</div>"
            "</article>"
        )


def _feature(made: Any, name: str, place: int) -> np.ndarray:
    if name not in made:
        return np.zeros(0, np.int32)
    values_WL, counts_W = made[name]
    return np.asarray(values_WL[place, : int(counts_W[place])], np.int32)


def _filled(ids: TokenIds, prompt: np.ndarray, answer: np.ndarray) -> str:
    """Returns, as HTML, a prompt with an answer's spans in its gaps, or followed by the answer."""
    spans = text.span_ids(ids, answer)
    tokens: list[int] = []
    places: list[int] = []  # gap number of each token; -1 in the prompt

    def add(more: Sequence[int], place: int) -> None:
        tokens.extend(more)
        places.extend([place] * len(more))

    gaps = 0
    for token in prompt.tolist():
        number = text.sentinel_number(ids, token)
        if number is None:
            add([token], -1)
        else:
            add(spans.get(number) or [token], gaps)
            gaps += 1
    if not gaps:
        add(answer[answer < ids.size].tolist(), 0)
    out = []
    said = [
        # A gap that the answer does not fill keeps its sentinel.
        one if text.sentinel_number(ids, token) is None else decode.piece(token, ids)
        for token, one in zip(tokens, decode.texts(tokens, ids), strict=True)
    ]
    parts = zip(places, said, strict=True)
    for place, group in itertools.groupby(parts, lambda pair: pair[0]):
        shown = html_page.text("".join(one for _, one in group))
        out.append(shown if place < 0 else f"<span class='s c{place % _COLOURS}'>{shown}</span>")
    return "".join(out)
