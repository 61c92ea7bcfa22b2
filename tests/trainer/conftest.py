"""A small real cache, made once by the real commands, for the tests of the trainer."""

import functools
import importlib
import json
import pathlib
import random
import re
import sys

import pytest

from pipeline import build
from tasks.reading import sources
from tasks.terminal import command_line
from tests.support import shared
from tests.support.processes import completed
from tests.support.words import changed
from vocab import train

ROOT = pathlib.Path(__file__).parents[2]
TASK = "python_docs_span_corruption"


def command(*arguments, **kwargs):
    """Runs `python -m …` from the root of the project."""
    return completed([sys.executable, "-m", *map(str, arguments)], **kwargs)


def built(*arguments):
    """Builds a cache in this process, which costs a tenth of a process of its own."""
    build.main(changed(*arguments))


def ended(module, arguments, capsys):
    """Returns (exit code, stderr) of a command run in this process."""
    main = importlib.import_module(module).main
    with pytest.raises(SystemExit) as end:
        command_line.run(main, changed(*arguments))
    return end.value.code, capsys.readouterr().err


def assert_one_line(code, errors, *says):
    """Asserts that a command ended by a mistake of its user, which one line of stderr names."""
    assert code == 2, errors
    assert "Traceback" not in errors
    (line,) = [line for line in errors.splitlines() if ": error: " in line]
    for text in says:
        assert text in line


def _make(folder, corpus):
    """Makes a corpus of 600 KB of lines, a vocabulary of 600 + 100 pieces, and their cache."""
    corpus = sources.resolve(sources.parse(corpus))
    texts = []
    for piece in corpus.pieces:
        for _, batch in sources.read(corpus, piece):
            texts += [text for text in batch.column("text").to_pylist() if text]
        if sum(map(len, texts)) > 500_000:
            break
    lines = [line for line in "\n".join(texts).splitlines() if len(line) > 20]
    (folder / "train.txt").write_text("\n".join(lines[200:3000]))
    (folder / "validation.txt").write_text("\n".join(lines[:200]))
    spec = f"text:{folder}/*.txt?split=train"
    train.main([f"--corpus={spec}", "--vocab_size=600", f"--output={folder}/vocabulary"])
    flags = [f"--corpus={spec}", f"--vocabulary={folder}/vocabulary", "--row_tokens=100"]
    built(f"--task={TASK}", f"--cache_dir={folder}/cache", *flags)


@pytest.fixture(scope="session")
def text_cache(pytestconfig):
    """The folder of a cache of python_docs_span_corruption: real prose, 600 + 100 pieces."""
    corpus = pytestconfig.getoption("--corpus")
    name = "text_cache_" + re.sub(r"\W", "_", corpus)
    return shared.folder(name, lambda folder: _make(folder, corpus)) / "cache" / TASK


@pytest.fixture(scope="session")
def pairs_and_text(text_cache, tmp_path_factory):
    """A folder of two caches with one vocabulary: of texts, and of pairs in several shards."""
    folder = tmp_path_factory.mktemp("pairs")
    words = (text_cache.parents[1] / "train.txt").read_text().split()
    generator = random.Random(0)
    with (folder / "a.jsonl").open("w") as file:
        for number in range(400):
            begin = generator.randrange(len(words) - 60)
            middle = begin + 1 + int(generator.expovariate(1 / 8)) % 25
            inputs, targets = words[begin:middle], words[middle : middle + 1 + number % 6]
            row = {"id": f"p{number}", "q": " ".join(inputs), "a": " ".join(targets)}
            file.write(json.dumps(row) + "\n")
    built(
        *("--task=supervised", "--name=qa", "--shard_bytes=4000", f"--cache_dir={folder}/caches"),
        f"--corpus=json:{folder}/a.jsonl?inputs=q&targets=a&validation=0.1",
        f"--vocabulary={text_cache.parents[1]}/vocabulary",
    )
    (folder / "caches" / TASK).symlink_to(text_cache)
    return folder / "caches"


@pytest.fixture(scope="session")
def many_shards(text_cache, tmp_path_factory):
    """A text corpus of 24 shards of each split, if they have `shard_bytes_of` it."""
    words = (text_cache.parents[1] / "train.txt").read_text().split()
    generator = random.Random(1)
    path = tmp_path_factory.mktemp("corpus") / "a.txt"
    with path.open("w") as file:
        for _ in range(9000):
            begin = generator.randrange(len(words) - 40)
            file.write(" ".join(words[begin : begin + generator.randrange(5, 40)]) + "\n")
    return path


@pytest.fixture(scope="session")
def theirs(tmp_path_factory):
    """Returns a function that makes each random model of transformers once."""
    from tests.trainer.huggingface.random_shapes import Theirs

    return functools.cache(lambda name: Theirs(name, tmp_path_factory.mktemp("shapes") / "model"))


def shard_bytes_of(corpus):
    """Returns the --shard_bytes of `many_shards`."""
    return corpus.stat().st_size // 24 + 1
