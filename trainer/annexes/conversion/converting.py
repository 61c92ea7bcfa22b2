"""Converts checkpoints and checks the result."""

import dataclasses
import importlib.util
import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from tasks.storage import files, whole_folder
from tasks.terminal.command_line import UserError
from trainer.annexes.conversion import sources, targets, verify
from trainer.annexes.conversion.sources import Given, Opened
from trainer.annexes.conversion.targets import Settings
from trainer.checkpoints import metadata
from trainer.checkpoints.checkpoint import chosen_steps
from trainer.data.run import Run
from trainer.exporting import card, folder, record, token_ids
from trainer.exporting.folder import Arrays
from trainer.huggingface import configs, hub
from trainer.model.config import ModelConfig


class Converted(NamedTuple):
    """A converted checkpoint's path, step and check results."""

    path: str
    step: int
    checks: tuple[str, ...]


def convert(
    source: str,
    target: str,
    settings: Settings,
    given: Given,
    steps: str = "all",
    push_to: str | None = None,
) -> list[Converted]:
    """Converts the checkpoints at `source`, oldest first, and prints a line for each.

    Names and shapes of all checkpoints are checked before the first is written. If a written
    checkpoint differs from its source, it is deleted and NotEqual is raised.
    """
    if files.is_remote(target):
        raise UserError(f"--to={target}: give a local folder")
    target = os.path.abspath(files.local_path(target))
    found, several = sources.find(source)
    wanted = chosen_steps(steps, [each.step for each in found], source)
    found = [each for each in found if each.step in wanted]
    for each in found:
        targets.refuse(sources.opened(each, given), settings)
    made = []
    for each in found:
        in_folder = several or settings.format != targets.HUGGING_FACE
        made.append(write(sources.opened(each, given), target, in_folder, settings))
        if push_to:
            _push(made[-1], push_to, each.path, last=each is found[-1])
    return made


def _push(made: Converted, repository: str, source: str, last: bool) -> None:
    message = f"Step {made.step:,}, converted from {os.path.basename(source.rstrip('/'))}"
    url = hub.push(made.path, repository, made.step, message, "\n".join(made.checks), last)
    print(f"{made.path}: uploaded to {url}", flush=True)


def write(opened: Opened, target: str, in_folder: bool, settings: Settings) -> Converted:
    """Writes and checks an opened checkpoint and prints a line; keeps a finished conversion.

    `in_folder` writes `target/checkpoint_STEP` rather than `target` itself.
    """
    path = os.path.join(target, f"checkpoint_{opened.step}") if in_folder else target
    vocabulary = settings.vocabulary
    conversion = {
        "from": record.place(opened.source.path),
        "step": opened.step,
        "format": settings.format,
        "dtype": settings.dtype,
        "scanned": settings.scanned,
        "model": dataclasses.asdict(opened.model.config),
        "name": opened.model.name,
        "positions": opened.model.positions,
        "ids": opened.model.ids,
        "vocabulary_sha256": vocabulary.record.sha256 if vocabulary else None,
    }
    made = json.loads(files.json_bytes(conversion))  # the values that a reader gets
    if settings.format != targets.HUGGING_FACE:
        metadata.check_folder(target, "--to")
    run = None
    if settings.format == targets.OURS:
        run = targets.run_of(target, opened, settings)
        targets.write_run_files(run, vocabulary)
    if record.is_finished(path, made):
        before = tuple(record.checks(path))
        _require_compared(path, before, settings)
        print(f"{path}: is there already", flush=True)
        return Converted(path, opened.step, before)
    arrays = targets.values(opened, settings.dtype)
    with files.naming_full_disk(path), whole_folder.written(path) as partial:
        checks = _write(partial, os.path.basename(path), opened, arrays, settings, run)
        _require_compared(path, checks, settings)
        made["checks"] = checks
        files.write_json(os.path.join(partial, record.FILE), made)
    print(f"{path}: step {opened.step:,}; {'; '.join(checks)}", flush=True)
    return Converted(path, opened.step, checks)


def _write(
    partial: str, name: str, opened: Opened, arrays: Arrays, settings: Settings, run: Run | None
) -> tuple[str, ...]:
    logits = ""
    if opened.source.transformers:
        plain = targets.values(opened, "float32")
        logits = verify.logits(opened.source.path, opened.model.config, plain)
    if settings.format == targets.HUGGING_FACE:
        model, folded = folder.for_transformers(opened.model.config, arrays)
        plain_model = opened.model._replace(config=model)
        written = folder.to_transformers(partial, plain_model, folded, settings)
        count = verify.transformers_arrays(partial, model, written["model_type"], folded)
        logits = verify.logits(partial, opened.model.config, arrays)
        checks = (*_checks(count, logits), *_ids(partial, written, settings))
        source = os.path.basename(opened.source.path.rstrip("/"))
        has_tokenizer = bool(settings.vocabulary and not settings.vocabulary.is_registered)
        text = _card(model, name, source, opened.step, checks, has_tokenizer)
        files.write_bytes(os.path.join(partial, "README.md"), text.encode())
        return checks
    if run:
        moments = targets.to_ours(partial, run, opened, arrays, settings)
    else:
        moments = targets.to_t5x(partial, opened, arrays, settings)
    inside = os.path.join(partial, f"checkpoint_{opened.step}")
    count = verify.checkpoint_arrays(inside, arrays)
    for entry in os.listdir(inside):
        os.rename(os.path.join(inside, entry), os.path.join(partial, entry))
    os.rmdir(inside)
    return (*_checks(count, logits), moments)


def _require_compared(path: str, checks: tuple[str, ...], settings: Settings) -> None:
    """Raises UserError if logits were not compared and the settings do not agree to that."""
    for check in checks:
        if verify.NOT_COMPARED in check and not settings.unverified:
            why = check.partition(verify.NOT_COMPARED)[2]
            raise UserError(
                f"{path}: its logits cannot be compared with transformers': {why}; remove the "
                "reason, or convert with --unverified"
            )


def _ids(path: str, written: dict[str, Any], settings: Settings) -> tuple[str, ...]:
    """Returns the check of the written tokenizer; none if there is none."""
    vocabulary = settings.vocabulary
    if not vocabulary or vocabulary.is_registered:
        return ()
    if importlib.util.find_spec("transformers") is None:
        return ("ids: not compared: the package transformers is not installed",)
    match = token_ids.compare(path, written, vocabulary, verify.texts_of_pieces(vocabulary))
    return (f"ids: {token_ids.described(match)}",)


def _checks(count: int, logits: str) -> tuple[str, ...]:
    arrays = f"{count} parameters equal the source's bit for bit, in the stored precision"
    return (arrays, f"logits: {logits}") if logits else (arrays,)


def _card(
    model: ModelConfig, name: str, source: str, step: int, checks: Sequence[str], tokenizer: bool
) -> str:
    """Returns a converted model's README.md, whose example calls the model `name`."""
    lines = [
        *card.head(model, {}),
        f"# {name}",
        "",
        f"{source}, after {step:,} updates, converted with Palimpsest.",
        "",
    ]
    if tokenizer:
        lines += [*card.example(model, name, configs.has_custom_code(model.family)), ""]
    lines += ["## Checked on conversion", "", *(f"- {check}." for check in checks)]
    return "\n".join(lines) + "\n"
