"""Adoption changes no file, is resumed, and names what is wrong with a cache in one line."""

import dataclasses
import json
import os
import re

import numpy as np
import pytest

from pipeline import verify
from pipeline.annexes.adopting import adopt
from pipeline.building import lifecycle
from tasks import annexes
from tasks.cache.cache import Cache
from tasks.cache.pair_windows import row_windows
from tasks.cache.windows import Windows
from tasks.storage import files
from tasks.terminal import processes
from tasks.terminal.command_line import UserError
from tasks.vocabulary import load
from tests.support import foreign_caches, window_caches
from tests.support.foreign_caches import pair
from tests.support.processes import started
from tests.support.small_tokenizers import t5

ROWS = [[3 + number % 50] * (1 + number % 7) for number in range(40)]
PAIRS = [pair([number % 90 + 3, 7], [number % 50 + 3]) for number in range(40)]


def sums(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def texts(folder, split="train", rows=ROWS, **more):
    return foreign_caches.write_seqio(folder, {split: [{"targets": row} for row in rows]}, **more)


def run(folder, *flags):
    adopt.main([f"--cache_dir={folder}", *flags])


def tokens(folder):
    cache = Cache.open(str(folder))
    windows = Windows(cache.folder, cache.manifest, "train", 10, keep_tails=True)
    found, lengths = windows.read(np.arange(len(windows)))
    return np.concatenate([row[:n] for row, n in zip(found, lengths, strict=True)]).tolist()


FLAT = [token for row in ROWS for token in row]


def test_files_are_only_added_and_the_manifest_says_what_is_unknown(tmp_path, capsys):
    folder = foreign_caches.write_seqio(
        tmp_path / "qa", {"train": PAIRS, "validation": PAIRS[:9], "test": []}
    )
    before = sums(folder)
    run(folder)
    after = sums(folder)
    assert after.items() >= before.items()
    added = {name for name in set(after) - set(before) if not re.search(r"\.(rows|receipt)-", name)}
    assert added == {"manifest.json"}
    out = capsys.readouterr().out
    assert "each row is a pair" in out
    assert "not read: the features inputs_pretokenized, targets_pretokenized" in out
    assert "not known: corpus, borders of documents, text" in out
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["plan"]["corpus"]["unknown"] == ["corpus", "borders of documents", "text"]
    assert manifest["plan"]["task"] == "qa"
    run(folder)
    assert sums(folder) == after


def test_tasks_on_text_have_empty_inputs(tmp_path):
    rows = [pair([], row) for row in ROWS]
    run(foreign_caches.write_seqio(tmp_path / "t", {"train": rows}))
    assert tokens(tmp_path / "t") == FLAT


def test_targets_of_pairs_alone_on_request(tmp_path):
    rows = [pair([5], row) for row in ROWS]
    run(foreign_caches.write_seqio(tmp_path / "t", {"train": rows}), "--read=targets")
    assert tokens(tmp_path / "t") == FLAT


def test_a_document_a_row_with_eos_serves_objectives_that_need_it(tmp_path):
    run(texts(tmp_path / "t", rows=[[*row, 1] for row in ROWS]))
    assert Cache.open(str(tmp_path / "t")).manifest.plan.separator == "eos"
    run(texts(tmp_path / "u", rows=[*ROWS, [9, 1]]))
    assert Cache.open(str(tmp_path / "u")).manifest.plan.separator == "none"


def test_files_of_others_are_not_written_over(tmp_path):
    folder = texts(tmp_path / "t")
    (folder / "manifest.json").write_text('{"another": "program"}')
    before = sums(folder)
    with pytest.raises(UserError, match=r"manifest.json is damaged or another program's: delete"):
        run(folder)
    assert sums(folder) == before
    run(folder, f"--index_dir={tmp_path}/index")
    assert tokens(tmp_path / "index") == FLAT


def test_an_index_in_another_folder(tmp_path, monkeypatch):
    folder = texts(tmp_path / "t")
    before = sums(folder)
    monkeypatch.chdir(tmp_path)
    run("t", f"--index_dir={tmp_path}/index/mine")
    assert sums(folder) == before
    monkeypatch.chdir("/")
    assert tokens(tmp_path / "index" / "mine") == FLAT
    assert verify.main([f"--cache={tmp_path}/index/mine"]) == 0
    # The same rows have the same fingerprint, wherever they are.
    run(folder)
    here, there = (Cache.open(str(tmp_path / name)) for name in ("t", "index/mine"))
    assert here.manifest.plan.fingerprint == there.manifest.plan.fingerprint


def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch):
    folder = texts(tmp_path / "t")

    def refuse(*_):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(files, "remove_partial", refuse)
    with pytest.raises(UserError, match="give a folder for index and manifest with --index_dir"):
        run(folder)


