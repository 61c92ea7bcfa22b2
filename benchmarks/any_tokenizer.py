"""Takes six tokenizers of real size from a corpus to transformers, and checks every step.

    python -m benchmarks.any_tokenizer --corpus='parquet:data/*.parquet' --output=DIR

Each tokenizer is trained on the corpus. Its cache is built, and stock seqio reads it: the rows must
be the ids of the documents, one after another. A tiny model is trained on it and exported.
`AutoTokenizer` must give the ids of every document, and the Auto class of the model the trainer's
logits. Prints a table; the exit code is 1 if anything differs.
"""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tasks import vocabulary
from tasks.reading import sources
from tasks.terminal import command_line
from tasks.terminal.command_line import Parser, UserError, positive
from tasks.terminal.table import table
from tests import small_tokenizers

_ROW_TOKENS = 128


class Kind(NamedTuple):
    """A tokenizer, with a model that is usual for it.

    Attributes:
      make: (corpus, its texts, folder) -> its folder.
      preset: the model.
      objective: what it learns.
      extra_ids: sentinels to add.
    """

    make: Callable[[str, list[str], pathlib.Path], str]
    preset: str
    objective: str
    extra_ids: int = 0


def _trained(kind: str, size: int, *more: str) -> Callable[[str, list[str], pathlib.Path], str]:
    def make(corpus: str, texts: list[str], folder: pathlib.Path) -> str:
        from vocab import train_tokenizer

        what = [f"--kind={kind}", f"--vocab_size={size}", "--extra_ids=0", *more]
        train_tokenizer.main([f"--corpus={corpus}", f"--output={folder}", *what])
        return str(folder)

    return make


def _small(name: str, size: int) -> Callable[[str, list[str], pathlib.Path], str]:
    def make(corpus: str, texts: list[str], folder: pathlib.Path) -> str:
        if not folder.exists():
            lines = [line for text in texts for line in text.splitlines()]
            getattr(small_tokenizers, name)(folder, lines, size)
        return str(folder)

    return make


KINDS = {
    "byte-level BPE, T5's ids, 32,000": Kind(
        _trained("byte_bpe", 32_000), "t5_1_1_tiny", "span_corruption", 100
    ),
    # GPT-2's: one special token, which comes last, so that id 0 is a piece.
    "byte-level BPE, GPT-2's ids, 50,257": Kind(_small("gpt2", 50_256), "llama_tiny", "full_lm"),
    "WordPiece, cased, 28,996": Kind(
        _trained("wordpiece", 28_996, "--cased"), "bert_tiny", "masked_lm", 2
    ),
    "WordPiece, uncased, 30,522": Kind(_trained("wordpiece", 30_522), "bert_tiny", "masked_lm", 2),
    "SentencePiece BPE, Llama's ids, 32,000": Kind(
        _small("llama", 32_000), "llama_tiny", "full_lm"
    ),
    "bytes, ByT5's ids": Kind(
        lambda corpus, texts, folder: "bytes", "t5_1_1_tiny", "span_corruption", 125
    ),
}
_LENGTHS = {
    "span_corruption": {"inputs": 128, "targets": 34},
    "full_lm": {"targets": 128},
    "masked_lm": {"inputs": 128, "targets": 128},
}


class Result(NamedTuple):
    """The results of one tokenizer.

    Attributes:
      ids: number of ids, with sentinels.
      seqio: examples that stock seqio makes of the cache, whose rows are the documents' ids.
      losses: the loss of the first and of the last update.
      texts: documents whose ids `AutoTokenizer` gives, and all that do not spell a special token.
      logits: largest difference of a logit of `AutoModel` from the trainer's.
      seconds: time of everything.
    """

    ids: int
    seqio: int
    losses: tuple[float, float]
    texts: tuple[int, int]
    logits: float
    seconds: float


