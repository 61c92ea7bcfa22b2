"""Names of the values of metrics: what they are called, and which of them count down."""

# Goes before the name of a metric of generated text that has the name of one of tokens.
TEXT = "text_"
# Values of metrics that are not called as the metric is.
_VALUES = {
    "accuracy": (f"{TEXT}accuracy",),
    "squad": ("em", "f1"),
    "rouge": ("rouge1", "rouge2", "rougeLsum"),
}

_COUNT_DOWN = frozenset(
    {
        *("loss", "training_loss", "perplexity", "bits_per_byte", "word_perplexity"),
        *("order_loss", "auxiliary_loss", "dropped_tokens"),
        *("character_error_rate", "word_error_rate", "probe_perplexity"),
    }
)


def lower_is_better(name: str) -> bool:
    """Returns whether lower values of a metric, as "loss", are better."""
    return name in _COUNT_DOWN


def values_of(metric: str) -> tuple[str, ...]:
    """Returns the names in results of the values of one of `tasks.metrics.metric.METRICS`."""
    return _VALUES.get(metric, (metric,))