def interrupt(*_):
    raise KeyboardInterrupt


def test_an_interrupted_adoption_keeps_what_is_finished(tmp_path, monkeypatch):
    folder = texts(tmp_path / "t", shards=3)
    run(folder)
    whole = sums(folder)
    (folder / "manifest.json").unlink()
    (folder / "train.receipt-00001-of-00003.json").unlink()
    (folder / "train.rows-00001-of-00003.npy").unlink()
    kept = folder / "train.rows-00002-of-00003.npy"
    os.utime(kept, (1, 1))
    run(folder)
    assert sums(folder) == whole
    assert kept.stat().st_mtime == 1
    # A file of the same size with another content is scanned again.
    index = folder / "train.tfrecord-00002-of-00003"
    rows = [{"targets": [4] * len(row)} for row in ROWS[26:]]
    index.write_bytes(foreign_caches.records(rows))
    with monkeypatch.context() as patched:
        patched.setattr(files, "write_json", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(folder)
    # Nobody takes the new index for that of the old rows.
    assert not {"manifest.json", "train.receipt-00002-of-00003.json"} & set(sums(folder))
    run(folder)
    assert kept.stat().st_mtime != 1
    assert tokens(folder)[-10:] == [4] * 10


@pytest.mark.processes
def test_workers_scan_the_same(tmp_path, monkeypatch):
    folder = texts(tmp_path / "t", shards=3)
    run(folder)
    alone = sums(folder)
    for path in [*folder.glob("*.npy"), *folder.glob("*receipt*"), folder / "manifest.json"]:
        path.unlink()
    monkeypatch.setattr(processes, "SMALL_BYTES", 0)
    run(folder, "--workers=2")
    assert sums(folder) == alone


@pytest.mark.processes
def test_the_command_ends_with_one_line(tmp_path):
    folder = texts(tmp_path / "t")
    cut(folder)
    done = started("-m", "palimpsest", "adopt", f"--cache_dir={folder}")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"palimpsest adopt: error: {shard(folder)} ends in row 19")


def shard(folder, number=1):
    return next(folder.glob(f"train.tfrecord-{number:05d}-*"))


def cut(folder):
    shard(folder).write_bytes(shard(folder).read_bytes()[:-9])


def cut_between_records(folder):
    data = shard(folder).read_bytes()
    shard(folder).write_bytes(data[: int.from_bytes(data[:8], "little") + 16])


def flip(folder):
    data = bytearray(shard(folder).read_bytes())
    data[30] ^= 4
    shard(folder).write_bytes(data)


def not_records(folder):
    shard(folder).write_bytes(b"some text, which is long enough to have a header")


def link_to_nothing(folder):
    path = shard(folder)
    path.unlink()
    path.symlink_to(folder / "gone")


def remove(name):
    return lambda folder: (folder / name).unlink()


def other_rows(*rows):
    return lambda folder: shard(folder).write_bytes(foreign_caches.records(rows))


