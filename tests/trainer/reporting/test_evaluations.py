"""The table of evaluations: a loss is compared with unigrams where there are tokens enough."""

from trainer.reporting.evaluations import evaluation_table

RESULT = {"loss": 2.0, "perplexity": 7.39, "accuracy": 0.5, "unigram_entropy": 4.5}


def test_few_tokens_have_no_unigram_entropy():
    few, many = {**RESULT, "tokens": 905}, {**RESULT, "tokens": 5000}
    table = evaluation_table({1: {"validation": few}, 2: {"validation": many}})
    one, two = table.splitlines()[-2:]
    assert "2.500 nats" in two
    assert "nats" not in one
    assert one.split()[-1] == "-"


def test_the_mean_of_tasks_has_no_tokens():
    assert "2.500 nats" in evaluation_table({1: {"validation/mean": RESULT}})
