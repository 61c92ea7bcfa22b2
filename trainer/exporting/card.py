"""The model card of an exported model: its data, training, evaluation and checks."""

import hashlib
import itertools
import json
import operator
from collections.abc import Iterator, Mapping
from typing import Any

from tasks.cache.filtered import ExcludeRecord, FilterRecord
from tasks.cache.manifest import MANIFEST
from tasks.reading import spec
from tasks.reading.corpus import HUB, readable
from tasks.storage import files
from tasks.terminal.table import table
from trainer.config import Config, field_paths
from trainer.data.cached_task import CachedTask
from trainer.data.run import Data, Run
from trainer.engine.cost import parameter_count
from trainer.huggingface.parity import Parity
from trainer.huggingface.tokenizer import Match
from trainer.model.config import ModelConfig
from trainer.optim.schedule import described
from trainer.reporting.metrics import EVALUATION_FILE, NORMS, OF_DATA, read_metrics

# The Hub's pipeline tags.
_PIPELINES = {
    "encoder_decoder": "text2text-generation",
    "decoder": "text-generation",
    "encoder": "fill-mask",
}
_GENERATE = (
    'inputs = tokenizer("The first word{}", return_tensors="pt")\n'
    "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))"
)
_USE = {
    "encoder_decoder": (
        "AutoModelForSeq2SeqLM",
        _GENERATE.format(" of a <extra_id_0> is its subject."),
    ),
    "decoder": ("AutoModelForCausalLM", _GENERATE.format("")),
    "encoder": (
        "AutoModelForMaskedLM, pipeline",
        'fill = pipeline("fill-mask", model=model, tokenizer=tokenizer)\n'
        'print(fill(f"The first {tokenizer.mask_token} of a sentence."))',
    ),
}


def model_card(
    run: Run,
    step: int,
    folder: str,
    parity: Parity,
    match: Match | None,
    custom_code: bool,
    facts: Mapping[str, Any],
    average: str | None = None,
) -> str:
    """Returns an exported model's README.md, whose example calls the model `folder`.

    `match` is None if the vocabulary is a class in --task_module. `custom_code` is True if loading
    the model runs code from its folder. `facts` come from the user, under the Hub's names;
    `average` is the command's flag.
    """
    config, rows = run.config, _evaluation(run.config.model_dir, step)
    training = [*_training(run, step), *([("average of parameters", average)] if average else [])]
    facts = {**facts, "datasets": facts.get("datasets") or _hub_data_sets(run.data)}
    lines = [
        *head(config.model, facts, "fine-tuning" if _learns_pairs(run) else "pretraining"),
        f"# {folder}",
        "",
        _origin(run),
        "",
        *(example(config.model, folder, custom_code, _learns_pairs(run)) if match else []),
        "",
        "## Training",
        "",
        table(("setting", "value"), training, markdown=True),
        "",
        "## Evaluation",
        "",
        table(("metric", "value"), rows, markdown=True) if rows else "Not evaluated.",
        "",
        "## Checked on export",
        "",
        "- Logits of transformers compared with the trainer's, in float32 on a CPU, on rows of "
        f"the validation split: {parity}.",
        _ids_compared(match),
    ]
    return "\n".join(lines) + "\n"


def _origin(run: Run) -> str:
    """Returns what the run trained, and from which parameters."""
    config, on = run.config, ""
    if _learns_pairs(run):
        on = " on pairs of inputs and targets"
    if config.init_from is None:
        after = "" if on else " and not fine-tuned"
        return f"{config.preset}, pretrained with Palimpsest{on}{after}."
    return f"Trained with Palimpsest{on}, starting from the parameters of {config.init_from}."


def _learns_pairs(run: Run) -> bool:
    return any(task.manifest.plan.pairs is not None for task in run.data.tasks)


def _ids_compared(match: Match | None) -> str:
    if match is None:
        return (
            "- There is no tokenizer: the vocabulary is the model author's own code. "
            "`vocabulary.json` has its pieces and special ids."
        )
    is_model = match.library == Match._field_defaults["library"]
    of_model = "`spiece.model` is the SentencePiece model used in training." * is_model
    return (
        f"- Ids of `tokenizer.json` compared with ids of {match.library}, as used in training: "
        f"equal for {match.texts - len(match.different)} of {match.texts} texts. " + of_model
    )


def head(model: ModelConfig, facts: Mapping[str, Any], tag: str = "pretraining") -> list[str]:
    """Returns the card's YAML header; JSON values are valid YAML."""
    found = {
        "library_name": "transformers",
        "pipeline_tag": _PIPELINES[model.architecture],
        "tags": [tag, "palimpsest"],
        **facts,
    }
    lines = [f"{name}: {json.dumps(value)}" for name, value in found.items() if value]
    return ["---", *lines, "---", ""]


def example(model: ModelConfig, folder: str, custom_code: bool, pairs: bool = False) -> list[str]:
    """Returns an example of the model's use, in Markdown."""
    kind, shown = _USE[model.architecture]
    if pairs:
        shown = _GENERATE.format("s of an input")
    trusted = ", trust_remote_code=True" if custom_code else ""
    return [
        "```python",
        f"from transformers import AutoTokenizer, {kind}",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{folder}")',
        f'model = {kind.partition(",")[0]}.from_pretrained("{folder}"{trusted})',
        shown,
        "```",
    ]


def _hub_data_sets(data: Data) -> list[str]:
    if not data.tasks:
        return []
    texts = (task.manifest.plan.corpus["spec"] for task in data.tasks)
    found = [spec.parse(text).location for text in texts if text.startswith(f"{HUB}:")]
    return list(dict.fromkeys(found))


