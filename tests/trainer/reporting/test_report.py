"""The table of a run's results."""

import pytest

from trainer.pretrain import build_config
from trainer.report import summary


@pytest.mark.parametrize(
    ("entropy", "says"),
    [(5.688, "5.688 nats, 1.061 above the loss"), (2.0, "2.000 nats, 2.627 below the loss")],
)
def test_the_unigram_entropy_may_be_below_the_loss(entropy, says):
    values = {"loss": 4.627, "perplexity": 102.2, "accuracy": 0.3, "unigram_entropy": entropy}
    lines = [{"step": 5, "split": split, "metrics": values} for split in ("train", "validation")]
    assert says in summary(build_config("t5_1_1_tiny", [])[0], lines)
