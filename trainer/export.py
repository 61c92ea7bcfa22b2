"""Writes a checkpoint as a folder of Hugging Face's transformers, and checks it there.

python -m trainer.export --model_dir=DIR --output=FOLDER [--step=N] [--custom_code]

The folder is written aside. Transformers loads it, computes logits of rows of the validation split,
and only if they are those of the trainer does the folder get its name.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.storage import files
from tasks.terminal import command_line
from tasks.terminal.command_line import Parser, UserError

if TYPE_CHECKING:
    from tasks.vocabulary import Vocabulary
    from trainer.data.features import Batch
    from trainer.huggingface.parity import Parity
    from trainer.huggingface.tokenizer import Match
    from trainer.setup import Run

EXIT_NOT_EQUAL = 1
# Rows whose logits are compared, a few at a time: 16 of 512 positions and 250,112 ids are 8 GB.
_ROWS, _BATCH_ROWS = 16, 2
# Windows of the validation split whose text both tokenizers are given.
_TEXTS = 200
# SentencePiece and Hugging Face's tokenizers choose otherwise among equally good cuts of a text,
# in one of a hundred windows or fewer. More is another normaliser or another model.
_DIFFERENT_TEXTS = 0.1


class NotEqual(Exception):
    """The folder does not do what the trainer does; says in what."""


def export(
    model_dir: str,
    output: str,
    step: int | None = None,
    *,
    cache_dir: str | None = None,
    vocabulary_path: str | None = None,
    max_shard_size: str = "5GB",
    custom_code: bool = False,
) -> tuple[int, Parity, Match]:
    """Exports the checkpoint of `step`, by default the newest.

    Returns:
      (the step, what the comparison of logits found, what that of tokenizers found).

    Raises:
      UserError: there is no such run or checkpoint, transformers has no such model, or `output`
        exists; nothing was written.
      NotEqual: transformers does not compute what the trainer does; nothing was left.
    """
    _check_packages()
    target = _target(output)

    from trainer.config import fields, load_config
    from trainer.huggingface import configs
    from trainer.setup import on_this_machine, prepare

    config, origins = load_config(model_dir)
    config = fields.replace(config, "model_dir", model_dir)
    if cache_dir:
        config = fields.replace(config, "cache_dir", cache_dir)
    reason = configs.refusal(config.model, custom_code)
    if reason:
        raise UserError(f"{model_dir} cannot become a model of transformers: {reason}")
    run = prepare(on_this_machine(config), origins)
    vocabulary = _vocabulary(run, vocabulary_path)
    if config.model.family == "llama" and "decoder_causal_attention" in _rows(run)[0]:
        raise UserError(
            f"{model_dir}: {config.task} shows prefixes in both directions, and LlamaForCausalLM "
            "sees what lies before alone"
        )

    from trainer.checkpoint import Checkpoints, chosen_steps
    from trainer.engine.program import Program

    checkpoints = Checkpoints(model_dir, writable=False)
    chosen = chosen_steps("latest" if step is None else str(step), checkpoints.steps(), model_dir)
    params = checkpoints.restore(chosen[0], Program(run).abstract_state()).params
    checkpoints.close()

    aside = tempfile.mkdtemp(prefix=f".{os.path.basename(target)}-", dir=os.path.dirname(target))
    try:
        parity, match = _write(aside, run, params, vocabulary, max_shard_size)
        from trainer.huggingface import card

        custom = config.model.family in configs.OF_CUSTOM_CODE
        text = card.model_card(
            run, chosen[0], os.path.basename(target), parity, match, custom_code=custom
        )
        files.write_bytes(os.path.join(aside, "README.md"), text.encode())
        os.chmod(aside, 0o755)
        os.rename(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return chosen[0], parity, match


def _check_packages() -> None:
    from trainer.huggingface import EXTRA

    for name in ("safetensors", "sentencepiece", "tokenizers", "torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise UserError(f"an export needs {name}: {EXTRA}")


def _target(output: str) -> str:
    if files.is_remote(output):
        raise UserError(f"--output={output}: give a local folder; transformers checks it there")
    target = os.path.abspath(files.local_path(output))
    if os.path.lexists(target):
        raise UserError(f"--output={output} exists: name another folder, or remove it")
    os.makedirs(os.path.dirname(target), exist_ok=True)
    return target


def _vocabulary(run: Run, path: str | None) -> Vocabulary:
    """That of the run's caches, or the one named, which must have as many ids."""
    from tasks import vocabulary
    from trainer.data.cached import CachedData

    extra_ids = 0
    if isinstance(run.data, CachedData):
        first = run.data.tasks[0]
        extra_ids = first.manifest.plan.vocabulary.extra_ids
        if path is None:
            return vocabulary.from_bytes(first.ids.model, extra_ids, first.cache)
    elif path is None:
        raise UserError(
            f"{run.config.task}: name the vocabulary as --vocabulary; only caches of "
            "pipeline.build bring it along"
        )
    loaded = vocabulary.load(path, extra_ids)
    if loaded.size != run.data.vocab_size:
        raise UserError(
            f"--vocabulary={path} has {loaded.size} ids, and the model was trained on "
            f"{run.data.vocab_size}"
        )
    return loaded


