"""--exclude: listed documents are left out, of new builds and of finished caches alike."""

import dataclasses
import itertools
import json
import pathlib
import random
import shutil
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from pipeline import verify as command
from pipeline.build import main
from pipeline.building import graph, lifecycle
from pipeline.exclusion import lists
from pipeline.exclusion.filter import Filter
from pipeline.exclusion.lists import ExcludeList
from pipeline.exclusion.origins import File, Origin
from pipeline.exclusion.targets import Target, fitted
from pipeline.verification.cache import verify
from tasks.cache import old_states
from tasks.cache.manifest import CacheManifest
from tasks.cache.windows import Windows
from tasks.storage import files
from tasks.terminal.command_line import UserError


class Killed(BaseException):
    """Simulates SIGKILL: no code catches it."""


@pytest.fixture(scope="module")
def listed(documents, tmp_path_factory) -> pathlib.Path:
    """Returns a text file of the ids of 20 random documents, one of which the build quarantines."""
    chosen = random.Random(1).sample(sorted(documents), 20)
    path = tmp_path_factory.mktemp("lists") / "ids.txt"
    path.write_text("\n".join(chosen) + "\n\n")
    return path


def ids_by_shard(cache, split="*") -> list[list[str]]:
    paths = sorted(cache.glob(f"{split}.documents-*"))
    return [parquet.read_table(path, columns=["id"])["id"].to_pylist() for path in paths]


def ids(cache) -> list[str]:
    return list(itertools.chain(*ids_by_shard(cache)))


def kill(*_, **__):
    raise Killed


def left_out(cache) -> dict[str, str]:
    texts = [path.read_text() for path in cache.glob("*.quarantine-*")]
    lines = (line for text in texts for line in text.splitlines())
    return {value["id"]: value["reason"] for value in map(json.loads, lines)}


SMALL = "--shard_bytes=50000"


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory) -> pathlib.Path:
    """Returns a finished cache of many shards, which tests must not change."""
    folder = tmp_path_factory.mktemp("whole")
    main(flags(folder, SMALL))
    return next(folder.iterdir())


@pytest.fixture(scope="module")
def without(flags, listed, tmp_path_factory) -> pathlib.Path:
    """Returns a cache that was built with the list from the start."""
    folder = tmp_path_factory.mktemp("without")
    main(flags(folder, SMALL, f"--exclude={listed}"))
    return next(folder.iterdir())


def shown(checksums, cache) -> dict[str, str]:
    """Returns the checksums of a cache's files without what a takedown keeps of earlier states."""
    for folder in cache.glob(".before-*"):
        shutil.move(folder, cache.parents[1] / f"{cache.parent.name}-{folder.name}")
    return checksums(cache)


def copied(cache, folder) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(cache, folder / cache.name))


def test_a_build_leaves_listed_documents_out(whole, without, listed, documents):
    named = set(listed.read_text().split("\n")) - {""}
    assert not named & set(ids(without))
    assert Counter(ids(without)) == Counter(name for name in ids(whole) if name not in named)
    excluded = {name for name, why in left_out(without).items() if why == lists.LISTED}
    assert excluded == named  # also those that would have been quarantined
    assert Counter([*ids(without), *left_out(without)]) == Counter(list(documents))
    assert verify(str(without))[1] == []


