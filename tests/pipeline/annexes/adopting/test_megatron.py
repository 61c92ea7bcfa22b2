"""Data sets of Megatron-LM: types of tokens, splits, documents, and what is wrong with them."""

import struct

import numpy as np
import pytest

from pipeline import verify
from pipeline.annexes.adopting.adopt import main
from tasks.cache.cache import Cache
from tasks.cache.windows import Windows
from tasks.terminal.command_line import UserError
from tasks.vocabulary import EOS_ID, load
from tests.support import foreign_caches, small_tokenizers

ROWS = [[3, 4, 5], [], [6], [7, 8, 9, 10, 1]]
VALID = [[11, 12]]


def run(folder, *flags):
    main([f"--cache_dir={folder}", *flags])
    return Cache.open(str(folder))


def stream(cache, split="train"):
    windows = Windows(cache.folder, cache.manifest, split, 4, keep_tails=True)
    tokens_WN, lengths_W = windows.read(np.arange(len(windows)))
    return tokens_WN[np.arange(4) < lengths_W[:, None]].tolist()


@pytest.mark.parametrize("kind", ["uint8", "int16", "uint16", "int32", "int64"])
def test_tokens_of_every_type(tmp_path, kind, capsys):
    foreign_caches.write_megatron(tmp_path / "m", "b_text_document", ROWS[2:], kind)
    foreign_caches.write_megatron(tmp_path / "m", "a_text_document", ROWS[:2], kind)
    foreign_caches.write_megatron(tmp_path / "m", "a_valid_document", VALID, kind)
    before = {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()}
    cache = run(tmp_path / "m", "--validation=*_valid_*")
    assert stream(cache) == [token for row in ROWS for token in row]
    assert stream(cache, "validation") == [11, 12]
    assert cache.manifest.total("train", "documents") == 4
    assert "not known: corpus, text" in capsys.readouterr().out
    assert before.items() <= {p.name: p.read_bytes() for p in (tmp_path / "m").iterdir()}.items()
    assert verify.main([f"--cache={tmp_path}/m"]) == 0


def test_a_large_file_is_scanned_in_blocks(tmp_path, monkeypatch):
    generator = np.random.default_rng(0)
    rows = [generator.integers(2, 900, n).tolist() for n in generator.integers(0, 60, 300)]
    rows = [[*row, 1] if number % 3 else row for number, row in enumerate(rows)]
    foreign_caches.write_megatron(tmp_path / "m", "x", rows)
    from pipeline.verification import shard

    whole = run(tmp_path / "m").manifest
    monkeypatch.setattr(shard, "_MOST_BYTES", 67)
    assert run(tmp_path / "m").manifest == whole
    (shard,) = whole.splits["train"]
    assert shard.adopted
    assert shard.adopted.targets_ends == 200
    assert shard.adopted.ids == max(max(row, default=0) for row in rows) + 1


@pytest.mark.parametrize("program", ["megatron", "seqio"])
def test_the_ends_of_rows_are_the_eos_of_the_vocabulary(tmp_path, program, capsys):
    texts = small_tokenizers.documents(40)
    model = small_tokenizers.gpt2(tmp_path / "gpt2", texts)
    eos = load(model).special.eos
    assert eos != EOS_ID
    rows = [[3, 4, eos], [5, eos], [6, 1, eos]]
    folder = tmp_path / "rows"
    if program == "megatron":
        foreign_caches.write_megatron(folder, "x", rows)
    else:
        foreign_caches.write_seqio(folder, {"train": [{"targets": row} for row in rows]}, 1)
    assert run(folder).manifest.plan.separator == "none"
    assert "targets: 0 of 3 rows end in id 1" in capsys.readouterr().out
    assert run(folder, f"--vocabulary={model}").manifest.plan.separator == "eos"
    assert "targets: 3 of 3 rows end in EOS" in capsys.readouterr().out
    assert verify.main([f"--cache={folder}"]) == 0
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    run(folder, f"--vocabulary={model}")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert run(folder).manifest.plan.separator == "none"


def cut(folder):
    (folder / "x.bin").write_bytes((folder / "x.bin").read_bytes()[:-2])


def cut_index(folder):
    (folder / "x.idx").write_bytes((folder / "x.idx").read_bytes()[:-1])


def remove(name):
    return lambda folder: (folder / name).unlink()


def header(at, value):
    def write(folder):
        data = bytearray((folder / "x.idx").read_bytes())
        data[at : at + len(value)] = value
        (folder / "x.idx").write_bytes(data)

    return write


MISTAKES = {
    "cut": (cut, r"x.bin has 16 bytes, but its index says 18: it was cut short or changed"),
    "no bin": (remove("x.bin"), r"x.bin is missing, but x.idx exists"),
    "no idx": (remove("x.idx"), r"x.idx is missing, but x.bin exists"),
    "cut index": (cut_index, r"x.idx is cut short"),
    "magic": (header(0, b"TNTIDX\0\0"), r"x.idx is not a Megatron index: it does not begin"),
    "version": (header(9, b"\2"), r"x.idx has version 2 of Megatron's index, not 1"),
    "floats": (header(17, b"\7"), r"x.idx has values of type 7, which are not token ids"),
    "gap": (header(34 + 4 * 4 + 8 * 2, struct.pack("<q", 8)), r"gaps or overlaps between its"),
    "two types": (lambda f: foreign_caches.write_megatron(f, "y", ROWS, "int32"),
                  r"tokens of two types, <i4 in y and <u2 in x"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(tmp_path, name):
    change, message = MISTAKES[name]
    foreign_caches.write_megatron(tmp_path / "m", "x", ROWS)
    if name in ("no bin", "no idx"):
        foreign_caches.write_megatron(tmp_path / "m", "w", ROWS)
    change(tmp_path / "m")
    with pytest.raises(UserError, match=message):
        run(tmp_path / "m")


def test_flags_and_later_changes(tmp_path):
    folder = tmp_path / "m"
    foreign_caches.write_megatron(folder, "x", ROWS)
    with pytest.raises(UserError, match=r"is a cache of Megatron; `palimpsest adopt` indexes it"):
        Cache.open(str(folder))
    with pytest.raises(UserError, match="--validation=y leaves no data set for validation"):
        run(folder, "--validation=y")
    with pytest.raises(UserError, match="--read=pairs: Megatron data sets have no inputs"):
        run(folder, "--read=pairs")
    cache = run(folder)
    data = (folder / "x.bin").read_bytes()
    (folder / "x.bin").write_bytes(data[:-2])
    with pytest.raises(UserError, match=r"x.bin has 16 bytes, but had 18 when it was adopted"):
        stream(cache)
    # Files without checksums are compared by pipeline.verify.
    (folder / "x.bin").write_bytes(b"\x09" + data[1:])
    assert stream(cache)[:2] == [9, 4]
    assert verify.main([f"--cache={folder}"]) == 1
    # Its index is not in the receipt, so the data set is always scanned again.
    foreign_caches.write_megatron(folder, "x", [*ROWS[2:], *ROWS[:2]])
    assert stream(run(folder))[:2] == [6, 7]
