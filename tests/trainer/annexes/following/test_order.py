"""A run that follows a build has the batches that it has on the finished cache."""

import itertools
import json
import pathlib
import shutil
import threading
import time
from functools import partial

import numpy as np
import pytest

from tasks import annexes
from tasks.cache.manifest import PLAN, PLAN_MARK, plan_from_dict
from tasks.storage import lock
from tasks.terminal.command_line import UserError
from tests.support import published as published_caches
from tests.support import runs
from tests.support.published import Published
from tests.support.runs import assert_shared
from tests.support.trees import same
from tests.trainer.config import test_phases
from tests.trainer.data import test_skips
from trainer.annexes.following import building_cache
from trainer.config import load_config, save_config
from trainer.config.from_flags import build_config
from trainer.config.unused_fields import refuse_unread
from trainer.data.order import GlobalOrder
from trainer.data.run import Waiting

SPANS, PREFIX = "python_docs_span_corruption", "python_docs_prefix_lm"
UL2 = "python_docs_ul2"
BLOCK = 2


@pytest.fixture(autouse=True)
def look_often(monkeypatch):
    monkeypatch.setattr(building_cache, "_LOOK_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(building_cache, "_PAUSE_SECONDS", 0.002)


# Tokens of shards: some have no window, some end in the middle of one, and one is empty.
SIZES = {"train": (9000, 4003, 30, 7001, 0, 12345, 2000, 8765, 11), "validation": (900, 0, 1300)}


@pytest.fixture(scope="module")
def whole_cache(text_cache, tmp_path_factory):
    return published_caches.make(tmp_path_factory.mktemp("whole") / SPANS, text_cache, SIZES)


@pytest.fixture
def published(whole_cache, tmp_path):
    return Published(whole_cache, tmp_path / "cache" / SPANS)


def run_of(cache, *flags, **more):
    follow = ("--data.follow=true", f"--data.follow_shards={BLOCK}")
    return runs.run_of(cache, *follow, *flags, **more)


STEPS = 350  # more than two epochs


def known_steps(batches):
    """Returns how many of the first batches can be made now."""
    for step in range(STEPS):
        try:
            batches.places(step)
        except UserError as error:
            said = str(error)
            break
    else:
        return STEPS
    assert "are not built yet: resume it with" in said
    return step


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--data.shuffle=none",),
        ("--data.shuffle=block", "--data.block_bytes=2000000"),
        ("--data.take=20000 tokens",),
        ("--data.take=40 documents",),
        ("--data.segment_documents=true",),
        ("--data.pack_examples=true", "--lengths.inputs=200", "--lengths.targets=64",
         "--data.example_inputs=64", "--data.example_targets=18"),
    ],
    ids=lambda flags: flags[0] if flags else "default",
)  # fmt: skip
def test_batches_do_not_depend_on_when_shards_are_finished(whole_cache, published, flags):
    whole = run_of(whole_cache, *flags).data.batches()
    # A shard may complete one block, several, or none.
    data = run_of(published.folder.parent, *flags).data
    batches, seen = data.batches(), [0]
    for number in (1, 0, 4, 5, 2, 3, 6, 7, 8):
        published.shards("train", number)
        seen.append(known_steps(batches))
        for step in range(max(0, seen[-2] - 1), seen[-1], 7):
            assert same(batches[step], whole[step])
    assert seen[-1] == STEPS
    assert 0 in seen
    assert len(set(seen)) > 2 or "--data.take=40 documents" in flags
    places, others = (
        np.concatenate([each.places(step) for step in range(STEPS)], axis=1)
        for each in (batches, whole)
    )
    np.testing.assert_array_equal(places, others)


