"""Runs on adopted caches equal runs on our caches of the same rows, bit by bit."""

import itertools
import random

import numpy as np
import pytest

from pipeline.annexes.adopting.adopt import main
from tasks.cache.cache import Cache
from tasks.cache.pair_windows import row_windows
from tasks.terminal.command_line import UserError
from tasks.vocabulary import EOS_ID, PAIR_BORDER
from tests.support import foreign_caches, runs
from tests.support.runs import assert_shared
from tests.support.trees import assert_equal
from tests.trainer import conftest

text_cache, pairs_and_text = conftest.text_cache, conftest.pairs_and_text
SPANS, PAIRS = "python_docs_span_corruption", "qa_supervised"
SPLITS = ("train", "validation")


def rows_of(folder, split):
    """Returns the rows of a cache of ours."""
    cache = Cache.open(str(folder))
    windows = row_windows(cache.folder, cache.manifest, split, keep_tails=True)
    tokens_WN, lengths_W = windows.read(np.arange(len(windows)))
    return [tokens_N[:n].tolist() for tokens_N, n in zip(tokens_WN, lengths_W, strict=True)]


@pytest.fixture(scope="module")
def folders(text_cache, pairs_and_text, tmp_path_factory):
    """Folders of two caches, of texts and of pairs: ours, and adopted ones of the same tokens."""
    folder, vocabulary = tmp_path_factory.mktemp("adopted"), text_cache.parents[1] / "vocabulary"
    (folder / "ours").symlink_to(pairs_and_text)
    generator = random.Random(0)
    texts, pairs = {}, {}
    for split in SPLITS:
        # Documents of other lengths than our rows, but the same stream of tokens.
        stream = np.concatenate(rows_of(text_cache, split))
        ends = sorted({*(generator.randrange(len(stream)) for _ in range(400)), len(stream)})
        texts[split] = [
            foreign_caches.pair([], stream[begin:end])
            for begin, end in itertools.pairwise([0, *ends])
        ]
        pairs[split] = []
        for row in rows_of(folder / "ours" / PAIRS, split):
            border = row.index(PAIR_BORDER)
            sides = [*row[:border], EOS_ID], [*row[border + 1 :], EOS_ID]
            pairs[split].append(foreign_caches.pair(*sides))
    for name, rows in ((SPANS, texts), (PAIRS, pairs)):
        theirs = foreign_caches.write_seqio(folder / "theirs" / name, rows, 3)
        main([f"--cache_dir={theirs}", f"--vocabulary={vocabulary}"])
    return folder


def shape_of(task):
    """Returns the flags and lengths of a run on a task."""
    if task != PAIRS:
        return ["--batch_size=8"], {"task": task, "lengths": (None, None)}
    return ["--batch_size=8", "--objective=too_long=cut"], {"task": task, "lengths": (64, 40)}


def data_of(folder, task, *more, preset="t5_1_1_tiny"):
    flags, shape = shape_of(task)
    return runs.run_of(folder, *flags, *more, preset=preset, **shape).data


@pytest.mark.parametrize(
    ("task", "more"),
    [
        (SPANS, ()),
        (SPANS, ("--data.shuffle=block", "--data.block_bytes=1000000")),
        (PAIRS, ()),
        (PAIRS, ("--data.pack_examples=true",)),
        (f"{SPANS}=0.5,{PAIRS}=0.5", ("--lengths.inputs=256", "--lengths.targets=80")),
    ],
    ids=str,
)
def test_batches_equal_ours_on_any_number_of_hosts(folders, task, more):
    ours, theirs = (data_of(folders / name, task, *more) for name in ("ours", "theirs"))
    steps = (0, 1, 17, 10**6)
    batches = theirs.batches()
    # Blocks, and windows that begin anew in each shard, follow the shards, which differ.
    for step in steps if not more or PAIRS in task else ():
        assert_equal(batches[step], ours.batches()[step])
    assert_shared(theirs.batches, steps)
    found, wanted = (data.evaluation("validation", 8) for data in (theirs, ours))
    for one, other in zip(found, wanted, strict=True):
        assert_equal([*one.iterate()], [*other.iterate()])


def test_the_start_says_what_is_read(folders):
    lines = dict(data_of(folders / "theirs", PAIRS).consequences())
    assert "pairs" in lines["cache"]
    assert lines["cache"].startswith(f"{folders}/theirs/{PAIRS}: ")
    lines = dict(data_of(folders / "theirs", SPANS).consequences())
    assert lines["cache"].endswith(", concat")


def test_a_vocabulary_that_is_not_known(tmp_path):
    rows = {"train": [{"targets": [5, 9, 700]}] * 99}
    main([f"--cache_dir={foreign_caches.write_seqio(tmp_path / 'web_lm', rows)}"])
    data = data_of(tmp_path, "web_lm", "--lengths.targets=16", preset="lm_tiny")
    assert data.batches()[0]["decoder_target_tokens"].max() == 700
    with pytest.raises(UserError, match=r"of .*web_lm is unknown because it was adopted"):
        data.encode("text")
    with pytest.raises(UserError, match=r"but the vocabulary of .*web_lm has 0"):
        data_of(tmp_path / "web_lm", "span_corruption")
