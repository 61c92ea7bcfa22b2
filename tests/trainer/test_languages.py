"""Runs over several languages: sampled by alpha, limited in epochs, shares that are repeated."""

import shutil

import numpy as np
import pytest

from tasks.cache import language_set
from tasks.terminal.command_line import UserError
from tests.trainer.data.test_mixing import places, run_of
from trainer.config import save_config
from trainer.data import task_record
from trainer.data.interleave import Interleave
from trainer.engine.evaluator import _mean

TASK = "wiki_span_corruption"
TASKS = [f"wiki_{language}_span_corruption" for language in ("en", "ro", "sw", "fi")]
# Of each language another share is read, as if the caches had other sizes.
SHARES = "; ".join(
    f"{task}: {share}"
    for task, share in zip(TASKS, ("1", "0.5", "2000 tokens", "0.1"), strict=True)
)
ROWS = 10_000


@pytest.fixture(scope="module")
def caches(text_cache, tmp_path_factory):
    """Returns a folder with four languages, each a copy of a small cache."""
    folder = tmp_path_factory.mktemp("languages")
    for task in TASKS:
        shutil.copytree(text_cache, folder / task)
    language_set.write(str(folder), TASK, ["en", "ro", "sw", "fi"])
    return folder


def sizes(run):
    return np.array([len(source.maker.windows) for source in run.data.sources])


