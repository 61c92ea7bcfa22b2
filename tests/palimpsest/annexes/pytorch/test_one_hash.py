"""One hash of batches 0 to 999 of a mixture, however they are read and resumed."""

import hashlib
import itertools
import random

import numpy as np
import pytest

import palimpsest
from tests.support.runs import TASK, run_of

pytestmark = [
    pytest.mark.torch,
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # fewer cores than workers
]

COUNT, RESUMES = 1000, 17
MIXTURE = f"{TASK}=0.6,python_docs_prefix_lm=0.4"
FLAGS = {
    "batch_size": 8,
    "lengths": {"inputs": 128, "targets": 128},
    "data": {"pack_examples": True, "example_inputs": 40, "example_targets": 40},
}
WORDS = (
    *("--batch_size=8", "--data.pack_examples=true"),
    *("--data.example_inputs=40", "--data.example_targets=40"),
)


def digest(batches):
    """Returns the SHA-256 of 1,000 batches."""
    found, count = hashlib.sha256(), 0
    for batch in batches:
        count += 1
        for name in sorted(batch):
            found.update(name.encode() + np.asarray(batch[name]).tobytes())
    assert count == COUNT
    return found.hexdigest()


@pytest.fixture(scope="module")
def mixture(text_cache):
    return palimpsest.batches(MIXTURE, cache_dir=text_cache, **FLAGS)


@pytest.fixture(scope="module")
def trainers(text_cache):
    """The hash of what the trainer reads."""
    data = run_of(text_cache, *WORDS, task=MIXTURE, lengths=(128, 128)).data
    return digest(itertools.islice(data.training(0), COUNT))


def loaders(mixture, ranks, workers):
    """Returns the loaders of all ranks."""
    return [
        palimpsest.torch.DataLoader(mixture, "features", rank, ranks, workers)
        for rank in range(ranks)
    ]


def joined(found, count):
    """Yields the next whole batches, from the parts of all ranks."""
    for parts in itertools.islice(zip(*found, strict=True), count):
        yield {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def test_by_index_and_in_turn(mixture, trainers):
    assert digest(mixture[k] for k in range(COUNT)) == trainers
    assert digest(itertools.islice(mixture.shard(0, 1), COUNT)) == trainers


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (1, 1), (1, 4), (2, 0), (2, 1), (4, 0)])
def test_with_ranks_and_workers(mixture, trainers, ranks, workers):
    assert digest(joined(loaders(mixture, ranks, workers), COUNT)) == trainers


def test_resumed_with_other_ranks_and_workers(mixture, trainers):
    draw = random.Random(63)
    stops = sorted(draw.sample(range(1, COUNT), RESUMES))

    def resumed():
        state = None
        for first, end in itertools.pairwise([0, *stops, COUNT]):
            found = loaders(mixture, draw.choice([1, 2, 4]), draw.choice([0, 1, 4]))
            for each in found:
                if state:
                    each.load_state_dict(state)
                assert each.state == first
            yield from joined(found, end - first)
            state = found[0].state_dict()

    assert digest(resumed()) == trainers
