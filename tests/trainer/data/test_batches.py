"""Batches are a function of the step; their order has a version; what no epoch reads is counted."""

import itertools
import json

import numpy as np
import pytest

from tasks.cache.manifest import CacheManifest
from tasks.cache.windows import Windows
from tasks.objectives import AutoregressiveLM, Lengths, span_corruption
from tasks.storage import seal
from tasks.terminal.command_line import UserError
from tasks.vocabulary import load
from tests.support.runs import config_of, run_of
from tests.support.trees import assert_equal, same
from trainer.config import config_changes, load_config, save_config
from trainer.config.phases import Phase, Phases
from trainer.data.batches import BatchMaker, Places, Source, TrainingBatches, evaluation_batches
from trainer.data.features import FeatureConverter
from trainer.data.order import Epochs, GlobalOrder

LENGTHS = Lengths(inputs=64, targets=18)


@pytest.fixture(scope="module")
def maker(text_cache):
    return make(text_cache, span_corruption(), LENGTHS)


def make(folder, objective, lengths, split="train", keep_tails=False, encoder_decoder=True):
    found = CacheManifest.load(str(folder))
    windows = Windows(str(folder), found, split, objective.window_tokens(lengths), keep_tails)
    converter = FeatureConverter(lengths, encoder_decoder)
    return BatchMaker(windows, objective, converter, load(str(folder)).ids)


def training(maker, batch_size, seed, **hosts):
    return TrainingBatches([source(maker, seed)], Phases([Phase(0, batch_size, LENGTHS)]), **hosts)


def source(maker, seed, task="a_task"):
    count = len(maker.windows)
    return Source(task, maker, Epochs(count, GlobalOrder(count, seed)), seed)


def places(batches, steps):
    """Returns the places of the rows of the first `steps` batches."""
    return Places(*np.concatenate([batches.places(step) for step in range(steps)], axis=1))


def test_any_step_is_reached_without_those_before(maker):
    batches = training(maker, 8, seed=3)
    first = list(itertools.islice(batches.iterate(0, threads=3, prefetch=5), 12))
    later = list(itertools.islice(batches.iterate(7, threads=1, prefetch=1), 5))
    assert_equal(later, first[7:])
    assert_equal([batches[step] for step in (11, 0, 5)], [first[step] for step in (11, 0, 5)])


def test_an_epoch_has_every_window_once_in_an_order_of_its_own(maker):
    count = len(maker.windows)
    batches = training(maker, 1, seed=3)
    _, epochs, _, windows = places(batches, 2 * count)
    assert epochs.tolist() == [0] * count + [1] * count
    assert sorted(windows[:count]) == sorted(windows[count:]) == list(range(count))
    assert windows[:count].tolist() != windows[count:].tolist()
    assert windows[:count].tolist() != list(range(count))
    other = places(training(maker, 1, seed=4), count).windows
    assert windows[:count].tolist() != other.tolist()


def test_noise_is_new_in_every_epoch_and_the_text_the_same(maker):
    batches = training(maker, 1, seed=3)
    count = len(maker.windows)
    windows = places(batches, 2 * count).windows.tolist()
    again = windows.index(windows[0], 1)
    first, second = batches[0], batches[again]
    assert not same(first, second)
    assert rebuilt(first, maker.ids.size) == rebuilt(second, maker.ids.size)


def rebuilt(batch, vocabulary_size):
    """Returns the window from which the first row of a span-corruption batch was made."""
    spans, current = {}, []
    for token in batch["decoder_target_tokens"][0]:
        if token >= vocabulary_size - 100:
            spans[token] = current = []
        elif token > 1:
            current.append(token)
    out = []
    for token in batch["encoder_input_tokens"][0]:
        out += spans.get(token, [token] if token > 1 else [])
    return out


def test_windows_of_any_length_are_the_stream_of_a_split(text_cache):
    found = CacheManifest.load(str(text_cache))
    streams = []
    for length in (7, 100, 163):
        windows = Windows(str(text_cache), found, "train", length, keep_tails=True)
        tokens, lengths = windows.read(np.arange(len(windows)))
        streams.append(np.concatenate([row[:n] for row, n in zip(tokens, lengths, strict=True)]))
        dropped = Windows(str(text_cache), found, "train", length)
        assert len(windows) - 1 <= len(dropped) <= len(windows)
    assert all(np.array_equal(streams[0], stream) for stream in streams)
    assert len(streams[0]) == found.total("train", "tokens")
    vocabulary = load(str(text_cache))
    text = (text_cache.parents[1] / "train.txt").read_text()
    expected = vocabulary.encode([line for line in text.splitlines() if line])
    assert np.array_equal(np.concatenate(expected), streams[0])


