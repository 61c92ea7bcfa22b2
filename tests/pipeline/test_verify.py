"""pipeline.verify finds and names damage of every kind; a valid cache passes."""

import dataclasses
import io
import itertools
import json
import os
import re
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline.build import main as build_command
from pipeline.verification import cache as verification
from pipeline.verification.cache import verify
from pipeline.verify import main
from tasks.cache import records
from tasks.cache.manifest import CacheManifest, FileEntry, as_json, sealed, shard_file
from tasks.storage import files
from tasks.terminal import processes
from tasks.terminal.command_line import UserError
from tests.support import plain_records
from tests.support.damage import flip, replaced, truncate

FIRST = "train.{}-00000-of-00008"


@pytest.fixture
def copy(cache, tmp_path):
    return shutil.copytree(cache, tmp_path / "copy")


def found(folder, workers=1) -> list[str]:
    return [str(fault) for fault in verify(str(folder), workers)[1]]


def fill(path):
    path.write_text("{}")


def edit(path):
    value = json.loads(path.read_text())
    value["documents"] += 1
    path.write_text(json.dumps(value))


def edit_manifest(path):
    value = json.loads(path.read_text())
    value["splits"]["train"][0]["rows"] += 1
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


@pytest.fixture
def in_processes(monkeypatch):
    """Makes small caches be verified by worker processes too."""
    monkeypatch.setattr(processes, "SMALL_BYTES", 0)


@pytest.mark.processes
def test_processes_find_the_same_faults_in_the_same_order(copy, in_processes):
    for name in ("train.rows-00006-of-00008.npy", "train.tfrecord-00001-of-00008"):
        flip(copy / name)
    (copy / "validation.receipt-00002-of-00008.json").unlink()
    alone = found(copy)
    assert len(alone) == 3
    assert found(copy, workers=2) == alone


@pytest.mark.processes
@pytest.mark.parametrize("workers", [1, 2])
def test_a_valid_cache_passes(cache, documents, capsys, workers, in_processes):
    assert main([f"--cache={cache}", f"--workers={workers}"]) == 0
    out = capsys.readouterr().out
    assert out.endswith(f"{cache}: verified\n")
    splits, faults, _ = verify(str(cache))
    assert not faults
    manifest = CacheManifest.load(str(cache))
    assert sum(held.documents for held in splits.values()) == len(documents)
    for split, held in splits.items():
        assert held.rows == manifest.total(split, "rows") > 0
        assert held.tokens == manifest.total(split, "tokens") > 0


@pytest.mark.parametrize(
    ("name", "damage", "file", "what"),
    [
        (FIRST.format("tfrecord"), flip, None, r"the SHA-256 differs \(row \d+: .*checksum"),
        (FIRST.format("tfrecord"), truncate, None, r"bytes, not [\d,]+ \(row \d+: "),
        (FIRST.format("tfrecord"), os.unlink, None, "missing; run pipeline.build"),
        (FIRST.format("rows") + ".npy", flip, None, "the SHA-256 differs"),
        (FIRST.format("documents") + ".parquet", truncate, None, "bytes, not"),
        (FIRST.format("receipt") + ".json", edit, None, "manifest.json differ in documents"),
        (FIRST.format("receipt") + ".json", os.unlink, None, "missing"),
        ("manifest.json", truncate, None, "not valid JSON"),
        ("manifest.json", os.unlink, None, "missing: the cache is not finished"),
        ("manifest.json", edit_manifest, FIRST.format("receipt") + ".json", "differ in rows"),
        (
            "plan.json",
            replaced('"row_tokens": 568', '"row_tokens": 569'),
            None,
            "differs from the manifest's plan",
        ),
        ("plan.json", os.unlink, None, "missing"),
        ("COMPLETED", os.unlink, None, "missing"),
        ("info.train.json", fill, None, "wrong content"),
        ("sentencepiece.model", flip, None, "not the vocabulary"),
        ("sentencepiece.model", os.unlink, None, "missing"),
    ],
)
def test_damage_is_found_and_named(copy, name, damage, file, what):
    damage(copy / name)
    faults = found(copy)
    assert any(re.match(rf"{re.escape(file or name)}: .*{what}", fault) for fault in faults), faults
    assert main([f"--cache={copy}"]) == 1


@pytest.mark.parametrize("name", [".partial-1-train.tfrecord-00000-of-00008", "notes.txt"])
def test_foreign_files(copy, name):
    (copy / name).touch()
    (fault,) = found(copy)
    assert fault.startswith(name)


