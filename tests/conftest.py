"""Options of the whole test suite, and a bucket for the tests that need one."""

import asyncio
import contextlib
import ctypes
import gc
import os
import platform
import resource
import sys
import types
from importlib import metadata
from pathlib import Path

import hypothesis
import pytest

from tests.support import peers
from tests.support.servers.gcs import GcsServer

# This cuts the compile time of small models by a third, here and in every process that a test
# starts, so that bitwise comparisons stay fair. JAX reads it when it is first imported.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
# gcsfs would otherwise ask Google what kind of bucket the local server has; read at its import.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
# XLA's newer code generator for the CPU makes slightly faster programs and takes far longer: it
# is 40 % of the processor time of a test of a model. Small programs that are split between threads
# take a fifth longer.
_FLAGS = "--xla_cpu_parallel_codegen_split_count=1"
if metadata.version("jax") < "0.12":  # later releases end at a flag that they do not know
    _FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()
# Compiled programs are kept from one run of the tests to the next, and shared by their processes.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "xla")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

# A worker frees the programs that it has compiled above this memory after a file of tests, and
# where a test has taken it this much further than it was after the last time.
MEMORY_BYTES, MORE_BYTES = 600_000_000, 300_000_000
_left_bytes = MEMORY_BYTES

# The time of a test depends on the machine; benchmarks/ measures speed. `make test` draws the same
# examples each time, so that it judges the change at hand; `make fuzz` draws others.
hypothesis.settings.register_profile("palimpsest", deadline=None, derandomize=True)
hypothesis.settings.register_profile("fuzz", deadline=None, derandomize=False, max_examples=500)
hypothesis.settings.load_profile("palimpsest")


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Frees compiled programs of models, which take up to a gigabyte."""
    global _left_bytes
    ends = nextitem is None or nextitem.path != item.path
    limit = MEMORY_BYTES if ends else _left_bytes + MORE_BYTES
    if "jax" in sys.modules and resident_bytes() > limit:
        sys.modules["jax"].clear_caches()
        gc.collect()
        if platform.libc_ver()[0] == "glibc":
            ctypes.CDLL(None).malloc_trim(0)
        _left_bytes = resident_bytes()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.fixture(scope="module")
def compiled_as_users_do():
    """Compiles as for users, for tests that compare their results bitwise or nearly so."""
    import jax

    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="module")
def browser():
    """Returns a headless Chromium; the test is skipped where there is none."""
    pytest.importorskip("playwright.sync_api", reason="needs playwright: make test-browser")
    from playwright.sync_api import Error

    from tests.support.browser import chromium

    with contextlib.ExitStack() as stack:
        try:
            started = stack.enter_context(chromium())
        except Error as error:
            pytest.skip(f"Chromium does not start: {error.message.splitlines()[0]}")
        yield started


def pytest_sessionstart() -> None:
    # A worker's heap grows to millions of objects that live as long as it does, mostly JAX's. With
    # Python's thresholds, the garbage collector's passes over them take a seventh of the time.
    gc.freeze()
    gc.set_threshold(200_000, 20, 1000)


# The longest files. They begin first, so that both workers end together.
LONGEST = (
    "model/test_every_preset", "kernels/test_fused_attention", "vocab/test_train",
    "starting/test_init_from", "config/test_presets", "model/test_visibility",
    "model/test_precision_and_dropout", "kernels/test_triton_attention", "model/test_march_models",
    "model/test_shared_slots", "optim/test_mup", "tokenizer/test_word_tokenizer",
    "model/test_layers", "tokenizer/test_tokenize", "excluding/test_lists",
    "optim/test_optimizer", "deduplication/test_translation", "model/test_scanned",
    "decoding/test_presets", "golden/test_t5x_training", "engine/test_trainable",
    "model/test_new_parts", "reporting/test_metrics", "model/test_cdq",
    "checkpoints/test_checkpoint", "palimpsest/test_api", "engine/test_sharding",
    "engine/test_processes", "trainer/test_pretrain", "trainer/test_compare",
    "sparse_patterns/test_sparse_attention", "building/test_build_exact", "reading/test_hub",
    "model/test_encoder", "engine/test_microbatches", "experiments/test_sweep",
    "trainer/test_objectives", "huggingface/test_export", "building/test_build_content",
    "decoding/test_transformers", "building/test_seqio_cache", "data/test_seqio_data",
    "trainer/test_convert", "building/test_build_tokenizer_json", "building/test_pairs",
    "golden/test_t5x_parameters", "filtering/test_sets", "building/test_extend",
    "deduplication/test_engine", "pipeline/test_verify", "laboratory/test_samples",
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    for name, reason in peers.MARKS.items():
        config.addinivalue_line("markers", f"{name}: {reason}; run by `pytest --peer={name}`")
    peers.hide(config.getoption("peer"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files of other peers, whose imports would fail, and for a peer all others."""
    if collection_path.suffix != ".py":
        return None
    named, whole = peers.marks_of(collection_path)
    peer = config.getoption("peer")
    return (peer not in named if peer else whole) or None


def _peer_of(item: pytest.Item) -> str | None:
    names = {mark.name for mark in item.iter_markers()}
    return next((peer for peer in peers.PEERS if peer in names), None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    peer = config.getoption("peer")
    others = [item for item in items if _peer_of(item) != peer]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if _peer_of(item) == peer]
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get("/".join(item.path.with_suffix("").parts[-2:]), 99))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--peer",
        choices=tuple(peers.PEERS),
        help="run the tests that need this peer, instead of those that need none",
    )
    parser.addoption(
        "--reference",
        type=Path,
        default=Path(__file__).parent / "golden" / "reference",
        metavar="DIR",
        help="folder of T5X arrays that the golden tests compare with (default: %(default)s)",
    )
    parser.addoption(
        "--corpus",
        default="python_docs",
        metavar="SPEC",
        help="corpus that the tests train on, as in pipeline.build (default: %(default)s)",
    )


@pytest.fixture
def in_bucket(monkeypatch):
    """Returns a function that points this process at a server of tests/support/servers/gcs.py."""
    import fsspec
    import gcsfs
    import gcsfs.retry

    from tasks.storage import store

    def go(gcs: GcsServer) -> None:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.url)
        # google.auth reads the metadata server's address once per process, so use no credentials.
        monkeypatch.setitem(fsspec.config.conf, "gcs", {"token": "anon"})
        monkeypatch.setenv("PALIMPSEST_RETRY_DELAY", "0.01")
        sooner = types.SimpleNamespace(sleep=lambda seconds: asyncio.sleep(seconds / 100))
        monkeypatch.setattr(gcsfs.retry, "asyncio", sooner)
        forget()

    def forget() -> None:
        gcsfs.GCSFileSystem.clear_instance_cache()
        store._check_bucket.cache_clear()

    yield go
    forget()


@pytest.fixture
def gcs(in_bucket):
    """Returns a server with the bucket "bucket" that this process uses."""
    with GcsServer() as server:
        in_bucket(server)
        yield server