def test_takedown_gives_the_bytes_of_a_build_with_the_list(
    whole, without, listed, build, tmp_path, checksums, capsys
):
    cache = copied(whole, tmp_path)
    before = {path.name: path.stat().st_ino for path in cache.glob("*.tfrecord-*")}
    build(tmp_path, SMALL, f"--exclude={listed}")
    assert "listed" in capsys.readouterr().out
    assert shown(checksums, cache) == checksums(without)
    named = set(listed.read_text().split("\n"))
    for path in cache.glob("*.tfrecord-*"):
        lineage = whole / path.name.replace("tfrecord", "documents")
        held = parquet.read_table(f"{lineage}.parquet", columns=["id"]).column("id").to_pylist()
        quarantine = whole / (path.name.replace("tfrecord", "quarantine") + ".jsonl")
        if quarantine.exists():
            held += [json.loads(line)["id"] for line in quarantine.read_text().splitlines()]
        # The shard of the other split is rewritten as well, with the same bytes.
        assert not named & set(held) or path.stat().st_ino != before[path.name]
    assert any(path.stat().st_ino == before[path.name] for path in cache.glob("*.tfrecord-*"))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("moment", "goes_on"),
    [
        *((each, True) for each in ("lists", "receipts", "plan", "first shard", "last files")),
        # Later, the plan names the list, which stays in force.
        *((each, False) for each in ("lists", "receipts")),
    ],
)
def test_a_killed_takedown_resumes_or_is_given_up(
    whole, without, listed, build, tmp_path, checksums, monkeypatch, moment, goes_on
):
    cache = copied(whole, tmp_path)

    def kill_after(function, count):
        calls = []

        def wrapped(*arguments, **options):
            if len(calls) == count:
                raise Killed
            calls.append(1)
            return function(*arguments, **options)

        return wrapped

    with monkeypatch.context() as patch:
        if moment == "lists":
            patch.setattr(lifecycle, "invalidate", kill)
        elif moment == "receipts":
            patch.setattr(files, "remove", kill_after(files.remove, 4))
        elif moment == "plan":
            patch.setattr(lifecycle.cache_lists, "remove_others", kill)
        elif moment == "first shard":
            patch.setattr(graph, "build_piece", kill_after(graph.build_piece, 1))
        else:
            patch.setattr(lifecycle, "complete", kill)
        with pytest.raises(Killed):
            build(tmp_path, SMALL, f"--exclude={listed}")
    if moment != "lists":
        assert not (cache / "COMPLETED").exists()
        with pytest.raises(UserError, match="is unfinished"):
            CacheManifest.load(str(cache))
    build(tmp_path, SMALL, *([f"--exclude={listed}"] if goes_on else []))
    assert verify(str(cache))[1] == []
    assert shown(checksums, cache) == checksums(without if goes_on else whole)


def lineage(cache, plan) -> list[list[str]]:
    """Returns the ids in each training shard, as they were in the state of a plan."""
    manifest = old_states.load(str(cache), plan.fingerprint)
    paths = old_states.lineage_paths(str(cache), manifest, "train", plan.fingerprint)
    return [parquet.read_table(path).column("id").to_pylist() for path in paths]


def test_a_killed_takedown_followed_by_a_wider_one_keeps_the_lineage(
    whole, build, tmp_path, monkeypatch
):
    cache = copied(whole, tmp_path)
    plan = CacheManifest.load(str(cache)).plan
    before = ids_by_shard(whole, "train")
    (tmp_path / "first.txt").write_text(before[0][0])
    (tmp_path / "second.txt").write_text(before[1][0])
    with monkeypatch.context() as patch:
        patch.setattr(graph, "build_piece", kill)
        with pytest.raises(Killed):
            build(tmp_path, SMALL, f"--exclude={tmp_path}/first.txt")
    build(tmp_path, SMALL, f"--exclude={tmp_path}/first.txt,{tmp_path}/second.txt")
    assert verify(str(cache))[1] == []
    assert lineage(cache, plan) == before
    path = pathlib.Path(old_states.folder_of(str(cache), plan.fingerprint)) / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace('"software": {', '"software": {"another": "1", '))
    assert path.read_text() != text
    with pytest.raises(UserError, match="is not what was written"):
        lineage(cache, plan)
    path.write_text(text)
    (kept,) = cache.glob(f"{old_states.BEFORE}*/train.documents-00001-*")
    kept.unlink()
    with pytest.raises(UserError, match="no copy was kept"):
        lineage(cache, plan)


def test_a_takedown_removes_what_a_killed_one_left_among_the_lineage(whole, build, tmp_path):
    cache = copied(whole, tmp_path)
    plan = CacheManifest.load(str(cache)).plan
    left = pathlib.Path(old_states.folder_of(str(cache), plan.fingerprint)) / f"{files.PARTIAL}0"
    left.parent.mkdir()
    left.touch()
    (tmp_path / "ids.txt").write_text(ids_by_shard(whole, "train")[0][0])
    build(tmp_path, SMALL, f"--exclude={tmp_path}/ids.txt")
    assert not left.exists()


