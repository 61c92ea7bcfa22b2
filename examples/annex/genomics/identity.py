"""A metric: the share of letters that a predicted sequence has right."""

from tasks.metrics.metric import Metric


def identity(targets: list[str], predictions: list[str]) -> dict[str, float]:
    """Returns equal letters at equal places, per letter of the targets."""
    pairs = zip(targets, predictions, strict=True)
    equal = sum(a == b for pair in pairs for a, b in zip(*pair, strict=False))
    return {"identity": equal / max(sum(map(len, targets)), 1)}


IDENTITY = Metric("identity", identity)