def _training(run: Run, step: int) -> list[tuple[str, str]]:
    config, data, optimizer = run.config, run.data, run.config.optimizer
    rows = [
        ("parameters", f"{parameter_count(config.model):,}"),
        ("updates", f"{step:,} of {config.phases.described(step)} rows"),
        ("lengths", _lengths(config, step)),
        (
            "optimizer",
            f"{optimizer.name}, schedule {' * '.join(optimizer.factors)}, learning rate "
            f"{described(optimizer, config.train_steps)}",
        ),
        ("seed", str(config.seed)),
        *([("started from", config.init_from)] if config.init_from else []),
    ]
    if not data.tasks:
        return [*rows, ("task", config.task)]
    rows.insert(2, ("corpus tokens seen", f"{_tokens_seen(data, config, step):,}"))
    if len(data.tasks) > 1:
        rows += list(_rates(data, config))
    for task in data.tasks:
        rows += _data_rows(task)
    return rows


def _rates(data: Data, config: Config) -> Iterator[tuple[str, str]]:
    """Yields the share of rows of each task, from each update at which they change."""
    names = [cached.task.name for cached in data.tasks]
    for begin, shares in data.rates:
        listed = ", ".join(f"{n} {share:.4g}" for n, share in zip(names, shares, strict=True))
        since = config.data.skips.updates(begin) + 1
        yield "sampling rates" + (f" from update {since:,}" if begin else ""), listed


def _lengths(config: Config, step: int) -> str:
    """Returns the lengths of the rows in all updates."""
    last = config.data.skips.batch(step)
    found = [stage.lengths for stage in config.phases.stages if stage.begin < last]
    return ", later ".join(f"inputs {each.inputs}, targets {each.targets}" for each in found)


def _tokens_seen(data: Data, config: Config, step: int) -> int:
    """Returns the number of corpus tokens in all updates; in mixtures, exact to a window a task."""
    skips = config.data.skips
    last = skips.batch(step)
    ranges = [(first - 1, after - 1) for first, after in skips.up_to(last)]
    skipped = sum(_tokens_to(data, config, end) - _tokens_to(data, config, begin)
                  for begin, end in ranges)  # fmt: skip
    return round(_tokens_to(data, config, last) - skipped)


def _tokens_to(data: Data, config: Config, batch: int) -> float:
    """Returns the number of corpus tokens in all batches up to this one."""
    total, phases = 0.0, config.phases
    means = [source.tokens_a_row for source in data.sources]
    begins = {*(begin for begin, _ in data.rates), *(phase.begin for phase in phases.phases), batch}
    for first, last in itertools.pairwise(sorted(each for each in begins if each <= batch)):
        shares = [shares for begin, shares in data.rates if begin <= first][-1]
        if phases.nest:  # their windows are as long as each phase's rows
            lengths = phases.of(first + 1).lengths
            means = [cached.task.objective.window_tokens(lengths) for cached in data.tasks]
        rows = phases.passed(last) - phases.passed(first)
        total += rows * sum(map(operator.mul, shares, means))
    return total


def _data_rows(each: CachedTask) -> list[tuple[str, str]]:
    plan, corpus = each.manifest.plan, each.manifest.plan.corpus
    manifest = files.read_bytes(files.join(each.cache, MANIFEST))
    settings = ", ".join(
        f"{path} {value}" for path, value in field_paths.leaves(each.task.objective)
    )
    return [
        ("task", each.task.name),
        ("noise", f"{type(each.task.objective).__name__}: {settings or 'none'}"),
        (
            "corpus",
            f"{readable(corpus['spec'])}, {each.manifest.total('train', 'tokens'):,} tokens",
        ),
        ("corpus revision", _revision(corpus)),
        *([("filters", ", ".join(map(_filter, plan.filters)))] if plan.filters else []),
        *([("left out by lists", ", ".join(map(_list, plan.exclude)))] if plan.exclude else []),
        ("cache", f"plan {plan.fingerprint}"),
        ("cache manifest, sha256", hashlib.sha256(manifest).hexdigest()),
        ("vocabulary, sha256", plan.vocabulary.sha256),
        *([("law of SentencePiece", law)] if (law := plan.sentencepiece_law) else []),
    ]


def _filter(record: FilterRecord) -> str:
    given = ", ".join(
        f"{name} {value}" for name, value in record.settings.items() if value is not None
    )
    return f"{record.name} ({given})" if given else record.name


def _list(record: ExcludeRecord) -> str:
    parts = record.paragraphs and f" and {record.paragraphs:,} paragraphs"
    return f"{record.documents:,} documents{parts or ''} (sha256 {record.sha256[:12]})"


def _revision(corpus: dict[str, Any]) -> str:
    if corpus.get("revision"):
        return str(corpus["revision"])
    if corpus.get("python"):
        return f"Python {corpus['python']}"
    count = len(corpus.get("files", ()))
    return f"{count} files, their sizes and checksums in the cache's plan.json"


def _evaluation(model_dir: str, step: int) -> list[tuple[str, str]]:
    """Returns this checkpoint's metrics; those from trainer.evaluate override the run's own."""
    lines = [line for line in read_metrics(model_dir) if line["step"] == step]
    training = ("train", NORMS)
    found = {line["split"]: line["metrics"] for line in lines if line["split"] not in training}
    path = files.join(model_dir, EVALUATION_FILE)
    if files.exists(path):
        found |= files.read_json(path)["checkpoints"].get(str(step), {})
    return [
        (f"{split} {name}", f"{value:,.4f}".rstrip("0").rstrip("."))
        for split, result in found.items()
        for name, value in result.items()
        if name not in OF_DATA
    ]