def test_a_list_of_unknown_documents_keeps_the_state(whole, build, tmp_path):
    cache = copied(whole, tmp_path)
    plan = CacheManifest.load(str(cache)).plan
    (tmp_path / "ids.txt").write_text("no such document")
    build(tmp_path, SMALL, f"--exclude={tmp_path}/ids.txt")
    assert CacheManifest.load(str(cache)).plan.fingerprint != plan.fingerprint
    assert lineage(cache, plan) == ids_by_shard(whole, "train")


def test_a_takedown_of_an_unfinished_cache_keeps_the_lineage(whole, build, tmp_path):
    cache = copied(whole, tmp_path)
    plan = CacheManifest.load(str(cache)).plan
    for name in ("COMPLETED", "manifest.json"):
        (cache / name).unlink()
    (lost,) = cache.glob("train.receipt-00002-*")
    lost.unlink()
    before = ids_by_shard(whole, "train")[:2]
    (tmp_path / "ids.txt").write_text(before[0][0])
    build(tmp_path, SMALL, f"--exclude={tmp_path}/ids.txt")
    assert lineage(cache, plan) == before


@pytest.mark.parametrize("written", [".plan-", "sentencepiece.model", "plan.json"])
def test_a_new_build_killed_before_its_plan_resumes(
    without, listed, build, tmp_path, checksums, monkeypatch, written
):
    write = files.write_bytes

    def kill(path, data):
        if path.rpartition("/")[2].startswith(written):
            raise Killed
        write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_bytes", kill)
        with pytest.raises(Killed):
            build(tmp_path, SMALL, f"--exclude={listed}")
    (cache,) = tmp_path.iterdir()
    assert not (cache / "plan.json").exists()
    build(tmp_path, SMALL, f"--exclude={listed}")
    assert checksums(cache) == checksums(without)


def test_further_files_and_further_lists_are_not_added_at_once(build, tmp_path, documents):
    (tmp_path / "corpus").mkdir()
    lines = [json.dumps({"id": name, "text": text}) for name, text in list(documents.items())[:50]]
    (tmp_path / "corpus" / "a.jsonl").write_text("\n".join(lines))
    corpus = f"--corpus=json:{tmp_path}/corpus/*.jsonl?column=text&id=id"
    build(tmp_path / "cache", corpus)
    (tmp_path / "corpus" / "b.jsonl").write_text(lines[0].replace('"id": "', '"id": "other '))
    (tmp_path / "ids.txt").write_text(json.loads(lines[1])["id"])
    with pytest.raises(UserError, match=r"1 added: b.jsonl.* new lists: add the files first"):
        build(tmp_path / "cache", corpus, "--extend", f"--exclude={tmp_path}/ids.txt")
    build(tmp_path / "cache", corpus, "--extend")
    build(tmp_path / "cache", corpus, f"--exclude={tmp_path}/ids.txt")


def test_a_takedown_stays_in_force(without, build, tmp_path, checksums, capsys):
    cache = copied(without, tmp_path)
    next(cache.glob("train.tfrecord-*")).unlink()
    build(tmp_path, SMALL)
    assert "still excluded: 20 documents" in capsys.readouterr().out
    assert checksums(cache) == checksums(without)


def test_a_reader_of_the_old_manifest_is_stopped(whole, without, tmp_path):
    cache = copied(without, tmp_path)
    old = CacheManifest.load(str(whole))
    windows = Windows(str(cache), old, "train", 64)
    for index in range(0, len(windows), 10):
        shards = {place.shard for place in windows.where(index)}
        same = all(
            (cache / name).read_bytes() == (whole / name).read_bytes()
            for shard in shards
            for name in old.splits["train"][shard].files
            if "tfrecord" in name
        )
        if same:
            windows.read(np.array([index]))
        else:
            with pytest.raises(UserError, match=r"rewritten|the manifest says|is corrupt"):
                windows.read(np.array([index]))


def test_verify_proves_absence(whole, without, listed, capsys):
    assert command.main([f"--cache={without}", f"--exclude={listed}"]) == 0
    assert "absent: all 20 documents" in capsys.readouterr().out
    assert command.main([f"--cache={whole}", f"--exclude={listed}"]) == 1
    assert "documents of an exclude list: " in capsys.readouterr().out


