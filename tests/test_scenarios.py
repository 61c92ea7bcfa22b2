"""Errands of strangers by README and --help alone, as scripts: no guess and no Python module."""

import gzip
import json
import os
import pathlib
import sys

import pytest

from tasks.reading import stdlib_docs
from tests.support.processes import completed

pytestmark = pytest.mark.processes

ROOT = pathlib.Path(__file__).parents[1]
SCENARIOS = ROOT / "tests" / "scenarios"
FOUND = {
    "fill_a_span": ("30 files, every file is a document", "filled <pad>"),
    "code_to_a_decoder": ("positions 2048", "made"),
    "ul2_over_two_corpora": ("70.0000%", "30.0000%", "books_ul2", "code_ul2"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Returns a folder with books/*.txt and code.jsonl.gz."""
    folder = tmp_path_factory.mktemp("scenarios")
    texts = [text for text in stdlib_docs.documents().values() if len(text) > 1500]
    (folder / "books").mkdir()
    for number in range(30):
        (folder / "books" / f"{number}.txt").write_text("\n\n".join(texts[number * 4 :][:4]))
    sources = sorted((ROOT / "tasks").rglob("*.py"))
    with gzip.open(folder / "code.jsonl.gz", "wt") as file:
        for path in sources:
            file.write(json.dumps({"content": path.read_text()}) + "\n")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND)
def test_an_errand_is_done(name, place, tmp_path):
    for path in place.iterdir():
        (tmp_path / path.name).symlink_to(path)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = completed(["bash", str(SCENARIOS / f"{name}.sh")], cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    for words in FOUND[name]:
        assert words in done.stdout


def test_every_errand_is_tried():
    assert {path.stem for path in SCENARIOS.glob("*.sh")} == set(FOUND)