def test_evaluation_reads_every_token_once_with_any_batch_size(text_cache):
    maker = make(text_cache, AutoregressiveLM(), Lengths(0, 50), "validation", True, False)
    found = CacheManifest.load(str(text_cache))
    sums = set()
    for size in (1, 5, 64):
        batches = list(evaluation_batches(maker, size, seed=0))
        assert {len(batch["decoder_target_tokens"]) for batch in batches} == {size}
        tokens = np.concatenate([batch["decoder_target_tokens"] for batch in batches])
        sums.add(int(tokens.sum()))
        weights = sum(int(batch["decoder_loss_weights"].sum()) for batch in batches)
        assert weights == found.total("validation", "tokens") + len(maker.windows)
    assert len(sums) == 1


def test_a_corrupt_record_names_the_shard_and_the_row(text_cache, tmp_path):
    for path in text_cache.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    shard = sorted(tmp_path.glob("train.tfrecord-*"))[0]
    data = bytearray(shard.read_bytes())
    data[40] ^= 1
    shard.write_bytes(data)
    maker = make(tmp_path, span_corruption(), LENGTHS)
    with pytest.raises(UserError, match=r"train\.tfrecord-00000.*row 0"):
        maker.windows.read(np.array([0]))


def test_impossible_batches_are_rejected(maker, text_cache):
    with pytest.raises(UserError, match="3 hosts"):
        training(maker, 8, seed=0, hosts=3)
    huge = make(text_cache, AutoregressiveLM(), Lengths(0, 10**7))
    with pytest.raises(UserError, match="too few for one window"):
        training(huge, 8, seed=0)
    with pytest.raises(UserError, match="no split test"):
        make(text_cache, span_corruption(), LENGTHS, split="test")


BATCH, OWN = ("--batch_size=8",), (None, None)


def test_a_run_from_before_versions_is_refused(tmp_path):
    save_config(config_of(f"--model_dir={tmp_path}"), {})
    assert load_config(str(tmp_path))[0].data.order == 2
    path = tmp_path / "config.json"
    value, _ = seal.opened(json.loads(path.read_text()))
    del value["config"]["data"]["order"]
    path.write_text(json.dumps(value))
    with pytest.raises(UserError, match=r"data\.order is 1; it must be one of 2"):
        load_config(str(tmp_path))


def test_tokens_that_no_epoch_reads_are_counted_at_the_start(text_cache):
    # How many tokens are left over depends on the corpus, which is the running Python's.
    warned = set()
    for inputs in (64, *range(1000, 1601, 100)):
        flags = f"--lengths.inputs={inputs}", f"--lengths.targets={inputs // 4}"
        run = run_of(text_cache, *BATCH, *flags, lengths=OWN)
        windows = run.data.sources[0].maker.windows
        total = run.data.tasks[0].manifest.total("train", "tokens")
        unread = total - len(windows) * windows.window_tokens
        lines = [line for line in run.data.consequences() if "are not read" in line[1]]
        ((subject, text),) = lines
        share = f"{unread:,} tokens ({unread / total:.2%}) of {total:,}"
        assert text.startswith(f"{share} are not read")
        many = unread >= total / 100
        advice = "; use more text or shorter lengths" * many
        assert text.endswith(f": the unfinished last window{advice}")
        assert (subject == "warning") == many
        warned.add(many)
    assert warned == {False, True}


def test_microbatches_may_change_only_where_they_change_nothing_else():
    def changes(*others):
        return config_changes(config_of(*others), config_of("--microbatches=2", *others), step=5)

    assert changes() == []
    (change,) = changes("--model.dropout_rate=0.1")
    assert change.startswith("microbatches was 1, is 2, and each part of the batch draws its own")


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--lengths.inputs=1", r"--lengths\.inputs=1 --lengths\.targets=114: inputs length 1"),
        ("--mixing.schedule=nonsense", r"--mixing\.schedule: nonsense: write STEP:TASK=RATE"),
    ],
)
def test_a_mistake_in_a_flag_names_the_flag(text_cache, flag, says):
    with pytest.raises(UserError, match=says):
        run_of(text_cache, *BATCH, flag, lengths=OWN)