def test_verify_checks_a_caches_own_list(whole, without, tmp_path):
    cache = copied(without, tmp_path)
    next(cache.glob("exclude-*.arrow")).write_bytes(b"ARROW1 and more")
    assert any("its bytes were changed" in fault.what for fault in verify(str(cache))[1])


def test_a_document_in_parts_is_left_out_whole(build, tmp_path, documents):
    long = next(name for name, text in documents.items() if len(text) > 3000)
    path = tmp_path / "ids.txt"
    path.write_text(long)
    limit = "--max_document_bytes=1000"
    cache = build(tmp_path / "a", limit)
    assert f"{long}#part2" in ids(cache)
    build(tmp_path / "a", limit, f"--exclude={path}")
    assert not [name for name in ids(cache) if name.split("#part")[0] == long]
    assert set(left_out(cache)) >= {long, f"{long}#part2", f"{long}#part3"}
    assert verify(str(cache), exclude=[])[1] == []


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "there is no such file"),
        (b"ARROW1\0\0 broken", "is not an exclude list"),
        (b"\n \n", "names no document"),
    ],
)
def test_mistakes_are_named(build, tmp_path, content, problem):
    path = tmp_path / "list"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=problem):
        build(tmp_path / "cache", f"--exclude={path}")
    assert not (tmp_path / "cache").exists()


def test_two_lists_of_duplicates_are_refused(whole):
    records = lifecycle.cache_lists.records
    plan = CacheManifest.load(str(whole)).plan
    record = lists.ExcludeRecord("0" * 64, lists.DUPLICATES, 1, 0)
    header = {"counts": {"documents": 1, "paragraphs": 0, "places": 0}}
    other = lists.Given(dataclasses.replace(record, sha256="1" * 64), "path", header, "path")
    with pytest.raises(UserError, match="may leave out both twins"):
        records(dataclasses.replace(plan, exclude=(record,)), [other], 1 << 18, "cache")


def test_paragraphs_kept_in_documents_that_go_are_refused(whole):
    plan = CacheManifest.load(str(whole)).plan
    counts = {"counts": {"documents": 1, "paragraphs": 0, "places": 0}}
    record = lists.ExcludeRecord("0" * 64, lists.DUPLICATES, 1, 0)
    documents = lists.Given(record, "a", counts, "a")
    record = lists.ExcludeRecord("1" * 64, lists.DUPLICATES, 0, 1)
    unaware = lists.Given(record, "b", counts, "b")
    aware = lists.Given(record, "b", {**counts, "exclude": [documents.record.sha256]}, "b")

    def records(before, *added):
        existing = dataclasses.replace(plan, exclude=tuple(each.record for each in before))
        return lifecycle.cache_lists.records(existing, added, 1 << 18, "cache")

    for before, *added in (([], documents, unaware), ([documents], unaware), ([aware], documents)):
        with pytest.raises(UserError, match="--unit=paragraph --exclude=LIST_OF_DOCUMENTS"):
            records(before, *added)
    assert records([], documents, aware) == (documents.record, aware.record)
    assert records([documents], aware) == (documents.record, aware.record)


def test_ids_that_no_document_has_are_named(build, tmp_path, documents, capsys):
    first, second, *_ = documents
    path = tmp_path / "ids.txt"
    # As an editor on Windows writes it; the third has a space too many.
    path.write_bytes(f"\ufeff{first}\r\n{second}\r\n{second} \r\nnowhere\r\n".encode())
    cache = build(tmp_path / "a", f"--exclude={path}")
    assert {first, second}.isdisjoint(ids(cache))
    said = f"2 of 4 ids are not in the corpus: {second + ' '!r}, 'nowhere'\n"
    assert said in capsys.readouterr().out


def test_ids_that_look_like_parts_are_looked_for(tmp_path):
    (tmp_path / "ids.txt").write_text("x#part2\nlong\n")
    (given,) = lists.given(str(tmp_path / "ids.txt"), str(tmp_path))
    names = ["a", "x#part2", "x", "long#part3"]
    found = Filter.of_files([given.path])
    # long is elsewhere, or a list took it out with its parts: long#part3 is called so.

    def listed(*arguments):
        return sorted(each.row for each in found.present(*arguments))

    assert listed(names, []) == [1]
    assert listed([*names, "long"], []) == [1, 3, 4]
    assert listed(names, ["long"]) == [1, 3]


