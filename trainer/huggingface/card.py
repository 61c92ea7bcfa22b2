"""The model card: what a model was made of, in words that a reader can check."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

from tasks.cache.manifest import MANIFEST
from tasks.storage import files
from trainer.config import Config, fields
from trainer.data.cached import CachedData, CachedTask
from trainer.huggingface.parity import Parity
from trainer.huggingface.tokenizer import Match
from trainer.reporting.metrics import EVALUATION_FILE, read_metrics
from trainer.setup import Run

_USE = {
    "encoder_decoder": (
        "AutoModelForSeq2SeqLM",
        'inputs = tokenizer("The first word of a <extra_id_0> is its subject.", '
        'return_tensors="pt")\n'
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))",
    ),
    "decoder": (
        "AutoModelForCausalLM",
        'inputs = tokenizer("The first word", return_tensors="pt")\n'
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))",
    ),
    "encoder": (
        "AutoModelForMaskedLM",
        'inputs = tokenizer("The first <extra_id_0> of a sentence.", return_tensors="pt")\n'
        "print(tokenizer.decode(model(**inputs).logits[0].argmax(-1)))",
    ),
}


def model_card(
    run: Run, step: int, folder: str, parity: Parity, match: Match, custom_code: bool
) -> str:
    """The README.md of an exported model.

    Args:
      folder: what the model will be called in the example.
      match: of the tokenizer with SentencePiece, on text of the validation split.
    """
    config = run.config
    kind, example = _USE[config.model.architecture]
    trusted = ", trust_remote_code=True" if custom_code else ""
    lines = [
        "---",
        "library_name: transformers",
        "tags: [pretraining, palimpsest]",
        "---",
        "",
        f"# {folder}",
        "",
        f"{config.preset}, pretrained by Palimpsest and not tuned for anything.",
        "",
        "```python",
        f"from transformers import AutoTokenizer, {kind}",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{folder}")',
        f'model = {kind}.from_pretrained("{folder}"{trusted})',
        example,
        "```",
        "",
        "## Training",
        "",
        *_table(_training(run, step)),
        "",
        "## Evaluation",
        "",
        *_table(_evaluation(config.model_dir, step) or [("validation", "none was made")]),
        "",
        "## Checked on export",
        "",
        f"- Logits of transformers against those of the trainer, float32 on a CPU, rows of the "
        f"validation split: {parity}.",
        f"- Ids of `tokenizer.json` against SentencePiece, with which the model was trained: "
        f"{match.texts - len(match.different)} of {match.texts} texts equal. `spiece.model` is "
        "the vocabulary of training itself.",
    ]
    return "\n".join(lines) + "\n"


def _table(rows: list[tuple[str, str]]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows)]


def _training(run: Run, step: int) -> list[tuple[str, str]]:
    config, data = run.config, run.data
    rows = [
        ("updates", f"{step:,} of {config.batch_size} rows"),
        ("lengths", f"inputs {run.lengths.inputs}, targets {run.lengths.targets}"),
        ("optimizer", f"{config.optimizer.name}, learning rate {config.optimizer.learning_rate}"),
        ("seed", str(config.seed)),
    ]
    if not isinstance(data, CachedData):
        return [*rows, ("task", config.task)]
    rows.insert(1, ("tokens of the corpus seen", f"{_tokens_seen(data, config, step):,}"))
    for each in data.tasks:
        rows += _data_rows(each)
    return rows


def _tokens_seen(data: CachedData, config: Config, step: int) -> int:
    """Windows times their tokens; of a mixture by its rates, right to a window a task."""
    changes = [*data.rates, (step, [])]
    windows = [each.task.objective.window_tokens(data.lengths) for each in data.tasks]
    total = 0.0
    for (first, shares), (last, _) in itertools.pairwise(changes):
        updates = max(0, min(last, step) - first)
        total += (
            updates
            * config.batch_size
            * sum(share * tokens for share, tokens in zip(shares, windows, strict=True))
        )
    return round(total)


def _data_rows(each: CachedTask) -> list[tuple[str, str]]:
    plan, corpus = each.manifest.plan, each.manifest.plan.corpus
    manifest = files.read_bytes(files.join(each.cache, MANIFEST))
    settings = ", ".join(f"{path} {value}" for path, value in fields.leaves(each.task.objective))
    return [
        ("task", each.task.name),
        ("noise", f"{type(each.task.objective).__name__}: {settings or 'none'}"),
        ("corpus", f"{corpus['spec']}, {each.manifest.total('train', 'tokens'):,} tokens"),
        ("revision of the corpus", _revision(corpus)),
        ("cache", f"plan {plan.fingerprint}"),
        ("manifest of the cache, sha256", hashlib.sha256(manifest).hexdigest()),
        ("vocabulary, sha256", plan.vocabulary.sha256),
    ]


def _revision(corpus: dict[str, Any]) -> str:
    if corpus.get("revision"):
        return str(corpus["revision"])
    if corpus.get("python"):
        return f"Python {corpus['python']}"
    count = len(corpus.get("files", ()))
    return f"{count} files, their sizes and checksums in the cache's plan.json"


def _evaluation(model_dir: str, step: int) -> list[tuple[str, str]]:
    """What trainer.evaluate found of this checkpoint, else what the run itself wrote."""
    path = files.join(model_dir, EVALUATION_FILE)
    found: dict[str, dict[str, float]] = {}
    if files.exists(path):
        found = files.read_json(path)["checkpoints"].get(str(step), {})
    if not found:
        lines = [line for line in read_metrics(model_dir) if line["step"] == step]
        found = {line["split"]: line["metrics"] for line in lines if line["split"] != "train"}
    return [
        (f"{split} {name}", f"{value:,.4f}".rstrip("0").rstrip("."))
        for split, result in found.items()
        for name, value in result.items()
    ]
