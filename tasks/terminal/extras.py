"""Packages that only some commands need, and the extras that install them; our own version."""

import contextlib
import importlib
import importlib.util
import json
import os
import pathlib
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from typing import Any
from urllib.parse import unquote, urlsplit

from tasks.terminal.command_line import UserError

# The extra that installs an imported package.
EXTRAS = {
    package: extra
    for extra, packages in {
        "pipeline": "apache_beam datasets fastwarc numba pandas pyarrow sentencepiece tokenizers "
        "zstandard",
        "trainer": "flax gin grain jax jaxlib optax orbax tensorboardX",
        "huggingface": "safetensors torch transformers",
        "harness": "accelerate lm_eval",
        "seqio": "seqio tensorflow",
        "gcp": "gcsfs google",
        "demo": "matplotlib",
        "spark": "pyspark",
        "ray": "ray",
    }.items()
    for package in packages.split()
}
DISTRIBUTION = "palimpsest-lm"  # the package index has another project named palimpsest
# Where the packages lie: a clone, or site-packages.
_ROOT = pathlib.Path(__file__).parents[2]
_PROJECT = "pyproject.toml"


def version() -> str:
    """Returns the version of this project, in a clone or as it is installed."""
    return str(_project().get("version") or metadata.version(DISTRIBUTION))


def install(extra: str) -> str:
    """Returns the command that installs the packages of an extra, from where ours come."""
    if _project():
        here = os.path.realpath(os.curdir) == os.path.realpath(_ROOT)
        return f"pip install --editable '{'.' if here else _ROOT}[{extra}]'"
    url = _origin()
    if (link := urlsplit(url)).scheme == "file":
        return f"pip install '{unquote(link.path)}[{extra}]'"
    return f"pip install '{DISTRIBUTION}[{extra}]{f' @ {url}' if url else ''}'"


def _project() -> dict[str, Any]:
    """Returns the table [project] of the clone that we are in, or {}."""
    try:
        project = tomllib.loads((_ROOT / _PROJECT).read_text(encoding="utf-8")).get("project", {})
    except OSError:
        return {}
    return project if project.get("name") == DISTRIBUTION else {}


def _origin() -> str:
    """Returns the URL of the wheel or repository that was installed; "" if an index chose it.

    Source: packaging.python.org/specifications/direct-url.
    """
    try:
        text = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return ""
    found = json.loads(text or "{}")
    if control := found.get("vcs_info"):
        return f"{control['vcs']}+{found['url']}@{control['commit_id']}"
    return str(found.get("url", ""))


def versions(distributions: Iterable[str]) -> dict[str, str]:
    """Returns the versions of those distributions that are installed, by name."""
    found = {}
    for name in distributions:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def missing(work: str, package: str | None, extra: str) -> UserError:
    """Returns the error for `work`, which needs a package that is not installed."""
    return UserError(f"{work} needs the package {package}: {install(extra)}")


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def prepare_tensorflow() -> None:
    """Imports triton where it and TensorFlow are installed, before anything imports TensorFlow.

    torch's CUDA build brings triton, and transformers imports it. Both libraries contain LLVM, and
    loading triton after TensorFlow is a segmentation fault (triton 3.7.1, TensorFlow 2.21.0).
    """
    if "tensorflow" not in sys.modules and _installed("tensorflow") and _installed("triton"):
        with contextlib.suppress(ImportError):
            importlib.import_module("triton")


def check_triton(work: str) -> None:
    """Raises UserError if `work`, which imports triton, would crash a process with TensorFlow."""
    if "tensorflow" in sys.modules and "triton" not in sys.modules and _installed("triton"):
        raise UserError(
            f"{work} imports triton, which crashes Python if TensorFlow was imported before it: "
            "begin your program with `import triton`"
        )


@contextlib.contextmanager
def needed(work: str, extra: str) -> Iterator[None]:
    """Raises UserError if an import in the block fails; `work` is what needs the package."""
    if extra == "seqio":
        prepare_tensorflow()
    try:
        yield
    except ModuleNotFoundError as error:
        raise missing(work, error.name, extra) from error
    except ImportError as error:
        raise UserError(f"{work} cannot import {error.name}: {error}; {install(extra)}") from error


@contextlib.contextmanager
def named() -> Iterator[None]:
    """Raises UserError for a package of EXTRAS that is missing in the block."""
    try:
        yield
    except ModuleNotFoundError as error:
        # JAX raises one without a name, "jax requires jaxlib to be installed …".
        words = [word for word in str(error).split() if word in EXTRAS]
        name = error.name or " ".join(words[-1:])
        package = name.partition(".")[0]
        if package not in EXTRAS:
            raise
        raise missing("this command", package, EXTRAS[package]) from error
