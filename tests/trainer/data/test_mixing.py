"""Runs with several tasks or languages: exact batches, every window once, shares, start-up text."""

import dataclasses
import hashlib
import itertools
import json
import re
import shutil

import numpy as np
import pytest

from tasks.cache import language_set
from tasks.cache.manifest import sealed
from tasks.cache.windows import Windows
from tasks.objectives import noise
from tasks.terminal.command_line import UserError
from tasks.vocabularies.sentencepiece_model import NEW_LAW
from tests.support import runs
from tests.support.runs import assert_shared
from tests.support.trees import assert_equal
from tests.trainer.conftest import built
from trainer.config import save_config
from trainer.data import task_record
from trainer.data.order import BlockOrder
from trainer.data.startup import better_lengths
from trainer.engine.evaluator import _mean
from trainer.reporting.metrics import read_metrics

SPANS, PREFIX = "python_docs_span_corruption", "python_docs_prefix_lm"
LM, DECODER = "python_docs_autoregressive_lm", "python_docs_decoder_prefix_lm"


def run_of(cache, task, *flags, inputs=64, **more):
    return runs.run_of(cache, "--batch_size=8", *flags, task=task, lengths=(inputs, 64), **more)


def places(run, steps):
    batches = run.data.batches()
    return np.concatenate([np.stack(batches.places(step)) for step in range(steps)], axis=1)


def test_hosts_share_the_batches_of_a_mixture(text_cache):
    schedule = f"--mixing.schedule=5: {SPANS}=1,{PREFIX}=9"
    data = run_of(text_cache, f"{SPANS}=0.7,{PREFIX}=0.3", schedule).data
    assert_shared(data.batches, (0, 4, 5, 6, 10**7), (2, 4, 8))
    whole = data.batches()
    assert_equal([*itertools.islice(data.training(4), 3)], [whole[step] for step in (4, 5, 6)])


def test_every_task_reads_each_window_once_an_epoch_through_changes_of_rates(text_cache):
    schedule = f"--mixing.schedule=5: {SPANS}=1,{PREFIX}=1; 9: {PREFIX}=1; 12: {SPANS}=3,{PREFIX}=1"
    run = run_of(text_cache, f"{SPANS}=0.75,{PREFIX}=0.25", schedule)
    counts = [len(source.maker.windows) for source in run.data.sources]
    sources, epochs, _, windows = places(run, 1000)
    assert set(sources[9 * 8 : 12 * 8].tolist()) == {1}
    assert np.bincount(sources[: 5 * 8]).tolist() == [30, 10]
    for source, count in enumerate(counts):
        mine = epochs[sources == source] * count + windows[sources == source]
        first, second = mine[:count], mine[count : 2 * count]
        assert sorted(first) == list(range(count))
        assert sorted(second) == list(range(count, 2 * count))
        assert not np.array_equal(first, second - count)


def test_a_task_that_joins_later_changes_nothing_for_the_others(text_cache):
    alone = run_of(text_cache, SPANS)
    joined = run_of(text_cache, SPANS, f"--mixing.schedule=3: {SPANS}=1,{PREFIX}=1")
    mine = places(joined, 40)
    assert np.array_equal(mine[1:, mine[0] == 0][:, :160], places(alone, 20)[1:])
    assert_equal(joined.data.batches()[2], alone.data.batches()[2])


def test_tasks_on_one_cache_read_its_windows_in_another_order(text_cache):
    run = run_of(text_cache, f"{SPANS}=1,{PREFIX}=1", "--lengths.targets=600", inputs=73)
    sources, _, _, windows = places(run, 20)
    assert not np.array_equal(windows[sources == 0], windows[sources == 1])
    run = run_of(text_cache.parent, f"{SPANS}=1,{PREFIX}=1")
    assert {each.cache for each in run.data.tasks} == {str(text_cache)}


def test_rows_without_a_prefix_mix_with_rows_that_have_one(text_cache):
    run = run_of(text_cache, f"{LM}=1,{DECODER}=1", preset="lm_tiny", inputs=0)
    batches = run.data.batches()
    sources = batches.places(0).sources
    prefixed = batches[0]["decoder_causal_attention"].any(axis=1)
    assert np.array_equal(prefixed, sources == 1)