def seal(folder, split="train", index=0, **counts):
    """Makes checksums and counts agree with the damaged files."""
    manifest = CacheManifest.load(str(folder))
    shards = list(manifest.splits[split])
    entries = {
        name: FileEntry((folder / name).stat().st_size, files.sha256(str(folder / name)))
        for name in shards[index].files
    }
    shards[index] = dataclasses.replace(shards[index], files=entries, **counts)
    manifest.splits[split] = tuple(shards)
    receipt = shard_file(split, "receipt", index, len(shards))
    files.write_json(str(folder / receipt), as_json(shards[index]))
    files.write_bytes(str(folder / "manifest.json"), manifest.content())


def read_rows(path):
    data = path.read_bytes()
    index = np.load(path.with_name(path.name.replace("tfrecord", "rows") + ".npy"))
    offsets = [*index["offset"].tolist(), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(offsets)], index


def rewrite(path, change):
    """Applies `change` to the tokens of the middle row."""
    rows, _ = read_rows(path)
    middle = len(rows) // 2
    row = records.decode_row(records.unframe(rows[middle]))
    targets = row.targets.copy()
    change(targets)
    rows[middle] = plain_records.frame(plain_records.encode_row(targets, row.document_starts))
    path.write_bytes(b"".join(rows))


def duplicate_row(copy):
    path = copy / FIRST.format("tfrecord")
    rows, _ = read_rows(path)
    path.write_bytes(b"".join([rows[0], *rows]))
    return "not an index of as many rows"


def duplicate_row_and_index(copy):
    path = copy / FIRST.format("tfrecord")
    rows, index = read_rows(path)
    path.write_bytes(b"".join([rows[0], *rows]))
    index = np.concatenate([index[:1], index])
    index["offset"] = np.cumsum([0, len(rows[0]), *map(len, rows[:-1])])
    starts = [len(records.decode_row(records.unframe(row)).document_starts) for row in rows]
    index["documents"] = np.cumsum([0, starts[0], *starts[:-1]])
    with open(copy / (FIRST.format("rows") + ".npy"), "wb") as file:
        np.save(file, index)
    return "parts, but"


def index_off(copy):
    path = copy / (FIRST.format("rows") + ".npy")
    index = np.load(path)
    index["documents"][3] += 1
    with open(path, "wb") as file:
        np.save(file, index)
    return "row 3 has different documents in the records"