def test_a_block_has_the_windows_that_end_in_its_shards(whole_cache):
    data = run_of(whole_cache).data
    (source,) = data.sources
    windows, shards = source.maker.windows, data.tasks[0].manifest.splits["train"]
    ends = np.cumsum([shard.tokens for shard in shards]) // windows.window_tokens
    borders = [0, *ends[BLOCK - 1 :: BLOCK].tolist()]
    borders += [len(windows)] * (borders[-1] != len(windows))
    ranks = np.arange(2 * len(windows))
    epochs, inside, read = source.reading(ranks)
    assert epochs.tolist() == (ranks // len(windows)).tolist()
    assert inside.tolist() == (ranks % len(windows)).tolist()
    for first, last in itertools.pairwise(borders):
        block = read[first:last].tolist()
        assert sorted(block) == list(range(first, last))
        assert block != sorted(block)
    # The second epoch is that of any run.
    later = GlobalOrder(len(windows), source.reading._seed)
    usual = later(np.ones(len(windows), int), np.arange(len(windows)))
    assert read[len(windows) :].tolist() == usual.tolist()


@pytest.mark.parametrize(
    ("packing", "row_tokens", "task", "preset"),
    [
        ("best_fit", 70, SPANS, "t5_1_1_tiny"),
        ("best_fit", 70, "python_docs_autoregressive_lm", "lm_tiny"),
        ("pairs", 0, "python_docs_supervised", "t5_1_1_tiny"),
    ],
)
def test_other_packings_are_followed(text_cache, tmp_path, packing, row_tokens, task, preset):
    folder = tmp_path / "whole" / task
    published_caches.make(folder, text_cache, SIZES, packing, row_tokens)
    flags = ("--lengths.inputs=0", "--lengths.targets=71") if preset == "lm_tiny" else ()
    whole = run_of(folder, *flags, task=task, preset=preset).data.batches()
    growing = Published(folder, tmp_path / "growing" / task)
    batches = run_of(growing.folder, *flags, task=task, preset=preset).data.batches()
    steps = [known_steps(batches)]
    for number in range(growing.count("train")):
        growing.shards("train", number)
        steps.append(known_steps(batches))
        assert all(same(batches[step], whole[step]) for step in range(*steps[-2:], 5))
    assert len(set(steps)) > 3


def test_pairs_whose_length_nothing_limits_are_refused(text_cache, tmp_path):
    task = "python_docs_supervised"
    folder = published_caches.make(tmp_path / task, text_cache, SIZES, "pairs")
    for flags, says in (
        (("--lengths.inputs=39",), "may get inputs of up to 40 tokens with --follow"),
        (("--data.pack_examples=true",), "rows of pairs are packed once all lengths are known"),
    ):
        with pytest.raises(UserError, match=says):
            run_of(folder, *flags, task=task)
    run_of(folder, "--lengths.inputs=39", "--objective=too_long=cut", task=task)


def test_hosts_share_the_batches(published):
    published.shards("train", *range(published.count("train") - 1))
    data = run_of(published.folder.parent).data
    last = known_steps(data.batches()) - 1
    assert_shared(data.batches, (0, last // 2, last))


def test_a_mixture_of_a_finished_and_a_growing_cache(whole_cache, published, tmp_path):
    shutil.copytree(whole_cache, published.folder.parent / PREFIX)
    mixture, longer = f"{SPANS}=0.75,{PREFIX}=0.25", "--lengths.targets=64"
    shutil.copytree(whole_cache, tmp_path / "all" / SPANS)
    shutil.copytree(whole_cache, tmp_path / "all" / PREFIX)
    whole = run_of(tmp_path / "all", longer, task=mixture).data.batches()
    batches = run_of(published.folder.parent, longer, task=mixture).data.batches()
    assert known_steps(batches) == 0
    published.shards("train", 0, 1)
    steps = known_steps(batches)
    assert steps > 5
    assert all(same(batches[step], whole[step]) for step in range(0, steps, 5))
    with pytest.raises(UserError, match=f"the rate of {PREFIX} follows from its size"):
        run_of(whole_cache, task=f"{SPANS}=1,{PREFIX}")


def test_a_run_that_overtakes_the_build_waits_and_says_so(whole_cache, published, capsys):
    whole = run_of(whole_cache).data.batches()
    data = run_of(published.folder.parent, training=True).data
    left = list(range(published.count("train")))

    def build():  # while the run waits
        published.shards("train", left.pop(0))

    iterated = data.training(0, waiting=Waiting(build))
    for step in range(STEPS):
        assert same(next(iterated), whole[step])
    assert not left
    said = capsys.readouterr().out
    first = f"waiting for train shards 0 to 1 of {published.count('train')} of {published.folder}: "
    assert f"{first}0 of its {sum(published.manifest.plan.shards.values())} shards" in said
    assert said.count("waiting for train shard") == said.count("went on after") > 1
    data.close()


def test_a_wait_ends_when_the_run_is_stopped(published, capsys):
    data = run_of(published.folder.parent, training=True).data
    asked = iter([False, False, True])
    waiting = Waiting(lambda: next(asked))
    assert list(data.training(0, waiting=waiting)) == []
    assert waiting.seconds > 0
    # The thread that makes batches ahead waits as well, until it is told.
    iterated = data.batches().iterate(0)
    threading.Timer(0.1, data.close).start()
    with pytest.raises(building_cache.Closed):
        next(iterated)


def test_a_build_that_has_ended_is_named(published, monkeypatch, capsys):
    flags = ("--data.follow_timeout_seconds=0.3",)
    data = run_of(published.folder.parent, *flags, training=True).data
    with pytest.raises(UserError, match=r"nothing was built in .* for 0 s while the run waited"):
        next(data.training(0))
    said = capsys.readouterr().out
    command = f"python -m pipeline.build --task={SPANS} --cache_dir={published.folder.parent} …"
    assert said.count(f"no build is running in {published.folder}: resume it with the") == 1
    assert command in said
    # While one is alive, time does not count.
    with lock.held(str(published.folder), "build", "--cache_dir"):
        begun = time.monotonic()
        waiting = Waiting(lambda: time.monotonic() > begun + 0.6)
        assert list(data.training(0, waiting=waiting)) == []
    assert "no build is running" not in capsys.readouterr().out
    data.close()


def test_another_plan_is_refused(published):
    published.shards("train", *range(BLOCK))
    batches = run_of(published.folder.parent).data.batches()
    steps = known_steps(batches)
    value = json.loads((published.folder / PLAN).read_text())
    value["row_tokens"] += 1
    (published.folder / PLAN).write_text(json.dumps(value))
    for mark in published.folder.glob(f"{PLAN_MARK}*"):
        mark.unlink()
    (published.folder / f"{PLAN_MARK}{plan_from_dict(value).fingerprint}").touch()
    assert same(batches[steps - 1], batches[steps - 1])
    says = r"holds a cache with a different plan.*row_tokens: 101, th.*flags that it was begun with"
    with pytest.raises(UserError, match=says):
        batches[steps]
    shutil.rmtree(published.folder)
    with pytest.raises(UserError, match="disappeared while it was being followed"):
        batches[steps]


def test_receipts_of_a_plan_that_began_during_a_look_are_not_taken(
    published, whole_cache, monkeypatch
):
    data = run_of(published.folder.parent).data
    batches = data.batches()
    record = {"sha256": "0", "kind": "ids", "documents": 2, "paragraphs": 0}
    other = json.loads((published.folder / PLAN).read_text()) | {"exclude": [record]}
    replacing, usual = threading.Lock(), building_cache.read_receipt
    marks = [*published.folder.glob(f"{PLAN_MARK}*")]

    def read_receipt(path):
        # The plan is replaced between the look at it and the reading of receipts.
        with replacing:
            while marks:
                mark = marks.pop()
                (published.folder / PLAN).write_text(json.dumps(other))
                mark.rename(mark.with_name(PLAN_MARK + plan_from_dict(other).fingerprint))
                published.shards("train", *range(BLOCK))
        return usual(path)

    monkeypatch.setattr(building_cache, "read_receipt", read_receipt)
    for _ in range(2):
        with pytest.raises(UserError, match=r"different plan .*\(a takedown: .*with 2 entries"):
            batches[0]
    assert data.tasks[0].manifest.splits["train"] == []


def test_a_receipt_of_another_shard_is_refused(published):
    published.shards("train", *range(BLOCK))
    first, second = (published.folder / f"train.receipt-0000{n}-of-00009.json" for n in (0, 1))
    shutil.copy(second, first)
    with pytest.raises(UserError, match="train shard 0 lists the files of another shard"):
        run_of(published.folder.parent).data.batches()[0]


def test_a_run_waits_for_the_plan(whole_cache, tmp_path, capsys):
    published = Published(whole_cache, tmp_path / SPANS, plan=False)
    with pytest.raises(UserError, match="no cache for task"):
        run_of(tmp_path)
    threading.Timer(0.2, published.plan).start()
    data = run_of(tmp_path, training=True).data
    assert data.fingerprints == run_of(whole_cache).data.fingerprints
    assert f"waiting for the plan of {tmp_path / SPANS}" in capsys.readouterr().out
    data.tasks[0].building.patient = False
    with pytest.raises(UserError, match="are not built yet"):
        data.batches()[0]


def test_the_cache_of_another_objective_is_named_and_not_taken(whole_cache, tmp_path, capsys):
    Published(whole_cache, tmp_path / SPANS)
    short = "--data.follow_timeout_seconds=0.1"
    with pytest.raises(UserError, match=f"waited for the plan of {tmp_path / UL2}"):
        run_of(tmp_path, short, task=UL2, training=True)
    assert f"to follow it, pass --cache_dir={tmp_path / SPANS}" in capsys.readouterr().out
    data = run_of(tmp_path / SPANS, short, "--lengths.targets=200", task=UL2, training=True).data
    assert data.fingerprints == {UL2: run_of(whole_cache).data.fingerprints[SPANS]}


@pytest.mark.parametrize(
    ("part", "becomes", "why"),
    [
        ('"separator": "none"', '"separator": "eos"', "its content was changed"),
        ("}", "", "is not valid JSON"),
        ('"format": 1', '"format": 9', "the cache has format 9, but this version reads 1"),
    ],
)
def test_a_plan_that_cannot_be_used_is_named(published, part, becomes, why):
    path = published.folder / PLAN
    text = path.read_text()
    path.write_text(text.replace(part, becomes))
    assert path.read_text() != text
    says = rf"plan.json cannot be used \({why}.*build's command again to restore it"
    with pytest.raises(UserError, match=says):
        run_of(published.folder.parent)


def test_evaluations_of_a_run_read_the_first_block_of_their_split(whole_cache, published):
    def rows(data):
        return [list(each.iterate()) for each in data.evaluation("validation", 4)]

    count = published.count("validation")
    whole = run_of(whole_cache, "--data.follow_shards=1", training=True).data
    growing = run_of(published.folder.parent, "--data.follow_shards=1").data
    growing._trains = True
    with pytest.raises(UserError, match="validation shard"):
        rows(growing)
    published.shards("validation", 0)
    assert all(map(same, rows(growing)[0], rows(whole)[0]))
    manifest = growing.evaluated(growing.tasks[0], "validation")
    assert len(manifest.splits["validation"]) == 1
    # Outside of the run, evaluations read the whole split.
    after = run_of(whole_cache, "--data.follow_shards=1").data
    manifest = after.evaluated(after.tasks[0], "validation")
    assert len(manifest.splits["validation"]) == count


def test_a_first_block_without_text_for_evaluations_is_named(text_cache, tmp_path):
    sizes = {"train": (9000, 4003), "validation": (0, 0, 1300)}
    cache = published_caches.make(tmp_path / SPANS, text_cache, sizes)
    says = r"no text in the first 2 shards of validation, .*raise --f"
    with pytest.raises(UserError, match=says):
        run_of(cache, training=True).data.evaluation("validation", 4)
    assert run_of(cache, "--data.follow_shards=3", training=True).data.evaluation("validation", 4)


WIDE = ("--lengths.inputs=90000", "--lengths.targets=90000")
BOTH = f"--task={SPANS},{PREFIX}"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--data.take=0.5",), "--data.take=0.5 with --follow: the total is not known"),
        *(
            ((f"--engine={name}",), f"--engine={name} with --follow: the engine never waits")
            for name in annexes.entries("training_engines")
        ),
        (("--data.take=99999999 tokens",), "tokens in train, not this many"),
        ((f"--task={PREFIX}", *WIDE), "too few for one window: use more text"),
        ((BOTH,), "the rate of python_docs_span_corruption follows from its size"),
        ((BOTH, "--mixing.max_epochs=2"), "--mixing.max_epochs with --follow"),
    ],
)
def test_what_cannot_be_followed_is_one_line(whole_cache, flags, says):
    with pytest.raises(UserError, match=says):
        run_of(whole_cache, *flags).data.batches()


def test_follow_stands_alone_on_the_command_line():
    for words, follows in ((["--follow", "--seed=1"], True), (["--follow=false"], False)):
        assert build_config("t5_1_1_tiny", words)[0].following.on == follows
    config, origins = build_config("t5_1_1_tiny", ["--data.follow_shards=9"])
    with pytest.raises(UserError, match=r"following.shards has no effect without --follow"):
        refuse_unread(config, origins)


def test_the_start_says_how_the_build_is_followed(published, whole_cache):
    published.shards("train", *range(BLOCK))
    lines = dict(run_of(published.folder.parent).data.consequences())
    assert f"{BLOCK} at a time; {BLOCK} are read in" in lines["follow"]
    assert lines["batch"] == "4 rows; epochs are unknown until the caches are finished"
    lines = dict(run_of(whole_cache).data.consequences())
    assert f"{BLOCK} at a time; all are read in" in lines["follow"]
    assert "steps an epoch" in lines["batch"]


@pytest.mark.google
def test_a_bucket_is_followed_by_polling(gcs, whole_cache, tmp_path):
    local = Published(whole_cache, tmp_path / SPANS)

    upload = partial(gcs.store.fill, pathlib.Path(local.folder), f"cache/{SPANS}")
    upload()
    whole = run_of(whole_cache).data.batches()
    batches = run_of("gs://bucket/cache").data.batches()
    assert known_steps(batches) == 0
    local.shards("train", *range(BLOCK))
    upload()
    steps = known_steps(batches)
    assert steps > 0
    assert all(same(batches[step], whole[step]) for step in (0, steps - 1))
    local.finish()
    upload()
    assert same(batches[steps + 1000], whole[steps + 1000])


ONE_AT_A_TIME = ["--follow", "--following.shards=1"]


def test_a_change_of_rows_loses_and_repeats_none(text_cache):
    test_phases.test_a_change_of_rows_loses_and_repeats_none(text_cache, ONE_AT_A_TIME)


def test_a_run_reads_the_batches_that_another_reads_without_the_skip(text_cache):
    test_skips.test_a_run_reads_the_batches_that_another_reads_without_the_skip(
        text_cache, ONE_AT_A_TIME
    )


def test_lengths_do_not_change_in_a_run_that_follows(text_cache):
    with pytest.raises(UserError, match="--length_schedule cannot be combined with --follow"):
        test_phases.run_of(text_cache, test_phases.LONGER, "--follow").data.batches()


def test_stored_settings_of_earlier_versions_are_moved(tmp_path):
    config, origins = build_config("t5_1_1_tiny", [f"--model_dir={tmp_path}", "--task=a_lm"])
    save_config(config, origins)
    path = tmp_path / "config.json"
    value = json.loads(path.read_text())
    del value["sha256"]
    value["config"]["data"] |= {"follow": True, "follow_shards": 7, "follow_timeout_seconds": 5}
    path.write_text(json.dumps(value))
    following = load_config(str(tmp_path))[0].following
    assert (following.on, following.shards, following.timeout_seconds) == (True, 7, 5)
