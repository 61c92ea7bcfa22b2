"""Exports a checkpoint to Hugging Face transformers.

    python -m trainer.export --model_dir=DIR --output=FOLDER [--step=N] [--custom_code]

The folder gets its name only after transformers has loaded it and computed the trainer's logits for
rows of the validation split.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.storage import files, whole_folder
from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.fields import REQUIRED, field
from tasks.vocabulary import PAIR_BORDER
from trainer.trained import trained_run

if TYPE_CHECKING:
    from tasks.vocabulary import Vocabulary
    from trainer.conversion.card import Named
    from trainer.data.features import Batch
    from trainer.data.prepared import Run
    from trainer.huggingface.parity import Parity
    from trainer.huggingface.tokenizer import Match, Roles

_EXIT_NOT_EQUAL = 1
# Rows whose logits are compared, and rows of a batch. Few at a time, since the logits of 16 rows of
# 512 positions and 250,112 ids are 8 GB.
_ROWS, _BATCH_ROWS = 16, 2
# Texts of the validation split that both tokenizers encode, and the most tokens of each: one tie
# makes a text differ, so a window of thousands of tokens would differ more often than not.
_TEXTS, _TEXT_TOKENS = 200, 128
# Largest allowed share of texts with different ids. SentencePiece and Hugging Face's tokenizers
# break ties between segmentations differently, which is no fault; a larger share of other texts
# means that the normaliser or the model differs.
_DIFFERENT_TEXTS = 0.1


class NotEqual(Exception):
    """The exported model or tokenizer computes something different from the trainer's."""


def export(
    model_dir: str,
    output: str,
    step: int | None = None,
    *,
    cache_dir: str | None = None,
    vocabulary_path: str | None = None,
    max_shard_size: str = "5GB",
    custom_code: bool = False,
    named: Named | None = None,
) -> tuple[int, Parity, Match | None]:
    """Exports a checkpoint to a folder of transformers.

    Args:
      model_dir: folder of the run.
      output: local folder to write, which must not exist.
      step: step of the checkpoint; the newest if None.
      cache_dir: folder of caches by task, if they were moved after training.
      vocabulary_path: as `tasks.vocabulary.load` takes it; the cache's if None.
      max_shard_size: largest size of a weights file, as "5GB".
      custom_code: writes a modelling file for a model that transformers does not have.
      named: what only the user knows, for the model card.

    Returns:
      (step, comparison of the logits, comparison of the tokenizers: None if the vocabulary is a
      class of --task_module, of which only the pieces are written).

    Raises:
      UserError: there is no such run or checkpoint, transformers does not have the model, or
        `output` exists. Nothing was written.
      NotEqual: transformers computes different logits or ids. Nothing was written.
    """
    _check_packages()
    from trainer.conversion import card, record
    from trainer.huggingface import configs, weights

    shard_bytes = weights.size(max_shard_size)
    target = _target(output)
    run = _open_run(model_dir, cache_dir, custom_code)
    vocabulary = trained_run.vocabulary_of(run, vocabulary_path)
    step, params = trained_run.restore(run, step, vocabulary)
    name = os.path.basename(target)
    with files.naming_full_disk(target), whole_folder.written(target) as partial:
        parity, match = _write(partial, run, params, vocabulary, shard_bytes)
        custom = run.config.model.family in configs.OF_CUSTOM_CODE
        text = card.model_card(run, step, name, parity, match, custom, named or card.Named())
        files.write_bytes(os.path.join(partial, "README.md"), text.encode())
        made = record.of_export(model_dir, step, vocabulary_path)
        files.write_json(os.path.join(partial, record.FILE), made)
    return step, parity, match


def _open_run(model_dir: str, cache_dir: str | None, custom_code: bool) -> Run:
    """Returns the run in `model_dir`, prepared for this machine.

    Raises:
      UserError: there is no such run, or transformers does not have its model.
    """
    from trainer.config import load_config
    from trainer.huggingface import configs

    config, _ = load_config(model_dir)
    if not config.task:
        raise UserError(
            f"{model_dir} was converted and has no data to compare logits on: use python -m "
            f"trainer.convert --from={model_dir} --format=huggingface"
        )
    reason = configs.refusal(config.model, custom_code)
    if reason:
        raise UserError(f"{model_dir} cannot be exported to transformers: {reason}")
    run = trained_run.open_run(model_dir, cache_dir)
    if config.model.family == "llama" and "decoder_causal_attention" in _rows(run)[0]:
        raise UserError(
            f"{model_dir}: {config.task} shows prefixes in both directions, but LlamaForCausalLM "
            "attends to earlier positions only"
        )
    return run