def test_rows_of_each_language_follow_the_law(caches):
    run = run_of(caches, TASK, "--mixing.alpha=0.3", f"--data.take={SHARES}")
    assert [source.task for source in run.data.sources] == TASKS
    counts = np.bincount(places(run, ROWS // 8)[0])
    law = sizes(run) ** 0.3 / (sizes(run) ** 0.3).sum()
    assert len(set(sizes(run).tolist())) == 4
    assert np.abs(counts - ROWS * law).max() < 2
    # Not by chance: alpha=1 is another law.
    assert np.abs(counts - ROWS * sizes(run) / sizes(run).sum()).max() > 500


def test_sizes_may_be_counted_otherwise(caches):
    run = run_of(
        caches, TASK, "--mixing.alpha=1", "--mixing.size=documents", f"--data.take={SHARES}"
    )
    documents = run.data.tasks[0].manifest.total("train", "documents")
    expected = documents * sizes(run) / sizes(run)[0]
    assert run.data.rates == [(0, pytest.approx(list(expected / expected.sum())))]


def test_no_language_is_read_more_often_than_allowed(caches):
    steps = 60
    flags = (f"--data.take={SHARES}", "--mixing.alpha=0.3", f"--train_steps={steps}")
    free = np.bincount(places(run_of(caches, TASK, *flags), steps)[0]) / sizes(
        run_of(caches, TASK, *flags)
    )
    limited = run_of(caches, TASK, *flags, "--mixing.max_epochs=1")
    epochs = np.bincount(places(limited, steps)[0]) / sizes(limited)
    assert free.max() > 1.5
    assert (epochs * sizes(limited) <= sizes(limited) + 2.5).all()
    # Those below the limit keep their proportions.
    shares, weights = np.array(limited.data.rates[0][1]), sizes(limited) ** 0.3
    below = shares * steps * 8 < sizes(limited) - 1
    assert 1 < np.count_nonzero(below) < 4
    assert np.ptp(shares[below] / weights[below]) < 1e-12
    with pytest.raises(UserError, match=r"leaves nothing to read after update \d+: the limits"):
        run_of(caches, TASK, *flags, "--mixing.max_epochs=0.1").data.rates  # noqa: B018
    with pytest.raises(UserError, match="leave one of them out"):
        run_of(caches, TASK, "--mixing.max_epochs=1", f"--mixing.schedule=3: {TASKS[0]}=1")


def test_limits_bind_the_length_of_a_run(caches):
    flags = ("--mixing.alpha=0", f"--data.take={SHARES}", "--mixing.max_epochs=2")
    before = run_of(caches, TASK, *flags, "--train_steps=40").data.record
    after = run_of(caches, TASK, *flags, "--train_steps=60").data.record
    assert "the rates of the tasks were" in task_record.changes(before, after, 40)[0]
    assert task_record.changes(before, before, 40) == []


def test_a_share_is_repeated_in_a_new_order(caches):
    task = TASKS[0]
    run = run_of(caches, task, "--data.take=2^11 tokens")
    (count,) = sizes(run)
    windows = run.data.sources[0].maker.windows
    assert count == 2**11 // windows.window_tokens
    _, epochs, _, read = places(run, 5 * count)
    for epoch in range(5):
        assert sorted(read[epochs == epoch]) == list(range(count))
    assert not np.array_equal(read[:count], read[count : 2 * count])
    said = dict(run.data.consequences())
    assert said["take"].startswith(f"2,048 tokens: the first {count} windows")
    assert f"{80_000 / count:,.2f} epochs in all" in said["batch"]
    # Validation is whole.
    whole = run_of(caches, task)
    assert run.data.evaluation("validation", 8)[0].batches == (
        whole.data.evaluation("validation", 8)[0].batches
    )


@pytest.mark.parametrize(
    ("take", "says"),
    [
        ("1e9 tokens", "tokens in train, not so many"),
        ("10 tokens", "is less than a window"),
        ("2", "is more than the whole, 1"),
        ("some", "some is no amount"),
        (f"{TASKS[1]}_: 0.5", f"did you mean {TASKS[1]}"),
    ],
)
def test_mistakes_are_one_line(caches, take, says):
    with pytest.raises(UserError, match=says):
        run_of(caches, f"{TASKS[0]},{TASKS[1]}", f"--data.take={take}").data.sources  # noqa: B018


def test_a_run_keeps_the_languages_that_it_began_with(caches, text_cache, tmp_path):
    folder = tmp_path / "caches"
    shutil.copytree(caches, folder)
    flags = ("--mixing.alpha=0.3", f"--model_dir={tmp_path}/model")
    (tmp_path / "model").mkdir()
    run = run_of(folder, TASK, *flags)
    save_config(run.config, {}, run.data.record)
    shutil.copytree(text_cache, folder / "wiki_cs_span_corruption")
    language_set.write(str(folder), TASK, ["cs", "en", "ro", "sw", "fi"])
    resumed = run_of(folder, TASK, *flags)
    assert resumed.data.record == run.data.record
    assert np.array_equal(places(resumed, 5), places(run, 5))
    assert len(run_of(folder, TASK, "--mixing.alpha=0.3").data.sources) == 5
    # Another objective on the same caches.
    other = run_of(folder, "wiki_prefix_lm", "--mixing.alpha=0.3")
    assert [source.task for source in other.data.sources][1] == "wiki_en_prefix_lm"


def test_alpha_of_one_task_has_no_effect(caches):
    with pytest.raises(UserError, match="alpha has no effect"):
        run_of(caches, TASKS[0], "--mixing.alpha=0.3")
    with pytest.raises(UserError, match="from 0 to 1"):
        run_of(caches, TASK, "--mixing.alpha=3")


def test_the_mean_of_languages_weighs_each_the_same():
    one = {"loss": 2.0, "accuracy": 0.5, "unigram_entropy": 6.0, "bits_per_byte": 1.0, "tokens": 9}
    other = {"loss": 4.0, "accuracy": 0.1, "unigram_entropy": 5.0, "tokens": 1}
    found = _mean([one, other])
    assert found["loss"] == 3
    assert found["perplexity"] == pytest.approx(np.exp(3))
    assert "bits_per_byte" not in found
    assert "tokens" not in found


def test_shares_are_those_of_the_interleaved_rows():
    counts = Interleave([0.5, 0.3, 0.2]).counts(1000)
    assert counts.tolist() == [500, 300, 200]