def run(kind: Kind, corpus: str, texts: list[str], folder: pathlib.Path, steps: int) -> Result:
    """Takes one tokenizer from the corpus to transformers.

    Raises:
      UserError: one of the commands fails, or seqio reads something else than the corpus.
    """
    from pipeline import build
    from trainer import export, pretrain

    begun = time.monotonic()
    path = kind.make(corpus, texts, folder / "tokenizer")
    loaded = vocabulary.load(path, kind.extra_ids)
    task = f"any_{kind.objective}"
    built = [f"--name=any --task={kind.objective} --row_tokens={_ROW_TOKENS}", f"--corpus={corpus}"]
    build.main(
        [
            *built[0].split(),
            *(built[1], f"--vocabulary={path}", f"--extra_ids={kind.extra_ids}"),
            *(f"--cache_dir={folder}/cache", "--max_quarantined=0.2"),
        ]
    )
    examples = _read_by_seqio(kind, task, path, corpus, f"{folder}/cache")
    lengths = [f"--lengths.{side}={size}" for side, size in _LENGTHS[kind.objective].items()]
    more = ["--objective=mask=[MASK],classify=[CLS]"] if kind.objective == "masked_lm" else []
    code = pretrain.main(
        [
            *(f"--preset={kind.preset}", f"--task={task}", f"--cache_dir={folder}/cache"),
            *(f"--model_dir={folder}/model", f"--train_steps={steps}", "--batch_size=8"),
            *("--evaluation.every_steps=0", "--metrics.every_steps=1", *lengths, *more),
        ]
    )
    if code:
        raise UserError(f"training on {path} ended with {code}")
    lines = (folder / "model" / "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line).get("metrics", {}) for line in lines]
    losses = [metrics["loss"] for metrics in logged if "loss" in metrics]
    exported = f"{folder}/exported"
    if not pathlib.Path(exported).exists():
        export.export(f"{folder}/model", exported)
    equal, compared = _tokenizer(exported, loaded, texts)
    logits = _logits(f"{folder}/model", exported, loaded)
    seconds = time.monotonic() - begun
    return Result(
        loaded.size, examples, (losses[0], losses[-1]), (equal, compared), logits, seconds
    )


def _read_by_seqio(kind: Kind, task: str, path: str, corpus: str, caches: str) -> int:
    """Returns how many examples stock seqio reads, after comparing all rows of the cache.

    Raises:
      UserError: the rows are not the ids of the documents, one after another.
    """
    import seqio

    from tasks import registry, seqio_tasks

    (found,) = seqio_tasks.register(
        path, corpus, [task], extra_ids=kind.extra_ids, row_tokens=_ROW_TOKENS
    )
    seqio.set_global_cache_dirs([caches])
    lengths = _LENGTHS[kind.objective]
    examples = found.get_dataset(lengths, "train", use_cached=True, shuffle=False, seed=0)
    count = sum(1 for _ in examples)

    loaded = vocabulary.load(path, kind.extra_ids)
    seqio.TaskRegistry.remove(task)
    plain = seqio.TaskRegistry.add(
        task,
        source=found.source,
        preprocessors=[seqio.CacheDatasetPlaceholder()],
        output_features={"targets": seqio.Feature(seqio_tasks.text_vocabulary(loaded))},
    )
    # Shard by shard: seqio reads several at a time otherwise.
    shards = json.loads(pathlib.Path(caches, task, "info.train.json").read_text())["num_shards"]
    parts = [
        plain.get_dataset(
            None,
            "train",
            use_cached=True,
            shuffle=False,
            shard_info=seqio.ShardInfo(number, shards),
        )
        for number in range(shards)
    ]
    stored = np.concatenate([row["targets"] for rows in parts for row in rows.as_numpy_iterator()])
    ends = registry.get(task).objective.separator == "eos"
    wanted = [
        np.append(ids, loaded.special.eos) if ends else ids
        for ids in loaded.encode(_texts(corpus, "train"))
        if len(ids) and not loaded.reserved[ids].any()
    ]
    if not np.array_equal(stored, np.concatenate(wanted)):
        raise UserError(f"seqio reads {len(stored):,} ids that are not those of the documents")
    return count


def _tokenizer(folder: str, loaded: vocabulary.Vocabulary, texts: list[str]) -> tuple[int, int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    # In transformers the name of a special token is always that token; it may be text in training.
    special = loaded.special_pieces().values()
    texts = [text for text in texts if not any(name in text for name in special)]
    theirs = tokenizer(texts, add_special_tokens=False)["input_ids"]
    pairs_of_ids = zip(theirs, loaded.encode(texts), strict=True)
    return sum(ids == mine.tolist() for ids, mine in pairs_of_ids), len(texts)


def _logits(model_dir: str, folder: str, loaded: vocabulary.Vocabulary) -> float:
    """Returns the largest difference of a logit of transformers' Auto class from the trainer's."""
    import transformers

    from trainer import trained
    from trainer.huggingface import parity

    run = trained.open_run(model_dir)
    _, params = trained.restore(run, None, loaded)
    auto: Any = {
        "encoder": transformers.AutoModelForPreTraining,
        "decoder": transformers.AutoModelForCausalLM,
        "encoder_decoder": transformers.AutoModelForSeq2SeqLM,
    }[run.config.model.architecture]
    model = auto.from_pretrained(folder, dtype="float32").eval()
    (rows, *_) = run.data.evaluation("train", 8)
    batch = next(iter(rows.iterate()))
    ours, theirs = parity.our_logits(run.config.model, params), parity.their_logits(model)
    return parity.compare(ours, theirs, [batch]).difference


def _texts(corpus: str, split: str = "") -> list[str]:
    """Returns the documents of a split; of all, if it is ""."""
    found = sources.resolve(sources.parse(corpus))
    return [
        text
        for piece in found.pieces
        for its_split, batch in sources.read(found, piece)
        if split in ("", its_split)
        for name in found.spec.unit.columns
        for text in batch.column(name).to_pylist()
        if text
    ]


def main(argv: list[str]) -> int:
    """Runs the command; returns 1 if anything differs."""
    parser = Parser(prog="python -m benchmarks.any_tokenizer", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--corpus", required=True, help=f"several MB of text: {sources.forms()}")
    add("--output", required=True, help="local folder of everything that is made")
    add("--steps", type=positive, default=20, help="updates of each model; %(default)s")
    add("--only", default="", help="tokenizers whose name contains this")
    flags = parser.parse_args(argv)
    texts, rows, failed = _texts(flags.corpus), [], False
    for number, (name, kind) in enumerate(KINDS.items()):
        if flags.only not in name:
            continue
        folder = pathlib.Path(flags.output).absolute() / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                found = run(kind, flags.corpus, texts, folder, flags.steps)
        except Exception as error:
            print(said.getvalue(), file=sys.stderr)
            print(f"{name}: {error}", file=sys.stderr)
            failed = True
            continue
        failed |= found.texts[0] < found.texts[1] or not found.logits <= 1e-4
        rows.append(
            (
                name,
                f"{found.ids:,}",
                f"{kind.preset}, {kind.objective}",
                f"{found.seqio:,}",
                f"{found.losses[0]:.2f} to {found.losses[1]:.2f}",
                f"{found.texts[0]:,} of {found.texts[1]:,}",
                f"{found.logits:.1e}",
                f"{found.seconds:.0f} s",
            )
        )
        print(f"{name}: done in {found.seconds:.0f} s", file=sys.stderr, flush=True)
    header = ("tokenizer", "ids", "model", "seqio examples", "loss", "equal ids", "logits", "time")
    print(table(header, rows, markdown=True))
    return int(failed)


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
