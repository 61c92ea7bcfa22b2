"""Options of the whole test suite, and a bucket for those tests that need one."""

import asyncio
import os
import types
from pathlib import Path

import hypothesis
import pytest

from tests.gcs_server import GcsServer

# Small models compile in a third less time so, here and in every process that a test starts: both
# sides of a comparison of bits are alike. JAX reads it when it is first imported.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")

# A test's time is the machine's; what is fast is measured in benchmarks/.
hypothesis.settings.register_profile("palimpsest", deadline=None)
hypothesis.settings.load_profile("palimpsest")


@pytest.fixture(scope="module")
def compiled_as_users_do():
    """For tests that hold what a user gets against something else to the bit or nearly so."""
    import jax

    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--reference",
        type=Path,
        default=Path(__file__).parent / "golden" / "reference",
        metavar="DIR",
        help="folder of T5X arrays the golden tests are held against (default: %(default)s)",
    )
    parser.addoption(
        "--corpus",
        default="python_docs",
        metavar="SPEC",
        help="corpus whose text the trainer's tests train on, as pipeline.build's --corpus "
        "(default: %(default)s)",
    )


@pytest.fixture
def in_bucket(monkeypatch):
    """Returns a function: a server of tests/gcs_server.py -> None; this process goes to it."""
    import fsspec

    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # read at the import
    import gcsfs
    import gcsfs.retry

    from tasks.storage import files

    def go(gcs: GcsServer) -> None:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.url)
        # google.auth reads the address of the metadata server once a process.
        monkeypatch.setitem(fsspec.config.conf, "gcs", {"token": "anon"})
        monkeypatch.setenv("PALIMPSEST_RETRY_DELAY", "0.01")
        sooner = types.SimpleNamespace(sleep=lambda seconds: asyncio.sleep(seconds / 100))
        monkeypatch.setattr(gcsfs.retry, "asyncio", sooner)
        forget()

    def forget() -> None:
        gcsfs.GCSFileSystem.clear_instance_cache()
        files._check_bucket.cache_clear()

    yield go
    forget()


@pytest.fixture
def gcs(in_bucket):
    """A server with the bucket "bucket", which this process goes to."""
    with GcsServer() as server:
        in_bucket(server)
        yield server
