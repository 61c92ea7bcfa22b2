"""Registered tasks read by stock seqio: cached and uncached, with every objective."""

import shutil

import numpy as np
import pytest
import seqio

from tasks.cache.manifest import CacheManifest
from tasks.cache.windows import Windows
from tasks.objectives import Lengths
from tasks.reading import sources
from tasks.terminal.command_line import UserError
from tests.support.processes import started
from tests.support.spans import rebuilt

pytestmark = [pytest.mark.tensorflow, pytest.mark.processes]

NAMES = {
    "python_docs_span_corruption": {"inputs": 64, "targets": 14},
    "python_docs_prefix_lm": {"inputs": 64, "targets": 64},
    "python_docs_autoregressive_lm": {"targets": 64},
    "python_docs_decoder_prefix_lm": {"targets": 64},
    "python_docs_ul2": {"inputs": 64, "targets": 64},
    "python_docs_iid_15_u_u": {"inputs": 64, "targets": 64},
    "python_docs_masked_lm": {"inputs": 64, "targets": 64},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A corpus of real prose in two files, its vocabulary, and its cache under each task's name."""
    from trainer.annexes.seqio_tasks import catalogue

    folder = tmp_path_factory.mktemp("seqio")
    corpus = sources.resolve(sources.parse("python_docs"))
    _, batch = next(iter(sources.read(corpus, corpus.pieces[1])))
    text = "\n".join(batch.column("text").to_pylist())
    lines = [line for line in text.splitlines() if len(line) > 20][:1500]
    (folder / "train.txt").write_text("\n".join(lines[100:]))
    (folder / "validation.txt").write_text("\n".join(lines[:100]))
    spec = f"text:{folder}/*.txt?split=train"
    run("vocab.train", f"--corpus={spec}", "--vocab_size=500", f"--output={folder}/vocabulary")
    first, *others = NAMES
    run(
        "pipeline.build",
        f"--task={first}",
        f"--corpus={spec}",
        f"--vocabulary={folder}/vocabulary",
        f"--cache_dir={folder}/cache",
        "--row_tokens=100",
    )
    for name in others:  # the same rows serve every objective
        shutil.copytree(folder / "cache" / first, folder / "cache" / name)
    catalogue.register(f"{folder}/vocabulary", corpus=spec, names=NAMES, row_tokens=100)
    seqio.add_global_cache_dirs([f"{folder}/cache"])
    return folder


def run(*arguments):
    result = started("-m", *arguments)
    assert result.returncode == 0, result.stderr


def examples(name, **kwargs):
    dataset = seqio.get_mixture_or_task(name).get_dataset(
        NAMES[name], split=kwargs.pop("split", "train"), shuffle=False, seed=7, **kwargs
    )
    return list(dataset.as_numpy_iterator())


def stream(folder, name, split):
    cache = f"{folder}/cache/{name}"
    windows = Windows(cache, CacheManifest.load(cache), split, 1, keep_tails=True)
    return windows.read(np.arange(len(windows)))[0][:, 0]


def window_of(example, size):
    """Returns the corpus tokens of an example of span corruption."""
    return rebuilt(example["inputs"][:-1], example["targets"][:-1], size - 100)


@pytest.mark.parametrize("use_cached", [True, False])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_span_corruption_is_whole_and_invertible(folder, use_cached, split):
    name = "python_docs_span_corruption"
    found = examples(name, use_cached=use_cached, split=split)
    assert {tuple(sorted(example)) for example in found} == {("inputs", "targets")}
    full = [e for e in found if len(e["inputs"]) == 64 and len(e["targets"]) == 14]
    # The last window of each group of rows is shorter.
    assert len(full) > 0.9 * len(found)
    for example in found:
        assert example["inputs"].dtype == example["targets"].dtype == np.int32
        assert example["inputs"][-1] == example["targets"][-1] == 1
    rebuilt = [token for example in found for token in window_of(example, 600)]
    if split == "validation":  # one shard, so one order
        np.testing.assert_array_equal(rebuilt, stream(folder, name, split))
    else:
        assert sorted(rebuilt) == sorted(stream(folder, name, split))


def test_other_objectives(folder):
    for example in examples("python_docs_prefix_lm", use_cached=True):
        assert len(example["inputs"]) + len(example["targets"]) <= 63 + 2
        assert len(example["targets"]) > 1
    whole = [e["targets"] for e in examples("python_docs_autoregressive_lm", use_cached=True)]
    rebuilt = np.concatenate([targets[:-1] for targets in whole])
    assert sorted(rebuilt) == sorted(stream(folder, "python_docs_autoregressive_lm", "train"))


@pytest.mark.parametrize("name", NAMES)
def test_the_trainer_makes_the_same_examples_of_the_same_keys(folder, name, monkeypatch):
    from tasks import registry, vocabulary

    spec = registry.get(name)
    calls = []
    kind = type(spec.objective)
    made_by = kind.examples

    def watched(self, tokens, lengths, keys, *more):
        made = made_by(self, tokens, lengths, keys, *more)
        calls.append((tokens, lengths, keys))
        return made

    monkeypatch.setattr(kind, "examples", watched)
    found = examples(name, use_cached=True, split="validation")
    monkeypatch.undo()
    ids = vocabulary.load(f"{folder}/vocabulary").ids
    lengths = Lengths(NAMES[name].get("inputs", 0), NAMES[name]["targets"])
    expected = []
    for tokens, sizes, keys in calls:
        made = spec.objective.examples(tokens, sizes, keys, lengths, ids)
        expected += [
            {feature: rows[row, : counts[row]] for feature, (rows, counts) in made.items()}
            for row in range(len(tokens))
        ]
    assert len(found) == len(expected) > 10
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys() == set(spec.objective.features)
        for feature in one:
            np.testing.assert_array_equal(one[feature], other[feature], err_msg=feature)


def test_tasks_that_the_vocabulary_does_not_serve_are_left_out(folder):
    from tasks import registry
    from trainer.annexes.seqio_tasks import catalogue

    names = {task.name for task in catalogue.register(f"{folder}/vocabulary", separator="none")}
    assert set(registry.tasks()) - names >= {"rlm_full_lm", "c4_iid_50_u_u"}
    assert names >= {"c4_iid_15_u_u", "rlm_ul2"}
    with pytest.raises(UserError, match="--separator=eos"):
        catalogue.register(f"{folder}/vocabulary", names=["python_docs_full_lm"], separator="none")
    (task,) = catalogue.register(f"{folder}/vocabulary", names=["python_docs_full_lm"])
    assert list(task.output_features) == ["targets"]


def test_noise_is_drawn_after_the_cache(folder):
    name = "python_docs_span_corruption"
    epochs = examples(name, use_cached=True, num_epochs=2, split="validation")
    # Windows may span the border between epochs, as with T5's own concatenation.
    once = stream(folder, name, "validation")
    rebuilt = [token for example in epochs for token in window_of(example, 600)]
    np.testing.assert_array_equal(rebuilt, [*once, *once])
    assert len({tuple(example["inputs"]) for example in epochs}) == len(epochs)
    again = examples(name, use_cached=True, num_epochs=2, split="validation")
    for one, other in zip(epochs, again, strict=True):
        np.testing.assert_array_equal(one["inputs"], other["inputs"])


def test_hosts_read_different_shards(folder):
    parts = [
        examples(
            "python_docs_span_corruption",
            use_cached=True,
            shard_info=seqio.ShardInfo(index=index, num_shards=2),
        )
        for index in range(2)
    ]
    whole = examples("python_docs_span_corruption", use_cached=True)
    tokens = [t for part in parts for example in part for t in window_of(example, 600)]
    assert sorted(tokens) == sorted(t for example in whole for t in window_of(example, 600))


def test_features_convert_as_t5x_does(folder):
    dataset = seqio.get_dataset(
        "python_docs_span_corruption",
        task_feature_lengths={"inputs": 64, "targets": 14},
        dataset_split="train",
        shuffle=True,
        feature_converter=seqio.EncDecFeatureConverter(pack=True),
        use_cached=True,
        seed=3,
    )
    batch = next(dataset.batch(4).as_numpy_iterator())
    assert batch["encoder_input_tokens"].shape == (4, 64)
    assert batch["decoder_target_tokens"].shape == (4, 14)
    assert (batch["decoder_loss_weights"] > 0).mean() > 0.9