def test_rates_in_proportion_to_examples_and_their_limit(text_cache):
    run = run_of(text_cache, f"{SPANS},{PREFIX}")
    counts = np.array([len(source.maker.windows) for source in run.data.sources])
    assert counts[0] != counts[1]
    assert run.data.rates == [(0, pytest.approx(list(counts / counts.sum())))]
    limited = run_of(text_cache, f"{SPANS},{PREFIX}", "--mixing.maximum=10")
    assert limited.data.rates == [(0, [0.5, 0.5])]
    warm = run_of(text_cache, f"{SPANS},{PREFIX}", "--mixing.temperature=2")
    assert warm.data.rates == [(0, pytest.approx(list(counts**0.5 / (counts**0.5).sum())))]
    said = "\n".join(text for _, text in run.data.consequences())
    assert f"{counts[0]:,}  {counts[0] / counts.sum():>14.4%}" in said


def test_caches_of_two_laws_of_sentencepiece_are_named(text_cache):
    data = run_of(text_cache, f"{SPANS}=0.7,{PREFIX}=0.3").data
    assert not any("SentencePiece" in text for _, text in data.consequences())
    plan = dataclasses.replace(data.tasks[1].manifest.plan, sentencepiece_law=NEW_LAW)
    manifest = dataclasses.replace(data.tasks[1].manifest, plan=plan)
    data.tasks = [data.tasks[0], dataclasses.replace(data.tasks[1], cache="new", manifest=manifest)]
    said = "\n".join(": ".join(line) for line in data.consequences())
    assert re.search(r"cache: new: .*, law 0\.2\.2 of SentencePiece", said)
    assert (
        f"warning: --sentencepiece_law differs: {text_cache} by law 0.1 and new by law 0.2.2"
        in said
    )


def test_tasks_that_cannot_be_mixed_are_rejected(text_cache, tmp_path):
    with pytest.raises(UserError, match="is one task"):
        run_of(text_cache, SPANS, "--mixing.maximum=10")
    with pytest.raises(UserError, match="did you mean python_docs_prefix_lm"):
        run_of(text_cache, f"{SPANS}=1,python_docs_prefix_ml=1")
    with pytest.raises(UserError, match="decoder-only preset"):
        run_of(text_cache, f"{SPANS}=1,{LM}=1")
    for name in (SPANS, PREFIX):
        shutil.copytree(text_cache, tmp_path / name)
    manifest = json.loads((tmp_path / PREFIX / "manifest.json").read_text())
    model = (text_cache / "sentencepiece.model").read_bytes() + b"x"
    (tmp_path / PREFIX / "sentencepiece.model").write_bytes(model)
    manifest["plan"]["vocabulary"]["sha256"] = hashlib.sha256(model).hexdigest()
    del manifest["sha256"]
    (tmp_path / PREFIX / "manifest.json").write_text(json.dumps(sealed(manifest)))
    with pytest.raises(UserError, match="different vocabularies"):
        run_of(tmp_path, f"{SPANS}=1,{PREFIX}=1")


