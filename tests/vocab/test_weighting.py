"""Vocabularies of several corpora: weights count as if texts were repeated, exactly."""

import json

import numpy as np
import pytest

from tasks.reading import sources
from tasks.terminal.command_line import UserError
from tasks.terminal.flags import made, parse
from vocab import count, train, weighting
from vocab.options import Options
from vocab.weighting import Corpora
from vocab.word_splitter import Splitter, normaliser

A = ["the cat sat on the mat", "a cat and a hat", "cats sit on mats and hats"] * 4
B = ["pisica stă pe covor", "o pălărie și o pisică", "pisicile stau pe covoare"] * 5


def given(words):
    return made(weighting.CorporaFlags, parse(weighting.CorporaFlags, list(words)))


@pytest.fixture
def corpora(tmp_path):
    """Returns a function: lines -> the corpus of a file with these lines."""

    def of(name, lines):
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
        return sources.resolve(sources.parse(f"text:{tmp_path}/{name}.txt?validation=0"))

    return of


def size(lines):
    return sum(len(line.encode()) for line in lines)


@pytest.mark.processes
@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_a_weighted_corpus_is_a_repeated_one(corpora, tmp_path, model_type):
    options = Options(44, extra_ids=2, character_coverage=1.0, model_type=model_type)
    parts = {"a": corpora("a", A), "b": corpora("b", B)}
    weighted = Corpora(parts, {"a": 3.0 * size(A), "b": 1.0 * size(B)})
    repeated = corpora("both", A * 3 + B)
    ours = train.train(options, weighted, str(tmp_path / "weighted"))
    theirs = train.train(options, repeated, str(tmp_path / "repeated"))
    assert ours.model == theirs.model
    manifest = json.loads((tmp_path / "weighted" / "manifest.json").read_text())
    assert manifest["factors"] == {"a": 3.0, "b": 1.0}
    assert manifest["corpus"]["weights"] == {"a": 3.0 * size(A), "b": 1.0 * size(B)}
    assert train.train(options, weighted, str(tmp_path / "weighted")).model == ours.model
    with pytest.raises(UserError, match="made with other settings: weights"):
        train.train(options, Corpora(parts, {"a": 1.0, "b": 1.0}), str(tmp_path / "weighted"))


def test_counts_are_multiplied_and_rounded(corpora, tmp_path):
    (tmp_path / "counts").mkdir()
    splitter = Splitter(normaliser("nmt_nfkc", False, ()), (), False)
    jobs = [
        count.Job(str(tmp_path / "counts"), key * 16, corpora(key, lines), splitter, 10**6)
        for key, lines in (("a", A), ("b", B))
    ]
    for job in jobs:
        count.run(job, None)
    plain = [count.add_up(job, 10**9, 10**6) for job in jobs]
    both = count.add_up(jobs, 10**9, 10**6, [2.5, 1.0])
    found = dict(zip(both.words.to_pylist(), both.counts.tolist(), strict=True))
    expected: dict[str, int] = {}
    for counts, factor in zip(plain, (2.5, 1.0), strict=True):
        for word, number in zip(counts.words.to_pylist(), counts.counts.tolist(), strict=True):
            expected[word] = expected.get(word, 0) + int(np.rint(number * factor))
    assert found == expected


def test_shares_follow_weights_or_alpha():
    sizes = {"a": 1000, "b": 10}
    both = {"a": None, "b": None}
    assert Corpora(both).factors(sizes) == {"a": 1.0, "b": 1.0}
    assert Corpora(both, {"a": 1.0, "b": 1.0}).factors(sizes) == {"a": 1.0, "b": 100.0}
    factors = Corpora(both, alpha=0.3).factors(sizes)
    assert factors["a"] == 1
    assert 10 * factors["b"] / 1000 == pytest.approx((10 / 1000) ** 0.3)
    with pytest.raises(UserError, match="b has no text in train"):
        Corpora(both).factors({"a": 1, "b": 0})


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--corpus=a={}", "--weights=1"], "weights has no effect, because there is only one"),
        (["--corpus={}", "--alpha=0.3"], "alpha has no effect, because there is only one"),
        (["--corpus=a={}", "--corpus=b={}", "--weights=1"], "has 1 weights, but there are 2"),
        (["--corpus=a={}", "--corpus=b={}", "--weights=1,x"], "x is not a number"),
        (["--corpus=a={}", "--corpus=b={}", "--weights=1,0"], "weight of b must be above 0"),
        (["--corpus=a={}", "--corpus=b={}", "--weights=a=1,c=1"], "must name each corpus once"),
        (["--corpus=a={}", "--corpus=b={}", "--alpha=2"], "must be from 0 to 1"),
        (["--corpus=a={}", "--corpus=b={}", "--alpha=1", "--weights=1,1"], "alternatives"),
        (["--corpus={}", "--corpus={}"], "twice"),
    ],
)
def test_mistakes_are_one_line(corpora, flags, says):
    spec = str(corpora("a", A).spec)
    with pytest.raises(UserError, match=says):
        weighting.corpora_of(given(flag.format(spec) for flag in flags))


def test_weights_are_named_or_in_order(corpora):
    spec = str(corpora("a", A).spec)
    both = [f"--corpus=x={spec}", f"--corpus=y={spec}"]
    for weights in ("2,3", "y=3,x=2"):
        found = weighting.corpora_of(given([*both, f"--weights={weights}"]))
        assert found.weights == {"x": 2.0, "y": 3.0}


def test_weights_whose_counts_pass_64_bits_are_refused():
    with pytest.raises(UserError, match="--weights are too far apart"):
        Corpora({}, {"a": 1.0, "b": 1e25}).factors({"a": 100, "b": 100})
    assert Corpora({}, {"a": 1.0, "b": 1e9}).factors({"a": 9, "b": 9}) == {"a": 1.0, "b": 1e9}
