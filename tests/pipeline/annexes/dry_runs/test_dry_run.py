"""Dry runs of builds with lists, of pairs, of parts, and of texts that a build would refuse."""

import json
import re

import pytest

from tasks.cache.manifest import CacheManifest
from tasks.terminal.command_line import UserError
from tests.pipeline.building.test_pairs import make as make
from tests.pipeline.building.test_pairs import rows as rows
from tests.pipeline.building.test_unknown import TEXTS, build_texts
from tests.pipeline.building.test_unknown import english as english
from tests.pipeline.exclusion.test_lists import SMALL, copied, ids
from tests.pipeline.exclusion.test_lists import listed as listed
from tests.pipeline.exclusion.test_lists import whole as whole


@pytest.mark.parametrize("flags", [("--dry_run",), ("--dry_run", "--json")])
def test_a_dry_run_says_it_in_both_forms(tmp_path, english, flags, capfd):
    texts = [*TEXTS, "{a} {b} " * 30]
    with pytest.raises(UserError, match=r"cannot spell '{', '}'"):
        build_texts(tmp_path, english, texts, "--max_unknown=0.01", *flags)
    with pytest.raises(UserError, match=r"faulty \(\d+ null\)"):
        build_texts(tmp_path, english, [*TEXTS, *[{"text": None}] * 40], *flags)
    capfd.readouterr()
    build_texts(tmp_path, english, texts, *flags)
    out, err = capfd.readouterr()
    assert "of the text's tokens are unknown" in (err if "--json" in flags else out)
    if "--json" in flags:
        assert json.loads(out)["counts"]


def test_a_dry_run_counts_without_listed_documents(whole, listed, build, tmp_path, capsys):
    cache = copied(whole, tmp_path)
    build(tmp_path, SMALL, "--dry_run", f"--exclude={listed}")
    shown = capsys.readouterr().out
    (line,) = (each for each in shown.splitlines() if "documents" in each)
    kept = set(ids(whole)) - set(listed.read_text().split("\n"))
    assert sum(int(each.replace(",", "")) for each in line.split()[1:]) == len(kept)
    assert (cache / "COMPLETED").exists()
    assert not list(cache.glob("exclude-*"))
    pieces, built = map(int, re.search(r"(\d+) pieces, (\d+) of them built", shown).groups())
    before = {path: path.stat().st_ino for path in cache.glob("train.tfrecord-*")}
    build(tmp_path, SMALL, f"--exclude={listed}")
    written = [path for path, inode in before.items() if path.stat().st_ino != inode]
    assert 0 < len(written) == pieces - built


def test_estimates_of_a_build_of_pairs(make, capsys):
    make("--dry_run")
    out = capsys.readouterr().out
    cache = make()
    manifest = CacheManifest.load(str(cache))
    assert f"{manifest.total('train', 'tokens'):,}" in out.replace("_", ",")


def test_a_dry_run_of_a_part(build, tmp_path, capsys):
    def to_do(*flags):
        build(tmp_path, "--shard_bytes=100000", "--dry_run", *flags)
        return float(capsys.readouterr().out.partition("to do: ")[2].split()[0])

    assert to_do("--part=1/4") == pytest.approx(to_do() / 4, rel=0.2)