def test_a_corpus_larger_than_the_disk_is_read_block_by_block(text_cache, tmp_path):
    # A block has room for a shard and the next, in which its last window ends.
    size = sum(
        path.stat().st_size
        for shard in (1, 2)
        for kind in ("tfrecord", "rows")
        for path in text_cache.glob(f"train.{kind}-0000{shard}-*")
    )
    run = run_of(text_cache, SPANS, "--data.shuffle=block", f"--data.block_bytes={size}")
    windows = run.data.sources[0].maker.windows
    count = len(windows)
    order = BlockOrder(windows.blocks(size), noise.task_seed(run.config.seed, SPANS))
    expected = order(np.zeros(count, int), np.arange(count))
    assert np.array_equal(places(run, count // 8)[3], expected[: count // 8 * 8])
    everywhere = places(run_of(text_cache, SPANS), 1)[3]
    assert not np.array_equal(expected[:8], everywhere)
    with pytest.raises(UserError, match=r"--data\.block_bytes"):
        run_of(text_cache, SPANS, "--data.shuffle=block", "--data.block_bytes=10").data.batches()
    # Nothing of a local cache is copied.
    run_of(text_cache, SPANS, "--data.shuffle=block", "--data.local_bytes=10").data.batches()
    with pytest.raises(UserError, match="'block', 'global'"):
        run_of(text_cache, SPANS, "--data.shuffle=blocks")


def in_memory(cache):
    """Returns the URL of a copy of a cache."""
    import fsspec

    remote = fsspec.filesystem("memory")
    for path in cache.iterdir():
        remote.pipe(f"/remote_cache/{path.name}", path.read_bytes())
    return "memory://remote_cache"


def test_a_remote_cache_gives_the_batches_of_a_local_one(text_cache):
    local, far = (
        [*itertools.islice(run_of(cache, SPANS, "--data.shuffle=block").data.training(3), 3)]
        for cache in (text_cache, in_memory(text_cache))
    )
    assert_equal(far, local)
    flags = ("--data.shuffle=block", "--data.local_bytes=1000000000")
    with pytest.raises(UserError, match="two blocks of"):
        run_of("memory://remote_cache", SPANS, *flags).data.batches()


def test_a_block_is_prefetched_once(text_cache, monkeypatch):
    run = run_of(text_cache, SPANS, "--data.shuffle=block")
    asked = []
    monkeypatch.setattr(Windows, "prefetch", lambda windows, ranges: asked.append(ranges))
    batches = run.data.batches()
    count = len(run.data.sources[0].maker.windows)
    for step in range(2 * count // 8):
        batches[step]
    # One block, and again in the next epoch: always the same windows.
    assert asked == [[(0, count), (0, count)]]


def test_copies_that_do_not_fit_cause_a_warning(text_cache, monkeypatch):
    monkeypatch.setattr(Windows, "bytes", 1 << 50)
    remote, by_block = in_memory(text_cache), ("--data.shuffle=block",)
    for cache, flags, warned in (
        (remote, (), True),
        (remote, by_block, False),
        (text_cache, (), 0),
    ):
        lines = run_of(cache, SPANS, *flags).data.consequences()
        assert any("copied again and again" in text for _, text in lines) == warned


def test_fields_of_an_objective_are_flags(text_cache):
    def masked(*flags):
        batch = run_of(text_cache, SPANS, *flags).data.batches()[0]
        return batch["decoder_loss_weights"].sum()

    denser = masked("--objective=mask.noise_density=0.3")
    with pytest.raises(UserError, match=r"--objective=.*=0.3 and --objective=.*=0.5"):
        masked("--objective=mask.noise_density=0.3,mask.noise_density=0.5")
    assert 2 < denser / masked() < 2.5
    rates = ",".join(f"denoisers.{number}.rate={float(number == 6)}" for number in range(7))
    only_s = run_of(text_cache, "python_docs_ul2", f"--objective={rates}").data
    mode = only_s.tasks[0].ids.id_of("<extra_id_97>")
    assert (only_s.batches()[0]["encoder_input_tokens"][:, 0] == mode).all()
    for wrong, says in (
        ("mask.density=0.5", "no field mask.density; it has inputs, mask.mean_noise_span_length"),
        ("mask.noise_density=much", "it must be a number"),
        ("inputs=nothing", "unknown side"),
    ):
        with pytest.raises(UserError, match=says):
            run_of(text_cache, SPANS, f"--objective={wrong}")


def test_wasteful_lengths_are_reported_with_better_ones(text_cache):
    data = run_of(text_cache, SPANS).data
    said = dict(data.consequences())["packing"]
    assert "targets 21.9% full" in said
    assert "--lengths.targets=14 holds the same text" in said
    assert better_lengths(data.tasks[0].task, data.lengths) in said
    inputs = int(said.split("--lengths.inputs=")[1].split()[0])
    fuller = run_of(text_cache, SPANS, inputs=inputs).data
    assert "holds" not in dict(fuller.consequences())["packing"]


def test_tasks_without_validation_text_are_left_out_of_evaluations(text_cache, tmp_path, capsys):
    (tmp_path / "own.txt").write_text("A few words of prose.\n" * 4)
    built(
        *("--task=span_corruption", "--name=own"),
        *(f"--corpus=text:{tmp_path}/own.txt?document=file", f"--cache_dir={tmp_path}/cache"),
        f"--vocabulary={text_cache.parents[1]}/vocabulary",
    )
    shutil.copytree(text_cache, tmp_path / "cache" / text_cache.name)
    mixed = run_of(tmp_path / "cache", f"own_span_corruption=1,{SPANS}=1")
    (only,) = mixed.data.evaluation("validation", 8)
    assert only.name == SPANS
    assert "own_span_corruption is not evaluated" in capsys.readouterr().out
    with pytest.raises(UserError, match="has no text in split validation: build with a larger"):
        run_of(tmp_path / "cache", "own_span_corruption").data.evaluation("validation", 8)


@pytest.mark.slow
def test_a_mixture_is_trained_evaluated_and_extended(text_cache, tmp_path):
    def pretrain(steps, *flags):
        given = (f"--train_steps={steps}", "--evaluation.every_steps=2", *flags)
        shape = {"task": f"{SPANS}=3,{PREFIX}=1", "lengths": (64, 64)}
        return runs.run(runs.pretrain(text_cache, tmp_path, *given, **shape))

    result = pretrain(2)
    assert result.returncode == 0, result.stderr
    assert re.search(rf"{SPANS} .*75\.0000% +6 ", result.stdout)
    by_split = {line["split"]: line["metrics"] for line in read_metrics(str(tmp_path))}
    assert by_split["train"]["inputs_full"] < 1
    assert 0.2 < by_split["train"]["targets_full"] < 0.6
    parts = [by_split[f"validation/{name}"] for name in (SPANS, PREFIX)]
    tokens = sum(part["tokens"] for part in parts)
    assert by_split["validation"]["tokens"] == tokens
    mean = sum(part["loss"] * part["tokens"] for part in parts) / tokens
    assert by_split["validation"]["loss"] == pytest.approx(mean, rel=1e-6)

    refused = pretrain(4, f"--mixing.schedule=1: {SPANS}=1")
    assert refused.returncode == 2
    assert "different before update 2" in refused.stderr
    extended = pretrain(4, f"--mixing.schedule=2: {SPANS}=1,python_docs_ul2=1,{PREFIX}=2")
    assert extended.returncode == 0, extended.stderr
    assert "from update 3 on" in extended.stdout
    splits = {line["split"] for line in read_metrics(str(tmp_path)) if line["step"] == 4}
    assert "validation/python_docs_ul2" in splits


WIKI = "wiki_span_corruption"
LANGUAGES = [f"wiki_{language}_span_corruption" for language in ("en", "ro", "sw", "fi")]
# Of each language another share is read, as if the caches had other sizes.
SHARES = "; ".join(
    f"{task}: {share}"
    for task, share in zip(LANGUAGES, ("1", "0.5", "2000 tokens", "0.1"), strict=True)
)
ROWS = 10_000


@pytest.fixture(scope="module")
def caches(text_cache, tmp_path_factory):
    """Returns a folder with four languages, each a copy of a small cache."""
    folder = tmp_path_factory.mktemp("languages")
    for task in LANGUAGES:
        shutil.copytree(text_cache, folder / task)
    language_set.write(str(folder), WIKI, ["en", "ro", "sw", "fi"])
    return folder


def sizes(run):
    return np.array([len(source.maker.windows) for source in run.data.sources])


def test_rows_of_each_language_follow_the_law(caches):
    run = run_of(caches, WIKI, "--mixing.alpha=0.3", f"--data.take={SHARES}")
    assert [source.task for source in run.data.sources] == LANGUAGES
    counts = np.bincount(places(run, ROWS // 8)[0])
    law = sizes(run) ** 0.3 / (sizes(run) ** 0.3).sum()
    assert len(set(sizes(run).tolist())) == 4
    assert np.abs(counts - ROWS * law).max() < 2
    # Not by chance: alpha=1 is another law.
    assert np.abs(counts - ROWS * sizes(run) / sizes(run).sum()).max() > 500


def test_sizes_may_be_counted_otherwise(caches):
    run = run_of(
        caches, WIKI, "--mixing.alpha=1", "--mixing.size=documents", f"--data.take={SHARES}"
    )
    documents = run.data.tasks[0].manifest.total("train", "documents")
    expected = documents * sizes(run) / sizes(run)[0]
    assert run.data.rates == [(0, pytest.approx(list(expected / expected.sum())))]


def test_no_language_is_read_more_often_than_allowed(caches):
    steps = 60
    flags = (f"--data.take={SHARES}", "--mixing.alpha=0.3", f"--train_steps={steps}")
    free = np.bincount(places(run_of(caches, WIKI, *flags), steps)[0]) / sizes(
        run_of(caches, WIKI, *flags)
    )
    limited = run_of(caches, WIKI, *flags, "--mixing.max_epochs=1")
    epochs = np.bincount(places(limited, steps)[0]) / sizes(limited)
    assert free.max() > 1.5
    assert (epochs * sizes(limited) <= sizes(limited) + 2.5).all()
    # Those below the limit keep their proportions.
    shares, weights = np.array(limited.data.rates[0][1]), sizes(limited) ** 0.3
    below = shares * steps * 8 < sizes(limited) - 1
    assert 1 < np.count_nonzero(below) < 4
    assert np.ptp(shares[below] / weights[below]) < 1e-12
    with pytest.raises(UserError, match=r"leaves nothing to read after update \d+: the limits"):
        run_of(caches, WIKI, *flags, "--mixing.max_epochs=0.1").data.rates  # noqa: B018
    with pytest.raises(UserError, match="leave out one of them"):
        run_of(caches, WIKI, "--mixing.max_epochs=1", f"--mixing.schedule=3: {LANGUAGES[0]}=1")


def test_limits_bind_the_length_of_a_run(caches):
    flags = ("--mixing.alpha=0", f"--data.take={SHARES}", "--mixing.max_epochs=2")
    before = run_of(caches, WIKI, *flags, "--train_steps=40").data.record
    after = run_of(caches, WIKI, *flags, "--train_steps=60").data.record
    assert "the rates of the tasks were" in task_record.changes(before, after, 40)[0]
    assert task_record.changes(before, before, 40) == []


def test_a_share_is_repeated_in_a_new_order(caches):
    task = LANGUAGES[0]
    run = run_of(caches, task, "--data.take=2^11 tokens")
    (count,) = sizes(run)
    windows = run.data.sources[0].maker.windows
    assert count == 2**11 // windows.window_tokens
    _, epochs, _, read = places(run, 5 * count)
    for epoch in range(5):
        assert sorted(read[epochs == epoch]) == list(range(count))
    assert not np.array_equal(read[:count], read[count : 2 * count])
    said = dict(run.data.consequences())
    assert said["take"].startswith(f"2,048 tokens: each epoch reads the first {count} windows")
    assert f"{80_000 / count:,.2f} epochs in all" in said["batch"]
    # Validation is whole.
    whole = run_of(caches, task)
    assert run.data.evaluation("validation", 8)[0].batches == (
        whole.data.evaluation("validation", 8)[0].batches
    )


@pytest.mark.parametrize(
    ("take", "says"),
    [
        ("1e9 tokens", "tokens in train, not this many"),
        ("10 tokens", "is less than one window"),
        ("2", "is more than the whole, 1"),
        ("some", "some is not an amount"),
        (f"{LANGUAGES[1]}_: 0.5", f"did you mean {LANGUAGES[1]}"),
    ],
)
def test_amounts_that_cannot_be_taken_are_one_line(caches, take, says):
    with pytest.raises(UserError, match=says):
        run_of(caches, f"{LANGUAGES[0]},{LANGUAGES[1]}", f"--data.take={take}").data.sources  # noqa: B018


def test_a_run_keeps_the_languages_that_it_began_with(caches, text_cache, tmp_path):
    folder = tmp_path / "caches"
    shutil.copytree(caches, folder)
    flags = ("--mixing.alpha=0.3", f"--model_dir={tmp_path}/model")
    (tmp_path / "model").mkdir()
    run = run_of(folder, WIKI, *flags)
    save_config(run.config, {}, run.data.record)
    shutil.copytree(text_cache, folder / "wiki_cs_span_corruption")
    language_set.write(str(folder), WIKI, ["cs", "en", "ro", "sw", "fi"])
    resumed = run_of(folder, WIKI, *flags)
    assert resumed.data.record == run.data.record
    assert np.array_equal(places(resumed, 5), places(run, 5))
    assert len(run_of(folder, WIKI, "--mixing.alpha=0.3").data.sources) == 5
    # Another objective on the same caches.
    other = run_of(folder, "wiki_prefix_lm", "--mixing.alpha=0.3")
    assert [source.task for source in other.data.sources][1] == "wiki_en_prefix_lm"


def test_alpha_of_one_task_has_no_effect(caches):
    with pytest.raises(UserError, match="alpha has no effect"):
        run_of(caches, LANGUAGES[0], "--mixing.alpha=0.3")
    with pytest.raises(UserError, match="from 0 to 1"):
        run_of(caches, WIKI, "--mixing.alpha=3")


def test_the_mean_of_languages_weighs_each_the_same():
    one = {"loss": 2.0, "accuracy": 0.5, "unigram_entropy": 6.0, "bits_per_byte": 1.0, "tokens": 9}
    other = {"loss": 4.0, "accuracy": 0.1, "unigram_entropy": 5.0, "tokens": 1}
    found = _mean([one, other])
    assert found["loss"] == 3
    assert found["perplexity"] == pytest.approx(np.exp(3))
    assert "bits_per_byte" not in found
    assert "tokens" not in found
