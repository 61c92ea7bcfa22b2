"""The adapters for grain, datasets and seqio all give the windows of the cache."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tasks import adapters
from tasks.adapters import CacheSource
from tasks.cache.manifest import CacheManifest
from tasks.cache.windows import Windows
from tasks.terminal.command_line import UserError
from tests.support.runs import TASK, run_of

# Row length of the cache; an autoregressive LM appends an EOS.
WINDOW = 100
LM = "python_docs_autoregressive_lm"
DOCS = Path(__file__).parents[2] / "docs" / "adapters.md"


@pytest.fixture(scope="module")
def windows(text_cache):
    """The windows of the training split, cut as seqio cuts them."""
    manifest = CacheManifest.load(str(text_cache))
    found = Windows(str(text_cache), manifest, "train", WINDOW, True, across_shards=False)
    tokens_WN, lengths_W = found.read(np.arange(len(found)))
    return [tokens_N[:length] for tokens_N, length in zip(tokens_WN, lengths_W, strict=True)]


@pytest.fixture(scope="module")
def source(text_cache):
    return CacheSource(str(text_cache), keep_tails=True, across_shards=False)


def assert_equal(found, expected):
    assert len(found) == len(expected) > 100
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_grain_gives_the_windows(source, windows):
    import grain

    dataset = adapters.grain_dataset(source)
    assert isinstance(dataset, grain.MapDataset)
    assert_equal([element["tokens"] for element in dataset], windows)
    shuffled = dataset.shuffle(seed=3)
    order = [element["tokens"].tobytes() for element in shuffled]
    assert order != [window.tobytes() for window in windows]
    assert sorted(order) == sorted(window.tobytes() for window in windows)


def test_datasets_gives_the_windows(source, windows):
    import datasets

    dataset = adapters.iterable_dataset(source, shards=5)
    assert isinstance(dataset, datasets.IterableDataset)
    assert dataset.num_shards == 5
    assert_equal([element["tokens"] for element in dataset], windows)
    # Workers share the parts; none is read twice.
    halves = [list(dataset.shard(num_shards=2, index=index)) for index in range(2)]
    assert_equal(
        sorted(element["tokens"] for half in halves for element in half),
        sorted(window.tolist() for window in windows),
    )


def assert_row(batch, row, example):
    for name, feature in (("inputs", "encoder_input"), ("targets", "decoder_target")):
        size, row_L = len(example[name]), batch[f"{feature}_tokens"][row]
        np.testing.assert_array_equal(row_L[:size], example[name])
        assert not row_L[size:].any()
        assert example[name][-1] == 1


def test_examples_are_those_of_a_run(text_cache):
    data = run_of(text_cache, "--seed=7").data
    batches, epochs = data.batches(), 0
    step = 3 * len(data.sources[0].maker.windows) // 4  # in the fourth epoch
    places = batches.places(step)
    example = {"task": TASK, "inputs": 64, "targets": 18, "seed": 7}
    source = CacheSource(str(text_cache), **example, epoch=int(places.epochs[0]))
    batch = batches[step]
    for row, (epoch, window) in enumerate(zip(places.epochs, places.windows, strict=True)):
        if epoch != source.epoch:
            continue
        epochs += 1
        assert_row(batch, row, source[window])
    assert epochs
    assert source.epoch > 0
    other = CacheSource(**{**source.__getstate__(), "epoch": source.epoch + 1})
    assert any(
        source[index]["inputs"].tolist() != other[index]["inputs"].tolist() for index in range(4)
    )


def test_validation_examples_are_those_of_evaluation_in_a_run(text_cache):
    (rows,) = run_of(text_cache, "--seed=7").data.evaluation("validation", 4)
    batches = list(rows.iterate())
    more = {"keep_tails": True, "seed": 7, "epoch": 3}
    source = CacheSource(str(text_cache), "validation", TASK, 64, 18, **more)
    assert len(batches) == -(-len(source) // 4)
    for index in range(len(source)):
        assert_row(batches[index // 4], index % 4, source[index])


@pytest.mark.parametrize(
    ("adapter", "package"),
    [
        (adapters.grain_dataset, "grain"),
        (adapters.iterable_dataset, "datasets"),
    ],
)
def test_a_missing_package_is_one_line(source, monkeypatch, adapter, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"needs the package {package}: pip install "):
        adapter(source)


def test_a_source_that_does_not_fit_the_cache_is_rejected(text_cache, tmp_path):
    def first(**fields):
        return CacheSource(**{"cache": str(text_cache), **fields})[0]

    with pytest.raises(UserError, match="holds no cache"):
        first(cache=str(tmp_path))
    with pytest.raises(UserError, match="has no split test"):
        first(split="test")
    with pytest.raises(UserError, match=r"unknown task|no task"):
        first(task="python_docs_span")
    with pytest.raises(UserError, match="window_tokens has no effect with task"):
        first(task=LM, window_tokens=50)
    with pytest.raises(UserError, match="needs a cache with separator eos after documents"):
        first(task="python_docs_full_lm")
    source = CacheSource(str(text_cache))
    with pytest.raises(IndexError, match="windows in train, not"):
        source[len(source)]
    with pytest.raises(IndexError):
        source[-1]


@pytest.mark.parametrize(
    "number",
    [0, 1, pytest.param(2, marks=pytest.mark.tensorflow)],
)
def test_documented_examples_run(text_cache, number, tmp_path, monkeypatch):
    examples = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert len(examples) == 3
    assert all(len(example.splitlines()) <= 7 for example in examples)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "python_docs_span_corruption").symlink_to(text_cache)
    (tmp_path / "vocabulary").symlink_to(text_cache)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    try:
        exec(examples[number], names)
    finally:
        if "seqio" in names:
            names["seqio"].TaskRegistry.remove("python_docs_span_corruption")
            names["seqio"].set_global_cache_dirs([])
    example = names["example"]
    assert {"inputs", "targets"} <= set(example)