def _check_packages() -> None:
    from trainer.huggingface import EXTRA

    for name in ("safetensors", "sentencepiece", "tokenizers", "torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise UserError(f"exporting needs the package {name}: {EXTRA}")


def _target(output: str) -> str:
    if files.is_remote(output):
        raise UserError(f"--output={output}: give a local folder, from which transformers can load")
    target = os.path.abspath(files.local_path(output))
    if os.path.lexists(target):
        raise UserError(f"--output={output} exists: name another folder, or delete it")
    files.make_folder(os.path.dirname(target))
    return target


def _write(
    folder: str, run: Run, params: Any, vocabulary: Vocabulary, shard_bytes: int
) -> tuple[Parity, Match | None]:
    """Writes everything except the model card, and checks it.

    Raises:
      NotEqual: transformers computes different logits or ids.
    """
    from trainer.conversion import card
    from trainer.huggingface import configs, folding, names, parity, tokenizer, weights

    model = run.config.model
    converter = run.converter
    positions = max(converter.encoder_length, converter.decoder_length)
    mt5 = run.config.preset.startswith("mt5")
    written = configs.to_config(model, positions, mt5, vocabulary.special)
    files.write_json(os.path.join(folder, "config.json"), written)
    files.write_json(
        os.path.join(folder, "generation_config.json"), card.generation_config(written)
    )
    plain, exported = _plain_tree(params, run), configs.exportable(model)[0]
    if exported != model:
        plain = folding.fold(plain, model)
    tensors = names.to_tensors(plain, exported, written["model_type"])
    weights.write(folder, tensors, shard_bytes)
    if written["model_type"] == configs.CUSTOM:
        source = os.path.join(os.path.dirname(names.__file__), f"modeling_{configs.CUSTOM}.py")
        shutil.copy(source, folder)
    tokenizer.write(folder, vocabulary, _roles(run, vocabulary))

    theirs = parity.their_logits(parity.their_model(folder, written))
    found = parity.compare(parity.our_logits(model, params), theirs, _rows(run))
    if not found.holds:
        raise NotEqual(f"transformers computes different logits: {found}; nothing was written")

    if vocabulary.is_registered:
        return found, None

    from transformers import AutoTokenizer

    match = tokenizer.compare(
        AutoTokenizer.from_pretrained(
            folder, trust_remote_code=written["model_type"] == configs.CUSTOM or None
        ),
        vocabulary,
        _texts(run, vocabulary),
    )
    allowed = _DIFFERENT_TEXTS if vocabulary.is_sentencepiece else 0
    if len(match.different) - match.ties > allowed * match.texts:
        raise NotEqual(
            f"the written tokenizer.json and {vocabulary.codec.library} give different ids for "
            f"{len(match.different)} of {match.texts} texts, the first "
            f"{match.different[0][:60]!r}; nothing was written"
        )
    return found, match


def _roles(run: Run, vocabulary: Vocabulary) -> Roles:
    """Returns the pieces that begin, end and mask texts, as in training."""
    from trainer.huggingface.tokenizer import Roles

    architecture = run.config.model.architecture
    if architecture == "decoder":
        return Roles(begins=vocabulary.piece(vocabulary.special.start), ends=False)
    if architecture == "encoder":
        objective = run.data.tasks[0].task.objective  # type: ignore[attr-defined]
        return Roles(begins=objective.classify, mask=objective.mask)
    return Roles()


def _plain_tree(params: Any, run: Run) -> Any:
    """Returns parameters as NumPy arrays in the tree of the unscanned model."""
    import jax

    from trainer.model.layers import unstack_layers

    params = jax.tree.map(np.asarray, params)
    return unstack_layers(params) if run.config.model.scan_layers else params


def _rows(run: Run) -> list[Batch]:
    """Returns batches of the first rows of the validation split, of every task."""
    try:
        sets = run.data.evaluation("validation", _BATCH_ROWS)
    except UserError:  # nothing was held out
        sets = run.data.evaluation("train", _BATCH_ROWS)
    batches = -(-_ROWS // _BATCH_ROWS // len(sets))
    return [batch for one in sets for batch in itertools.islice(one.iterate(), batches)]


def _texts(run: Run, vocabulary: Vocabulary) -> list[str]:
    """Returns texts of windows of the validation split; none if seqio reads the data."""
    from trainer.data.cached import CachedData

    if not isinstance(run.data, CachedData):
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
    # The border of a pair is no token.
    return [vocabulary.decode(parts[place][parts[place] != PAIR_BORDER]) for place in taken]


def _compared(match: Match | None) -> str:
    if match is None:
        return "none, as the vocabulary is a class of --task_module: vocabulary.json has its pieces"
    ties = f", {match.ties} others ids of the same score" if match.ties else ""
    equal = match.texts - len(match.different)
    return f"{equal} of {match.texts} texts have equal ids{ties}"


def _push(repository: str, model_dir: str, step: int, output: str) -> None:
    """Uploads an exported folder with the run's facts as the commit's message."""
    from trainer.config import load_config
    from trainer.huggingface import hub

    config, _ = load_config(model_dir)
    facts = {
        "preset": config.preset,
        "task": config.task,
        "updates": f"{step:,} of {config.batch_size} rows",
        "optimizer": config.optimizer.name,
        "seed": config.seed,
    }
    text = "\n".join(f"{name}: {value}" for name, value in facts.items())
    message = f"Step {step:,} of {config.preset} on {config.task}"
    url = hub.push(files.local_path(output), repository, step, message, text)
    print(f"uploaded   {url}")


def _is_made(flags: Flags) -> int | None:
    """Returns the step that an earlier command exported to the folder, None if there is none.

    Raises:
      UserError: something else is there.
    """
    from trainer.conversion import record
    from trainer.t5x import read

    found = read.steps(flags.model_dir)
    step = flags.step if flags.step is not None else found[-1] if found else 0
    target = record.place(flags.output)
    made = record.of_export(flags.model_dir, step, flags.vocabulary)
    return step if record.is_finished(target, made, "--output") else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """What only the user knows, for the model card."""

    license: str = field("", "licence of the weights, as apache-2.0")
    language: tuple[str, ...] = field((), "languages of the corpus, as en,ro")
    datasets: tuple[str, ...] = field(
        (), "data sets of the Hub that the corpus comes from; by default, those of hf: corpora"
    )
    base_model: str = field("", "model of the Hub that the training started from")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    model_dir: str = field(REQUIRED, "folder of the run, local or remote")
    output: str = field(REQUIRED, "local folder to write, which must not exist")
    step: int | None = field(None, "step of the checkpoint; None: the newest")
    max_shard_size: str = field("5GB", "largest size of a weights file, as 5GB or 300MB")
    vocabulary: str | None = field(None, "folder or file of the vocabulary; None: the cache's")
    cache_dir: str | None = field(None, "folder of caches by task, if they have moved")
    custom_code: bool = field(
        False, "write a modelling file for a model that transformers does not have"
    )
    push_to: str | None = field(
        None,
        "upload the folder to this repository of the Hub, as main and as a branch step_N, with the "
        "token in HF_TOKEN; a folder that was exported before is uploaded as it is",
        metavar="OWNER/NAME",
    )
    card: Card = field(Card, "the model card", flat=True)


def run(flags: Flags) -> int:
    """Exports; returns 1 if transformers computes something different."""
    from trainer.conversion.card import Named

    if flags.push_to:
        from trainer.huggingface import hub

        _check_packages()
        hub.check(flags.push_to)
        if (made := _is_made(flags)) is not None:
            print(f"{flags.output}: step {made:,} is there already")
            _push(flags.push_to, flags.model_dir, made, flags.output)
            return 0
    try:
        step, parity, match = export(
            flags.model_dir,
            flags.output,
            flags.step,
            cache_dir=flags.cache_dir,
            vocabulary_path=flags.vocabulary,
            max_shard_size=flags.max_shard_size,
            custom_code=flags.custom_code,
            named=Named(*dataclasses.astuple(flags.card)),
        )
    except NotEqual as error:
        print(f"trainer.export: {error}", file=sys.stderr)
        return _EXIT_NOT_EQUAL
    print(f"{flags.output}: step {step:,}")
    print(f"model      {parity}")
    print(f"tokenizer  {_compared(match)}")
    if flags.push_to:
        _push(flags.push_to, flags.model_dir, step, flags.output)
    return 0


main = Command(Flags, run, at_once="run the same command again", terminated=True)

if __name__ == "__main__":
    main.start()
