"""Adding a file format takes one module of the user's; everything else follows."""

import hashlib
import json
import os
import pathlib

import pytest

from tests.support.corpora import write_json
from tests.support.extending import example
from tests.support.processes import started

ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Returns a folder with the module of a user who reads FASTA."""
    tree = tmp_path_factory.mktemp("tree")
    (tree / "fasta.py").write_text(example("A corpus format"))
    return tree


@pytest.fixture(scope="module")
def sequences(tree):
    """Returns 400 sequences by id, also written as FASTA and as JSON lines."""
    texts = {
        f"record{n}": " ".join(hashlib.sha256(b"%d.%d" % (n, i)).hexdigest()[:5] for i in range(20))
        for n in range(400)
    }
    records = [f">{name}\n{text[:60]}\n{text[60:]}\n" for name, text in texts.items()]
    (tree / "a.fasta").write_text("".join(records))
    joined = {name: text[:60].strip() + text[60:].strip() for name, text in texts.items()}
    write_json(tree / "a.jsonl", joined)
    return texts


def run(tree, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return started(*arguments, cwd=tree, env=environment)


READ = """
import json
import fasta
from tasks.reading import sources
corpus = sources.resolve(sources.parse("fasta:*.fasta"))
print(json.dumps([
    (split, row["id"], row["text"])
    for piece in corpus.pieces
    for split, batch in sources.read(corpus, piece)
    for row in batch.to_pylist()
]))
"""


def test_every_document_is_read_and_some_are_held_out(tree, sequences):
    done = run(tree, "-c", READ)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {name for _, name, _ in rows} == set(sequences)
    assert len(rows) == len(sequences)
    assert {split for split, _, _ in rows} == {"train", "validation"}


@pytest.mark.processes
def test_errors_name_the_format(tree, sequences):
    train = ("-m", "vocab.train", "--output=none", "--task_module=fasta")
    assert "did you mean fasta?" in run(tree, *train, "--corpus=fasts:x").stderr
    assert "fasta has no columns" in run(tree, *train, "--corpus=fasta:x?column=y").stderr
    wrong = run(tree, *train, "--corpus=fasta:*.jsonl")
    assert wrong.returncode == 2
    assert "a.jsonl cannot be read: a FASTA file begins with >" in wrong.stderr
