"""examples/annex, installed as a distribution of somebody else's, used, and removed again."""

import os
import pathlib
import random
import re
import shutil
import sys

import pytest

from tests.support import small_tokenizers
from tests.support.processes import completed

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "annex"

pytestmark = pytest.mark.processes


def installed(site: pathlib.Path) -> None:
    """Writes what pip writes: the package, and the entry points of its pyproject.toml."""
    shutil.copytree(EXAMPLE / "genomics", site / "genomics")
    (points := site / "genomics-1.0.dist-info").mkdir()
    (points / "METADATA").write_text("Name: genomics\nVersion: 1.0\n")
    found = re.search(r'\[project\.entry-points\."(.+)"\]\n(\w+) = "(\w+)"', _pyproject())
    assert found
    (points / "entry_points.txt").write_text(f"[{found[1]}]\n{found[2]} = {found[3]}\n")


def _pyproject() -> str:
    return (EXAMPLE / "pyproject.toml").read_text()


def write_reads(folder: pathlib.Path) -> list[str]:
    draw = random.Random(1)
    words = ["".join(draw.choices("ACGT", k=3)) for _ in range(20)]
    texts = [" ".join(draw.choices(words, k=20)) for _ in range(300)]
    reads = [f"@read{n}\n{text}\n+\n{'!' * len(text)}\n" for n, text in enumerate(texts)]
    (folder / "reads.fastq").write_text("".join(reads))
    small_tokenizers.t5(folder / "words", texts, 40)
    return texts


def test_one_folder_adds_all_and_leaves_nothing(tmp_path):
    installed(site := tmp_path / "site")
    texts = write_reads(tmp_path)

    def palimpsest(*words: str):
        paths = os.pathsep.join([str(site), str(ROOT)])
        environment = {**os.environ, "PYTHONPATH": paths}
        return completed(
            [sys.executable, "-m", "palimpsest", *words], env=environment, cwd=tmp_path
        )

    build = ("build", "--task=dna_reversal", "--corpus=fastq:reads.fastq", "--cache_dir=cache")
    build += ("--vocabulary=words.model",)
    done = palimpsest(*build)
    assert done.returncode == 0, done.stderr
    done = palimpsest("cache", "count", "--cache=cache/dna_reversal")
    assert 0 < int(done.stdout) < len(texts)
    train = ("pretrain", "--preset=t5_1_1_tiny", "--task=dna_reversal", "--cache_dir=cache")
    train += ("--model_dir=run", "--train_steps=2", "--batch_size=4", "--model.norm=magnitude")
    train += ("--model.position=absolute", "--model.mixer=neighbours:reach=3")
    train += ("--evaluation.metrics=identity", "--evaluation.every_steps=2")
    motif = f"--motif.sequence={texts[0][:11]}"
    done = palimpsest(*train, motif)
    assert done.returncode == 0, done.stderr
    logged = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert '"identity": ' in logged
    assert '"log_likelihood": -' in logged

    shutil.rmtree(site)
    assert "cache count" not in palimpsest("--help").stdout
    for words, names in (
        (build, "unknown kind 'fastq'"),
        (train, "--model.mixer=neighbours:reach=3: it must be one of"),
        ((*train, motif), "unknown flag --motif.sequence"),
        (["cache", "count"], "unknown command cache count"),
    ):
        done = palimpsest(*words)
        assert done.returncode == 2
        assert names in done.stderr
        assert "Traceback" not in done.stderr
