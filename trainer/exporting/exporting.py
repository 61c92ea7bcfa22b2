"""Exports a run's checkpoint to transformers and verifies its logits and token ids."""

import dataclasses
import itertools
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from tasks import annexes
from tasks.storage import files, whole_folder
from tasks.terminal.command_line import UserError
from tasks.vocabulary import PAIR_BORDER, Vocabulary
from trainer.checkpoints import stored
from trainer.config import load_config
from trainer.data import features
from trainer.data.features import Batch
from trainer.data.run import Run
from trainer.exporting import card, folder, record, token_ids
from trainer.exporting.folder import Model, Settings
from trainer.huggingface import configs, hub, parity, require_packages, weights
from trainer.huggingface.folder_parity import NotEqual
from trainer.huggingface.parity import Parity
from trainer.huggingface.tokenizer import Match, Roles
from trainer.inference import trained_run
from trainer.model.layers import unstack_layers
from trainer.model.paths import named as named_arrays

# Number of rows to compare, and rows per batch. Batches are small because logits of 16 rows of 512
# positions and 250,112 ids take 8 GB.
_ROWS, _BATCH_ROWS = 16, 2
# Number of validation texts that both tokenizers encode, and maximum tokens per text. One tie makes
# a whole text differ, so most windows of thousands of tokens would differ.
_TEXTS, _TEXT_TOKENS = 200, 128


def export(
    model_dir: str,
    output: str,
    step: int | None = None,
    *,
    average: str | None = None,
    cache_dir: str | None = None,
    vocabulary_path: str | None = None,
    max_shard_size: str = "5GB",
    custom_code: bool = False,
    facts: Mapping[str, Any] | None = None,
    notes: str | None = None,
) -> tuple[int, Parity, Match | None]:
    """Exports a checkpoint, the newest if `step` is None, to a new transformers folder.

    `average` chooses averaged parameters, "last:K". `facts` and the Markdown file
    `notes` are for its model card.

    Returns (step, comparison of logits, comparison of tokenizers). The last is None if the
    vocabulary is a class in --task_module; then only its pieces are written. If transformers
    computes different logits or ids, nothing is written and NotEqual is raised.
    """
    check_packages()
    shard_bytes = weights.size(max_shard_size)
    target = _target(output)
    ending = _notes(notes) if notes else ""
    run = _open_run(model_dir, cache_dir, custom_code)
    vocabulary = trained_run.vocabulary_of(run, vocabulary_path)
    step, params = trained_run.restore(run, step, vocabulary, average)
    name = os.path.basename(target)
    with files.naming_full_disk(target), whole_folder.written(target) as partial:
        settings = Settings(vocabulary=vocabulary, shard_bytes=shard_bytes)
        parity, match = _write(partial, run, params, settings)
        custom = configs.has_custom_code(run.config.model.family)
        text = card.model_card(run, step, name, parity, match, custom, facts or {}, average)
        files.write_bytes(os.path.join(partial, "README.md"), (text + ending).encode())
        made = record.of_export(model_dir, step, vocabulary_path, average)
        files.write_json(os.path.join(partial, record.FILE), made)
    return step, parity, match


def _notes(path: str) -> str:
    """Returns the text of a Markdown file, with its headings below those of a model card."""
    try:
        lines = files.read_bytes(path).decode().splitlines()
    except (FileNotFoundError, IsADirectoryError) as error:
        raise UserError(f"--notes={path}: no such file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--notes={path} is not UTF-8 text") from error
    is_code, found = False, [""]
    for line in lines:
        is_code ^= line.startswith("```")
        found.append(f"#{line}" if line.startswith("#") and not is_code else line)
    return "\n".join(found) + "\n"


def _open_run(model_dir: str, cache_dir: str | None, custom_code: bool) -> Run:
    config, _ = load_config(model_dir)
    advice = annexes.advice("export_without_data")
    if not config.task:
        raise UserError(f"{model_dir} was converted and has no data to compare logits on{advice}")
    reason = configs.refusal(config.model, custom_code)
    if reason:
        raise UserError(f"{model_dir} cannot be exported to transformers: {reason}")
    run = trained_run.open_run(model_dir, cache_dir)
    if isinstance(run.data, trained_run.NoData):
        raise UserError(
            f"{model_dir} cannot be exported without data to compare logits on: name its caches "
            f"with --cache_dir{advice}"
        )
    if config.model.family == "llama" and "decoder_causal_attention" in _rows(run)[0]:
        raise UserError(
            f"{model_dir}: {config.task} shows prefixes in both directions, but LlamaForCausalLM "
            "attends to earlier positions only"
        )
    return run