def row_of(value):
    def damage(copy):
        path = copy / FIRST.format("tfrecord")
        before = path.read_bytes()
        rewrite(path, lambda targets: targets.__setitem__(5, value))
        grown = len(path.read_bytes()) - len(before)
        _, index = read_rows(path)
        index["offset"][len(index) // 2 + 1 :] += np.int64(grown).astype(np.uint64)
        with open(copy / (FIRST.format("rows") + ".npy"), "wb") as file:
            np.save(file, index)
        return {0: "it holds padding", 1: "separators are not", 690: "holds id 690"}[value]

    return damage


def lineage(change):
    def damage(copy):
        path = copy / (FIRST.format("documents") + ".parquet")
        table = pq.read_table(path)
        table, what = change(table)
        buffer = io.BytesIO()
        pq.write_table(table, buffer)
        path.write_bytes(buffer.getvalue())
        return what

    return damage


def part_4(column, change, what):
    """Returns a change of a number of the fifth part."""

    def changed(table):
        values = table[column].to_numpy().copy()
        values[4] = change(values[4])
        return table.set_column(table.column_names.index(column), column, [values]), what

    return lineage(changed)


headless = part_4(
    "document_offset", lambda _: 7, "the part of its document before part 4 is missing"
)


def other_packing(copy):
    """In plan and manifest alike: only the shards tell that documents run over rows."""
    for name in ("plan.json", "manifest.json"):
        text = (copy / name).read_text().replace('"packing": "concat"', '"packing": "best_fit"')
        value = json.loads(text)
        if value.pop("sha256", None):
            value = sealed(value)
        (copy / name).write_bytes(files.json_bytes(value))
    return "a part runs past the end of its row, which best_fit forbids"


@pytest.mark.parametrize(
    "damage",
    [
        duplicate_row,
        duplicate_row_and_index,
        index_off,
        row_of(0),
        row_of(1),
        row_of(690),
        other_packing,
        part_4("position", lambda n: n + 1, "part 4 begins at a different place"),
        part_4("tokens", lambda n: n - 1, "tokens before part 5 belong to no part"),
        headless,
        lineage(lambda table: (table.slice(1), "parts, but")),
    ],
)
def test_faults_that_checksums_miss(copy, damage):
    """The checksums are right, as if a faulty program had written the files."""
    what = damage(copy)
    seal(copy)
    faults = found(copy)
    assert any(what in fault for fault in faults), faults


@pytest.mark.parametrize("field", ["rows", "tokens", "documents", "text_tokens", "longest_row"])
def test_counts_that_manifest_and_receipt_agree_on(copy, field):
    there = getattr(CacheManifest.load(str(copy)).splits["train"][0], field)
    seal(copy, **{field: there + 1})
    faults = found(copy)
    receipt = FIRST.format("receipt") + ".json"
    assert any(f"{receipt}: it records {there + 1} {field}" in fault for fault in faults), faults


def test_a_repeated_shard(build, tmp_path):
    lines = [f"document number {n} of a text" for n in range(40_000)]
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    folder = build(tmp_path / "cache", f"--corpus=text:{tmp_path}/lines.txt?validation=0")
    assert not found(folder)
    manifest = CacheManifest.load(str(folder))
    first, second = manifest.splits["train"][:2]
    for source, target in zip(sorted(first.files), sorted(second.files), strict=True):
        shutil.copy(folder / source, folder / target)
    counts = {field: getattr(first, field) for field in ("rows", "tokens", "documents")}
    counts |= {field: getattr(first, field) for field in ("text_tokens", "longest_row")}
    seal(folder, index=1, **counts)
    faults = found(folder)
    assert any(f"{first.documents:,} documents are in the cache more" in text for text in faults)


def test_quarantine(build, tmp_path, capsys):
    good = [json.dumps({"text": f"fine text {n}"}) for n in range(50)]
    (tmp_path / "some.jsonl").write_text("\n".join([*good, '{"text": null}', "not json"]))
    folder = build(tmp_path / "cache", f"--corpus=json:{tmp_path}/some.jsonl?validation=0")
    assert "left out: null" in capsys.readouterr().out
    assert not found(folder)
    (path,) = folder.glob("*.quarantine-*")
    path.write_text(path.read_text().splitlines()[0] + "\n")
    seal(folder)
    (fault,) = [fault for fault in found(folder) if "receipt" in fault]
    assert "records {'invalid JSON': 1, 'null': 1} dropped" in fault


@pytest.mark.parametrize(
    "more", [["--packing=best_fit", "--row_tokens=50", "--separator=eos"], ["--separator=eos"]]
)
def test_other_packings(build, tmp_path, more):
    folder = build(tmp_path, *more)
    assert not found(folder)
    headless(folder)
    seal(folder)
    assert any("of its document before" in fault for fault in found(folder))


def test_a_folder_without_a_cache_or_with_several(tmp_path):
    with pytest.raises(UserError, match="holds no cache"):
        verify(str(tmp_path))
    for number in range(7):
        (tmp_path / f"mine{number}_lm").mkdir()
        (tmp_path / f"mine{number}_lm" / "manifest.json").touch()
    (tmp_path / "other").mkdir()
    message = f"mine3_lm, mine4_lm and 2 more: name one, such as {tmp_path}/mine0_lm "
    with pytest.raises(UserError, match=message):
        verify(str(tmp_path))


def test_repeated_digests_are_counted_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(verification, "_DIGEST_BYTES", 1 << 10)
    generator = np.random.default_rng(0)
    values = generator.integers(0, 256, (1000, 16), np.uint8)
    alike = values[:7].copy()
    alike[:, 8:] ^= 1  # the first halves are equal
    digests = verification._Digests(str(tmp_path), 1000)
    for part in np.array_split(np.concatenate([values, alike]), 5):
        digests.add(part.tobytes())
    assert len(os.listdir(tmp_path)) > 10
    assert not digests.faults()
    digests.add(values[100:103].tobytes())
    (fault,) = digests.faults()
    assert fault.what.startswith("3 documents")


@pytest.mark.parametrize("seed", range(4))
def test_documents_of_one_id_that_best_fit_cuts(tmp_path, seed):
    """Parts of the one are told from those of the other by the separators after their last."""
    generator = np.random.default_rng(seed)
    sizes = [40, 31] if not seed else generator.choice([14, 15, 16, 31, 32, 47, 50], 9).tolist()
    rows = [json.dumps({"id": "same", "text": "x" * size}) for size in sizes]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    build_command([
        "--task=lm", "--name=x", f"--corpus=json:{tmp_path}/a.jsonl?validation=0",
        "--row_tokens=16", "--vocabulary=bytes", "--extra_ids=100", "--packing=best_fit",
        "--separator=eos", f"--cache_dir={tmp_path}",
    ])  # fmt: skip
    assert found(tmp_path / "x_lm") == []
