"""Fixtures: a small corpus, its vocabulary, and builds in this process or by the command."""

import hashlib
import pathlib
import signal
import sys

import pytest

from tasks.reading import stdlib_docs
from tests.support import corpora, small_tokenizers
from tests.support.child import beginning
from tests.support.processes import launched

TASK = "python_docs_span_corruption"
SPECIAL_CASES = {
    "emoji": "👩‍👩‍👧‍👦 family, 🇷🇴 flag, e\u0301 combining, \u202bעברית\u202c right to left",
    "nul": "a\x00b\x00c",
    "long": "word" * 5000,
    "one": "x",
}


@pytest.fixture(scope="session")
def documents() -> dict[str, str]:
    """Returns texts by id: some of the standard library's documentation, and special cases."""
    found = {name: text[:4000] for name, text in stdlib_docs.documents().items()}
    return dict(list(found.items())[:2000]) | SPECIAL_CASES


@pytest.fixture(scope="session")
def corpus(documents, tmp_path_factory) -> str:
    """Returns the SPEC of a file of JSON lines that holds out some documents for validation."""
    path = tmp_path_factory.mktemp("corpus") / "documents.jsonl"
    return f"{corpora.write_json(path, documents)}?validation=0.1"


@pytest.fixture(scope="session")
def vocabulary(documents, tmp_path_factory) -> pathlib.Path:
    """Returns a folder like vocab.train's, with 600 pieces and no sentinels."""
    folder = tmp_path_factory.mktemp("vocabulary")
    lines = [line for text in list(documents.values())[::4] for line in text.split("\n")[:20]]
    small_tokenizers.t5(folder / "sentencepiece", lines, 600, byte_fallback=True)
    return folder


@pytest.fixture(scope="session")
def flags(corpus, vocabulary):
    """Returns a function: folder of caches and further flags -> the command's arguments."""

    def arguments(cache_dir, *more: str) -> list[str]:
        given = [
            f"--task={TASK}",
            f"--vocabulary={vocabulary}",
            "--extra_ids=100",
            f"--corpus={corpus}",
            f"--cache_dir={cache_dir}",
        ]
        replaced = {flag.split("=")[0] for flag in more}
        return [flag for flag in given if flag.split("=")[0] not in replaced] + list(more)

    return arguments


@pytest.fixture(scope="session")
def build(flags):
    """Returns a function that builds in this process and returns the cache's folder."""
    from pipeline.build import main

    def run(cache_dir, *more: str) -> pathlib.Path:
        main(flags(cache_dir, *more))
        return pathlib.Path(cache_dir) / TASK

    return run


@pytest.fixture(scope="session")
def start(flags):
    """Returns a function that starts the command in a process group of its own.

    `sigint`: the command's handler of SIGINT, SIG_IGN if a shell started it with `&`.
    """

    def process(cache_dir, *more: str, sigint=signal.SIG_DFL, **environment: str):
        command = [sys.executable, "-m", "pipeline.build", *flags(cache_dir, *more)]
        return launched(beginning(command, sigint), **environment)

    return process


@pytest.fixture(scope="session")
def cache(build, tmp_path_factory) -> pathlib.Path:
    """Returns a finished cache, which tests must not change."""
    return build(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def checksums():
    """Returns a function: folder -> sha256 of every file in it, including hidden ones."""

    def of(folder) -> dict[str, str]:
        return {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(pathlib.Path(folder).iterdir())
        }

    return of