def _write(
    folder: str, run: Run, params: Any, vocabulary: Vocabulary, max_shard_size: str
) -> tuple[Parity, Match]:
    """Writes everything but the card, and checks it."""
    from trainer.huggingface import configs, names, parity, tokenizer, weights

    model = run.config.model
    converter = run.converter
    positions = max(converter.encoder_length, converter.decoder_length)
    written = configs.to_config(model, positions, mt5=run.config.preset.startswith("mt5"))
    files.write_json(os.path.join(folder, "config.json"), written)
    files.write_json(os.path.join(folder, "generation_config.json"), _generation(written))
    weights.write(folder, names.to_tensors(_plain_tree(params, run), model), max_shard_size)
    if written["model_type"] == configs.CUSTOM:
        source = os.path.join(os.path.dirname(names.__file__), f"modeling_{configs.CUSTOM}.py")
        shutil.copy(source, folder)
    decoder_only = model.architecture == "decoder"
    tokenizer.write(folder, vocabulary, decoder_only)

    theirs = parity.their_logits(parity.their_model(folder, written))
    found = parity.compare(parity.our_logits(model, params), theirs, _rows(run))
    if not found.holds:
        raise NotEqual(f"transformers computes something else: {found}; nothing was written")

    from transformers import AutoTokenizer

    match = tokenizer.compare(
        AutoTokenizer.from_pretrained(folder, trust_remote_code=decoder_only or None),
        vocabulary,
        _texts(run, vocabulary),
    )
    if len(match.different) > _DIFFERENT_TEXTS * match.texts:
        raise NotEqual(
            f"tokenizer.json gives other ids than SentencePiece for {len(match.different)} of "
            f"{match.texts} texts, the first {match.different[0][:60]!r}; nothing was written"
        )
    return found, match


def _generation(written: Mapping[str, Any]) -> dict[str, Any]:
    names = ("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id")
    return {name: written[name] for name in names if name in written}


def _plain_tree(params: Any, run: Run) -> Any:
    """NumPy arrays in the unscanned tree."""
    import jax

    from trainer.model.layers import unstack_layers

    params = jax.tree.map(np.asarray, params)
    return unstack_layers(params) if run.config.model.scan_layers else params


def _rows(run: Run) -> list[Batch]:
    """The first rows of the validation split, of every task some."""
    sets = run.data.evaluation("validation", _BATCH_ROWS)
    batches = -(-_ROWS // _BATCH_ROWS // len(sets))
    return [batch for one in sets for batch in itertools.islice(one.iterate(), batches)]


def _texts(run: Run, vocabulary: Vocabulary) -> list[str]:
    """Text of the validation split, a window each; none where there is no cache of ours."""
    from trainer.data.cached import CachedData

    if not isinstance(run.data, CachedData):
        return []
    first = run.data.tasks[0]
    windows = run.data.maker(first, "validation", keep_tails=True).windows
    chosen = np.unique(np.linspace(0, len(windows) - 1, _TEXTS).astype(np.int64))
    tokens_WN, lengths_W = windows.read(chosen)
    return [
        vocabulary.decode(tokens_N[:length])
        for tokens_N, length in zip(tokens_WN, lengths_W, strict=True)
    ]


def main(argv: list[str]) -> int:
    parser = Parser(prog="python -m trainer.export", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model_dir", required=True, help="where trainer.pretrain wrote")
    add("--output", required=True, help="folder to make; must not exist")
    add("--step", type=int, help="checkpoint (default: the newest)")
    add("--max_shard_size", default="5GB", help="largest file of weights")
    add("--vocabulary", help="SentencePiece model or its folder (default: the cache's)")
    add("--cache_dir", help="the cache, if it is no longer where training found it")
    add("--custom_code", action="store_true",
        help="write a modelling file for a model that transformers does not have")  # fmt: skip
    flags = parser.parse_args(argv)
    try:
        step, parity, match = export(
            flags.model_dir,
            flags.output,
            flags.step,
            cache_dir=flags.cache_dir,
            vocabulary_path=flags.vocabulary,
            max_shard_size=flags.max_shard_size,
            custom_code=flags.custom_code,
        )
    except NotEqual as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return EXIT_NOT_EQUAL
    print(f"{flags.output}: step {step:,}")
    print(f"model      {parity}")
    print(f"tokenizer  {match.texts - len(match.different)} of {match.texts} texts equal")
    return 0


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
