"""--filter in builds: accounts, fingerprints, reports, dry runs, takedowns."""

import json
import pathlib
import shutil
from collections import Counter

import pytest
from pyarrow import parquet

from pipeline.building import graph
from pipeline.report import main as report
from pipeline.verification.cache import verify
from tasks.cache.manifest import CacheManifest
from tasks.terminal.command_line import UserError

GIVEN = ("--filter=gopher_quality?min_words=10&min_stop_words=1", "--filter=c4,pii")
SMALL = "--shard_bytes=50000"


@pytest.fixture(autouse=True)
def _without_beam(monkeypatch):
    """Builds in this process, as the runner is not tested here."""

    def run(job, assignments, *_, **__):
        return sum((graph.build_piece(job, each) for each in assignments), Counter())

    monkeypatch.setattr(graph, "run", run)


@pytest.fixture(scope="module")
def filtered(flags, tmp_path_factory) -> pathlib.Path:
    """Returns a finished, filtered cache, which tests must not change."""
    from pipeline.build import main

    folder = tmp_path_factory.mktemp("filtered")
    main(flags(folder, SMALL, *GIVEN))
    (cache,) = folder.iterdir()
    return cache


def kept(cache) -> list[str]:
    return [
        name
        for path in sorted(cache.glob("*.documents-*"))
        for name in parquet.read_table(path, columns=["id"]).column("id").to_pylist()
    ]


def left_out(cache) -> list[dict]:
    return [
        json.loads(line)
        for path in sorted(cache.glob("*.quarantine-*"))
        for line in path.read_text().splitlines()
    ]


def test_every_document_is_kept_or_left_out_once(filtered, documents):
    lines = left_out(filtered)
    assert Counter([*kept(filtered), *(line["id"] for line in lines)]) == Counter(list(documents))
    assert verify(str(filtered))[1] == []
    manifest = CacheManifest.load(str(filtered))
    dropped = sum((Counter(manifest.dropped(split)) for split in manifest.splits), Counter())
    assert dropped == Counter(line["reason"] for line in lines)
    assert {"filtered: gopher_quality min_words", "filtered: c4 min_sentences"} <= set(dropped)
    few = next(line for line in lines if line["reason"].endswith("min_words"))
    assert few["value"] < 10
    assert any(line.get("text") for line in lines)
    edits = Counter()
    for shards in manifest.splits.values():
        for shard in shards:
            edits.update(shard.edits or {})
    assert edits["c4 lines"] > 100


def test_filters_are_in_the_fingerprint(filtered, build, tmp_path):
    plan = CacheManifest.load(str(filtered)).plan
    assert [each.name for each in plan.filters] == ["gopher_quality", "c4", "pii"]
    shutil.copytree(filtered, tmp_path / filtered.name)
    for given in ((), (GIVEN[0],), (GIVEN[0], "--filter=pii,c4"), ("--filter=gopher_quality",)):
        with pytest.raises(UserError, match="different plan"):
            build(tmp_path, SMALL, *given)


def test_a_build_without_filters_has_the_plan_that_it_always_had(cache):
    plan = json.loads((cache / "plan.json").read_text())
    assert "filters" not in plan
    assert not any("edits" in path.read_text() for path in cache.glob("*.receipt-*"))


def test_a_dry_run_tells_what_each_rule_drops(filtered, build, tmp_path, capsys):
    build(tmp_path, SMALL, *GIVEN, "--dry_run")
    assert not list(tmp_path.iterdir())
    out = capsys.readouterr().out
    first = Counter(line["reason"] for line in left_out(filtered))
    told = {
        next(reason for reason in first if reason in line): line
        for line in out.splitlines()
        if any(reason in line for reason in first)
    }
    for reason, count in first.items():
        if reason.startswith("filtered: "):
            alone, counted = told[reason].removeprefix(reason).split()[-2:]
            assert int(counted.replace(",", "")) == count <= int(alone.replace(",", ""))


def test_the_report_counts_and_shows_what_was_dropped(filtered, tmp_path):
    report([f"--cache={filtered}", f"--output={tmp_path / 'page.html'}"])
    page = (tmp_path / "page.html").read_text()
    line = next(line for line in left_out(filtered) if line.get("text", "") > "a")
    assert line["reason"] in page
    assert "c4 lines" in page
    assert line["text"].split()[0] in page


def test_a_takedown_of_a_filtered_cache_is_a_build_with_the_list(
    filtered, build, tmp_path, checksums
):
    path = tmp_path / "ids.txt"
    path.write_text("\n".join([kept(filtered)[0], left_out(filtered)[0]["id"]]))
    cache = tmp_path / "a" / filtered.name
    shutil.copytree(filtered, cache)
    build(tmp_path / "a", SMALL, *GIVEN, f"--exclude={path}")
    for folder in cache.glob(".before-*"):
        shutil.rmtree(folder)
    other = build(tmp_path / "b", SMALL, *GIVEN, f"--exclude={path}")
    assert checksums(cache) == checksums(other)


def test_a_function_of_the_users_filters(build, tmp_path, monkeypatch, documents):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_filter.py").write_text(
        "import pyarrow.compute as pc\n"
        "def keep(texts):\n"
        "    return pc.if_else(pc.match_substring(texts, 'Return'), 'has Return', None)\n"
    )
    cache = build(tmp_path / "c", "--task_module=my_filter", "--filter=function?name=keep")
    names = {line["id"] for line in left_out(cache) if "has Return" in line["reason"]}
    assert names == {name for name, text in documents.items() if "Return" in text}


def test_pairs_are_not_filtered(build, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"inputs": "a", "targets": "b"}))
    with pytest.raises(UserError, match="--filter judges texts"):
        build(
            tmp_path / "c", "--task=supervised", "--name=own", *GIVEN,
            f"--corpus=json:{path}?inputs=inputs&targets=targets",
        )  # fmt: skip
