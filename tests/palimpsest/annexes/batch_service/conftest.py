"""Servers of batches in this process, on the cache of the trainer's tests."""

import contextlib
import io

import pytest

import palimpsest
from palimpsest.annexes.batch_service.account import Account
from palimpsest.annexes.batch_service.gate import Limits
from palimpsest.annexes.batch_service.opening import Opener
from palimpsest.annexes.batch_service.service import Service, Size
from tests.trainer.conftest import text_cache

__all__ = ["text_cache"]
# Span corruption and a prefix LM on one cache, packed.
HOW = {
    "task": "python_docs_span_corruption=0.7,python_docs_prefix_lm=0.3",
    "batch_size": 4,
    "lengths": {"inputs": 128, "targets": 128},
    "data": {"pack_examples": True, "example_inputs": 32, "example_targets": 32},
    "train_steps": 1000,
}


def address(server) -> str:
    return f"grpc://127.0.0.1:{server.port}"


@pytest.fixture(scope="session")
def caches(text_cache):
    return str(text_cache.parent)


@pytest.fixture
def serve(caches):
    """Returns a function that starts a server; all stop after the test."""
    with contextlib.ExitStack() as stack:

        def start(port=0, limits=None, kept=1 << 24, cache_dir=caches, **more):
            log = io.StringIO()
            size = Size(kept, 1 << 28, 1)
            limits = limits or Limits(64, 1 << 28, 1e6)
            place, opener = ("127.0.0.1", port), Opener(cache_dir)
            made = Service(place, opener, limits, size, Account(log), **more)
            made.log = log
            stack.callback(lambda: made.stopping or made.stop(10))
            return made

        yield start


@pytest.fixture(scope="session")
def local(caches):
    """The batches as this process reads them."""
    return palimpsest.batches(cache_dir=caches, **HOW)
