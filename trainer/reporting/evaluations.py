"""The table of evaluations: a row per checkpoint and, for a mixture, per task."""

from collections.abc import Mapping

from tasks.terminal.table import table
from trainer.engine.evaluator import TOKEN_METRICS
from trainer.reporting import numbers

# The frequencies of fewer target ids are too rough: their entropy is far below their split's.
_FEW_TOKENS = 5_000


def unigram_entropy(result: Mapping[str, float]) -> float | None:
    """Returns the unigram entropy of an evaluation; None if it has too few tokens to tell."""
    few = result.get("tokens", _FEW_TOKENS) < _FEW_TOKENS  # a mixture's mean has no tokens
    return None if few else result.get("unigram_entropy")


def evaluation_table(results: Mapping[int, Mapping[str, Mapping[str, float]]]) -> str:
    """Returns a table of step -> split or SPLIT/TASK -> values, without uninformative columns."""

    def shown(result: Mapping[str, float], name: str, form: str) -> str:
        return numbers.shown(result[name], f"{{:{form}}}") if name in result else "-"

    def below(result: Mapping[str, float]) -> str:
        entropy = unigram_entropy(result)
        return "-" if entropy is None else numbers.shown(entropy - result["loss"], "{:.3f} nats")

    others = dict.fromkeys(
        name
        for by_split in results.values()
        for result in by_split.values()
        for name in result
        if name not in TOKEN_METRICS
    )
    rows = [
        {
            "step": step,
            "split": split.partition("/")[0],
            "task": split.partition("/")[2] or "all",
            "tokens": shown(result, "tokens", ",.0f") if len(by_split) > 1 else "-",
            "loss": shown(result, "loss", ".4f"),
            "perplexity": shown(result, "perplexity", ".2f"),
            "accuracy": shown(result, "accuracy", ".4f"),
            "below unigram": below(result),
            "bits/byte": shown(result, "bits_per_byte", ".4f"),
            **{name: shown(result, name, ".2f") for name in others},
        }
        for step, by_split in results.items()
        for split, result in by_split.items()
    ]
    unused = {"split": "validation", "task": "all", "tokens": "-", "bits/byte": "-"}
    header = [name for name in rows[0] if any(row[name] != unused.get(name) for row in rows)]
    return table(header, [[row[name] for name in header] for row in rows])
