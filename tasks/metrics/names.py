"""Names of metrics that count down; all others count up."""

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