def check_packages() -> None:
    wanted = ("safetensors", "sentencepiece", "tokenizers", "torch", "transformers")
    require_packages(wanted, "exporting")


def _target(output: str) -> str:
    if files.is_remote(output):
        raise UserError(f"--output={output}: give a local folder, so that transformers can load it")
    target = os.path.abspath(files.local_path(output))
    if os.path.lexists(target):
        raise UserError(f"--output={output} exists: name another folder, or delete it")
    files.make_folder(os.path.dirname(target))
    return target


def _write(path: str, run: Run, params: Any, settings: Settings) -> tuple[Parity, Match | None]:
    model, vocabulary = run.config.model, settings.vocabulary
    assert vocabulary is not None
    if not model.has_decoder:
        objective: Any = run.data.tasks[0].task.objective
        types = model.token_types > 1
        roles = Roles(begins=objective.classify, mask=objective.mask, types=types)
        settings = dataclasses.replace(settings, roles=roles)
    positions = features.longest_row(run.config)
    params = jax.tree.map(np.asarray, params)
    plain = named_arrays(unstack_layers(params) if model.scan_layers else params)
    exported, arrays = folder.for_transformers(model, plain)
    written = folder.to_transformers(
        path, Model(exported, run.config.preset, positions), arrays, settings
    )
    theirs = parity.their_logits(parity.their_model(path, written))
    found = parity.compare(parity.our_logits(model, params), theirs, _rows(run))
    if not found.holds:
        raise NotEqual(f"transformers computes different logits: {found}; nothing was written")

    if vocabulary.is_registered:
        return found, None
    match = token_ids.compare(path, written, vocabulary, _texts(run, vocabulary))
    return found, match


def _rows(run: Run) -> list[Batch]:
    """Returns batches of the first validation rows of every task."""
    try:
        sets = run.data.evaluation("validation", _BATCH_ROWS)
    except UserError:  # nothing was held out
        sets = run.data.evaluation("train", _BATCH_ROWS)
    batches = -(-_ROWS // _BATCH_ROWS // len(sets))
    return [batch for one in sets for batch in itertools.islice(one.iterate(), batches)]


def _texts(run: Run, vocabulary: Vocabulary) -> list[str]:
    """Returns texts of validation windows; none if seqio reads the data."""
    if not run.data.tasks:
        return []
    first = run.data.tasks[0]
    splits = first.manifest.splits
    split = "validation" if "validation" in splits else "train"
    windows = run.data.maker(first, split, keep_tails=True).windows
    if not len(windows):
        windows = run.data.maker(first, "train", keep_tails=True).windows
    chosen = np.unique(np.linspace(0, len(windows) - 1, _TEXTS).astype(np.int64))
    tokens_WN, lengths_W = windows.read(chosen)
    parts = [
        tokens_N[begin : min(begin + _TEXT_TOKENS, length)]
        for tokens_N, length in zip(tokens_WN, lengths_W, strict=True)
        for begin in range(0, length, _TEXT_TOKENS)
    ]
    taken = np.unique(np.linspace(0, len(parts) - 1, _TEXTS).astype(np.int64))
    # PAIR_BORDER is not a token.
    return [vocabulary.decode(parts[place][parts[place] != PAIR_BORDER]) for place in taken]


def check_push(repository: str) -> None:
    """Raises UserError, before any work is done, for an export or upload that cannot succeed."""
    check_packages()
    hub.check(repository)


def push(repository: str, model_dir: str, step: int, output: str) -> None:
    """Uploads an exported folder; the commit message has facts about the run."""
    config, _ = load_config(model_dir)
    facts = {
        "preset": config.preset,
        "task": config.task,
        "updates": f"{step:,} of {config.phases.described(step)} rows",
        "optimizer": config.optimizer.name,
        "seed": config.seed,
    }
    text = "\n".join(f"{name}: {value}" for name, value in facts.items())
    message = f"Step {step:,} of {config.preset} on {config.task}"
    url = hub.push(files.local_path(output), repository, step, message, text)
    print(f"uploaded   {url}")


def is_made(
    model_dir: str, output: str, step: int | None, vocabulary: str | None, average: str | None
) -> int | None:
    """Returns the step if an earlier command exported it to `output`, else None."""
    found = stored.steps(model_dir)
    step = step if step is not None else found[-1] if found else 0
    made = record.of_export(model_dir, step, vocabulary, average)
    return step if record.is_finished(record.place(output), made, "--output") else None


def compared(match: Match | None) -> str:
    """Describes the comparison of the tokenizers."""
    if match is None:
        return "none: the vocabulary is a class in --task_module; vocabulary.json has its pieces"
    return token_ids.described(match)