@pytest.mark.processes
def test_damaged_lists(tmp_path):
    """Every byte is flipped: an error, or the same list, as Arrow does not read all bytes."""
    path, damaged = tmp_path / "sound.arrow", tmp_path / "list.arrow"
    digests = np.unique(lists.id_digests(f"document {number}" for number in range(9)), axis=0)
    header = {"kind": lists.DUPLICATES, "reasons": [lists.EXACT],
              "counts": {"documents": 9, "paragraphs": 0, "places": 0}}  # fmt: skip
    columns = {
        **{"high": digests[:, 0], "low": digests[:, 1], "place": [0] * 9},
        **{"paragraph": [lists.WHOLE] * 9, "reason": [0] * 9},
        **{"twin": [f"twin {number}" for number in range(9)], "similarity": [1.0] * 9},
    }
    with path.open("wb") as file:
        lists.write(file, header, [columns])
    data = path.read_bytes()
    refused = []
    for at in range(len(data)):
        damaged.write_bytes(data[:at] + bytes([data[at] ^ (1, 255)[at % 2]]) + data[at + 1 :])
        try:
            (again,) = lists.given(str(damaged), str(tmp_path))
        except UserError as error:
            refused.append((at, str(error)))
        else:
            assert repr([*ExcludeList(again.path)]) == repr([*ExcludeList(str(path))])
            assert len(ExcludeList(again.path).entries(digests[0])) == 1
    # Without its first bytes, it is taken for a text file.
    assert all("damaged" in said for at, said in refused if at >= 6)
    assert len(refused) > len(data) / 2


def test_a_copy_of_a_list_of_ids_is_the_list(build, whole, tmp_path, checksums):
    (tmp_path / "ids.txt").write_text("\n".join(ids(whole)[:3]))
    cache = build(tmp_path / "a", f"--exclude={tmp_path}/ids.txt")
    (copy,) = cache.glob("exclude-*.arrow")
    shutil.copy(copy, tmp_path / "copy.arrow")
    other = build(tmp_path / "b", f"--exclude={tmp_path}/copy.arrow")
    assert checksums(cache) == checksums(other)


def test_lists_of_earlier_versions_are_refused(tmp_path):
    header = {"kind": lists.IDS, "reasons": [lists.LISTED], "format": lists.FORMATS[0],
              "counts": {"documents": 0, "paragraphs": 0, "places": 0}}  # fmt: skip
    schema = lists._SCHEMA.with_metadata({lists._HEADER: json.dumps(header).encode()})
    with pa.OSFile(str(tmp_path / "l.arrow"), "wb") as file, pa.ipc.new_file(file, schema):
        pass
    with pytest.raises(UserError, match=r"is from a version before 0\.2\.0"):
        lists.given(str(tmp_path / "l.arrow"), str(tmp_path))


def test_a_list_fits_the_corpus_of_its_files(monkeypatch):
    """Annexes may fit others."""
    monkeypatch.setattr("pipeline.exclusion.targets.annexes.get", lambda *_: None)
    record = lists.ExcludeRecord("0" * 64, lists.DUPLICATES, 1, 0)
    given = [lists.Given(record, "a", {}, "a")]
    ours, more = (File("", name, 9, (("sha256", name),)) for name in "ab")
    of_list = SimpleNamespace(origins=[ours], files=[ours.within("a::member")], header={})
    monkeypatch.setattr("pipeline.exclusion.targets.ExcludeList", lambda _: of_list)
    corpus = Target(Origin("json:b", (more,)), {})
    with pytest.raises(UserError, match=r"a was made from other files than those of json:b: make"):
        fitted(given, {"": corpus}, "")
    for fits in (
        dataclasses.replace(corpus, origin=Origin("json:*", (ours, more))),
        dataclasses.replace(corpus, in_force=[record]),
    ):
        assert fitted(given, {"": fits}, "") == {"": given}