def say(**features):
    def write(folder):
        path = folder / "info.train.json"
        info = json.loads(path.read_text())
        info["features"] = features
        path.write_text(json.dumps(info))

    return write


IDS, FLOATS = {"dtype": "int32", "shape": [None]}, {"dtype": "float32", "shape": [None]}
MISTAKES = {
    "cut": (cut, r"tfrecord-00001-of-00002 ends in row 19: it was cut short; restore it"),
    "rows gone": (cut_between_records, r"21 rows of train, but stats.train.json says 40"),
    "flipped": (flip, r"tfrecord-00001-of-00002, row 0: the checksum of the record's data"),
    "no records": (not_records, r"00001-of-00002, row 0: .* the file may not hold TFRecords"),
    "link": (link_to_nothing, r"00001-of-00002 is not a file, but a folder or a dangling link"),
    "no shard": (remove("train.tfrecord-00000-of-00002"), r"train.tfrecord-00000-of-00002 is miss"),
    "no info": (remove("info.train.json"), r"info.train.json is missing, but there are files of"),
    "unfinished": (remove("COMPLETED"), r"unfinished, as it has no COMPLETED"),
    "no targets": (say(inputs=IDS), r"has the features inputs but no targets"),
    "floats": (say(targets=FLOATS), r"targets is float32 of the shape \[None\], but must be"),
    "matrix": (say(targets={**IDS, "shape": [None, None]}), r"must be a list of integers"),
    "mixed": (other_rows({"targets": [3]}), r"00001-of-00002, row 0: .* no feature 'inputs', and"),
    "mixed floats": (other_rows({"targets": 0.5, "inputs": [3]}), r"row 0: its feature 'targets' "),
    "other features": (other_rows({"inputs": [3]}), r"row 0: the record has no feature 'targets'"),
    "negative": (other_rows(pair([3], [5]), pair([3], [-1])), r"row 1: it has the id -1, but"),
    "no form": (lambda f: shard(f).write_bytes(foreign_caches.plain_records.frame(b"\x08\x01")),
                r"row 0: not a row of this format"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(tmp_path, name):
    change, message = MISTAKES[name]
    folder = foreign_caches.write_seqio(tmp_path / "t", {"train": PAIRS})
    change(folder)
    with pytest.raises(UserError, match=message) as error:
        run(folder)
    assert "\n" not in str(error.value)
    assert not (folder / "manifest.json").exists()


@pytest.mark.parametrize("of_ids", [foreign_caches.unpacked, foreign_caches.in_pieces])
def test_lists_of_ids_may_be_unpacked_or_in_pieces(tmp_path, of_ids):
    rows = [pair([number, 7, 2**20], [*range(number), 1]) for number in range(9, 49)]
    folders = [
        foreign_caches.write_seqio(tmp_path / name, {"train": rows}) for name in ("ours", "others")
    ]
    for number, some in enumerate((rows[:20], rows[20:])):
        path = folders[1] / f"train.tfrecord-0000{number}-of-00002"
        path.write_bytes(foreign_caches.records(some, of_ids))
    for folder in folders:
        run(folder)
        assert verify.main([f"--cache={folder}"]) == 0
    windows = [row_windows(str(f), Cache.open(str(f)).manifest, "train") for f in folders]
    (tokens, lengths), found = (each.read(np.arange(len(each))) for each in windows)
    np.testing.assert_array_equal(tokens, found[0])
    np.testing.assert_array_equal(lengths, found[1])
    (folders[1] / "manifest.json").unlink()
    first = foreign_caches.records([pair([], [4])]) + foreign_caches.records(rows[1:20], of_ids)
    (folders[1] / "train.tfrecord-00000-of-00002").write_bytes(first)
    with pytest.raises(UserError, match="row 1: it has inputs, but the first row has none"):
        run(folders[1])


def test_rows_with_inputs_after_a_row_without(tmp_path):
    folder = foreign_caches.write_seqio(tmp_path / "t", {"train": [pair([], [4]), *PAIRS]})
    with pytest.raises(UserError, match=r"row 1: it has inputs, but the first row has none: give"):
        run(folder)
    run(folder, "--read=pairs")
    assert Cache.open(str(folder)).manifest.total("train", "rows") == 41


def test_ids_beyond_the_vocabulary(tmp_path):
    vocabulary = t5(tmp_path / "sentencepiece", ["a few words"], 270, byte_fallback=True)
    size = load(vocabulary).size
    folder = texts(tmp_path / "t", rows=[*ROWS, [9, size + 150]])
    message = rf"00001-of-00002, row 20: it has the id {size + 150}, .* 0 to {size + 99}:"
    with pytest.raises(UserError, match=message):
        run(folder, f"--vocabulary={vocabulary}", "--extra_ids=100")
    (folder / "sentencepiece.model").write_bytes(b"of others")
    with pytest.raises(UserError, match=r"piece.model is a different vocabulary: give that"):
        run(folder, f"--vocabulary={vocabulary}", "--extra_ids=200")
    (folder / "sentencepiece.model").unlink()
    run(folder, f"--vocabulary={vocabulary}", "--extra_ids=200")
    assert Cache.open(str(folder)).ids.sentinels == 200
    with pytest.raises(UserError, match=message):
        run(folder, f"--vocabulary={vocabulary}", "--extra_ids=100")


def test_flags_without_effect_and_wrong_folders(tmp_path):
    folder = foreign_caches.write_seqio(tmp_path / "c" / "t", {"train": PAIRS})
    for flags, message in (
        (["--packing=rows"], "--packing=rows has no effect on pairs"),
        (["--validation=x"], "--validation has no effect on a seqio cache"),
        (["--extra_ids=100"], "--extra_ids has no effect without --vocabulary"),
    ):
        with pytest.raises(UserError, match=message):
            run(folder, *flags)
    with pytest.raises(UserError, match=r"holds neither info.* but t: name the folder of one task"):
        run(tmp_path / "c")
    with pytest.raises(UserError, match="is empty or does not exist"):
        run(tmp_path / "nothing")
    ours = window_caches.make(tmp_path / "ours")
    (tmp_path / "ours" / "manifest.json").write_bytes(ours.manifest.content())
    for name in ("info.train.json", "COMPLETED", "stats.train.json"):
        (tmp_path / "ours" / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(UserError, match=r"is a cache of pipeline.build and needs no adoption"):
        run(tmp_path / "ours")
    (tmp_path / "ours" / "manifest.json").rename(tmp_path / "ours" / "plan.json")
    with pytest.raises(UserError, match=r"is an unfinished build of pipeline.build"):
        run(tmp_path / "ours")
    with pytest.raises(UserError, match=r"--read=pairs: the rows of .* have no inputs"):
        run(texts(tmp_path / "u"), "--read=pairs")
    with pytest.raises(UserError, match=r"is a cache of seqio; `palimpsest adopt` indexes it"):
        Cache.open(str(folder))


def test_a_cache_that_changes_after_the_adoption_is_named(tmp_path, capsys):
    folder = texts(tmp_path / "t")
    run(folder)
    records = shard(folder)
    whole = records.read_bytes()
    capsys.readouterr()
    assert verify.main([f"--cache={folder}"]) == 0

    records.write_bytes(whole[:-9])
    with pytest.raises(UserError, match=r"00001-of-00002 has \S+ bytes, but had \S+ when it was"):
        tokens(folder)
    assert verify.main([f"--cache={folder}"]) == 1
    assert "ends in row 19: it was cut short" in capsys.readouterr().out

    records.write_bytes(whole[:30] + bytes([whole[30] ^ 4]) + whole[31:])
    with pytest.raises(UserError, match=r"corrupt in row 0: .* restore the file, or adopt the"):
        tokens(folder)

    # Records that are sound but are others.
    others = [{"targets": row[::-1] if len(set(row)) > 1 else [5] * len(row)} for row in ROWS[20:]]
    data = foreign_caches.records(others)
    records.write_bytes(data)
    assert len(data) == len(whole)
    assert verify.main([f"--cache={folder}"]) == 1
    assert "its bytes were changed since the adoption" in capsys.readouterr().out

    data = foreign_caches.records([{"targets": [5] * 4} for _ in ROWS[20:]])
    records.write_bytes(data.ljust(len(whole), b"\0")[: len(whole)])
    with pytest.raises(UserError, match="is corrupt in row"):
        tokens(folder)

    records.unlink()
    with pytest.raises(UserError, match=r"00001-of-00002 is missing, but had"):
        tokens(folder)


def test_the_other_commands(tmp_path, capsys):
    folder = foreign_caches.write_seqio(tmp_path / "t", {"train": PAIRS})
    run(folder)
    capsys.readouterr()
    if inspect := annexes.get("commands.caches", "inspect"):
        inspect.main([f"--cache={folder}", "--task=supervised", "--index=3"])
        shown = capsys.readouterr().out
        assert "4 tokens of 1 row; 1 to be predicted" in shown
        assert "train.tfrecord-00000-of-00002:3" in shown
        assert "#6 #7 → #6" in shown
    if report := annexes.get("commands.caches", "cache report"):
        with pytest.raises(UserError, match="was adopted from seqio and has no table of documents"):
            report.main([f"--cache={folder}"])
    ours = dataclasses.replace(Cache.open(str(folder)).manifest.plan, adopted=None)
    with pytest.raises(UserError, match=r"holds a cache with a different plan \(adopted"):
        lifecycle.check(str(folder), ours, extend=False)


@pytest.mark.google
def test_in_a_bucket(tmp_path, gcs, capsys):
    folder = texts(tmp_path / "t")
    for path in folder.iterdir():
        gcs.store.put("bucket", f"caches/t/{path.name}", path.read_bytes(), {}, {})
    run("gs://bucket/caches/t")
    run(folder)
    theirs, ours = Cache.open("gs://bucket/caches/t").manifest, Cache.open(str(folder)).manifest
    assert theirs == ours
    reading = {"local_dir": str(tmp_path / "c"), "keep_tails": True}
    windows = row_windows("gs://bucket/caches/t", theirs, "train", **reading)
    assert windows.read(np.arange(len(windows)))[1].sum() == len(FLAT)
    capsys.readouterr()
    assert verify.main(["--cache=gs://bucket/caches/t"]) == 0
    name = "caches/t/train.tfrecord-00001-of-00002"
    gcs.store.put("bucket", name, gcs.read(name)[:-9], {}, {})
    with pytest.raises(UserError, match=r"00001-of-00002 has \S+ bytes, but had \S+ when it was"):
        row_windows("gs://bucket/caches/t", theirs, "train", **reading)


def test_the_vocabulary_of_a_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "letters_to_adopt.py").write_text(LETTERS)
    folder = foreign_caches.write_seqio(tmp_path / "c", {"train": [{"targets": [3, 6, 1]}]})
    with pytest.raises(UserError, match="letters_to_adopt"):
        run(folder, "--vocabulary=letters_to_adopt")
    run(folder, "--vocabulary=letters_to_adopt", "--task_module=letters_to_adopt")
    assert Cache.open(str(folder)).ids.texts[3:7] == ["A", "C", "G", "T"]


LETTERS = """
from tasks import vocabulary

class Letters:
    pieces = ["<pad>", "</s>", "<unk>", *"ACGT"]

    def encode(self, text):
        return [self.pieces.index(each) for each in text if each in self.pieces]

    def decode(self, ids):
        return "".join(self.pieces[number] for number in ids)

vocabulary.register("letters_to_adopt", Letters)
"""
