"""The losses of a model with experts: in evaluations, and their metrics."""

from tests.trainer.reporting.test_metrics import evaluated


def test_the_auxiliary_loss_is_evaluated(text_cache):
    experts = "--model.feed_forward=switch:experts=4,every=2"
    mean = "--loss.normalizer=num_total_target_tokens"
    found, _ = evaluated(text_cache, "lm_tiny", "python_docs_autoregressive_lm", experts, mean)
    # Balanced experts cost 0.01 per layer; one of the two layers has experts.
    assert 0.01 <= found["auxiliary_loss"] < 0.04
    assert 0 <= found["dropped_tokens"] < 1
    per_position = found["training_loss"] / (found["loss"] + found["auxiliary_loss"])
    assert 0.9 < per_position < 1
