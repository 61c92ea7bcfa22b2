"""An oracle for caches: independent readers of corpora and caches, and independent rules."""

import collections
import hashlib
import itertools
import json
import pathlib
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import pyarrow.parquet as pq
import sentencepiece
import tokenizers

from tests.laboratory.commands import Difference
from tests.laboratory.texts import Read, split
from tests.support.plain_records import read_rows

LISTED = "excluded: listed"
SPELT = "contains a special token"
_SPELT = "contains a sentinel", "contains the special token"  # beginnings of reasons

_UNKNOWN = ("[UNK]", "<unk>")  # what a text may become without spelling it

Row = dict[str, list[int]]


class Kept(NamedTuple):
    """A document in a cache: its text's tokens, or its inputs' and its targets'."""

    id: str
    tokens: tuple[tuple[int, ...], ...]


class LeftOut(NamedTuple):
    """A document that is not in a cache."""

    id: str
    place: str
    reason: str


class Held(NamedTuple):
    """The documents of a split, in their order, and those left out of it."""

    kept: list[Kept]
    left_out: collections.Counter[LeftOut]
    text_bytes: int  # of the kept ones, before pairs are split


Encode = Callable[[str], list[int] | None]  # returns None for a text with a reserved token


def encoder(vocabulary: str, sentinels: bool) -> Encode:
    """Returns the stock library's encoding."""
    if vocabulary == "bytes":
        return lambda text: [byte + 3 for byte in text.encode()]
    path = pathlib.Path(vocabulary)
    if (path / "tokenizer.json").exists():
        tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        added = tokenizer.get_added_tokens_decoder().items()
        reserved = {id_ for id_, token in added if token.special and token.content not in _UNKNOWN}

        def encode(text: str) -> list[int] | None:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            return None if reserved & set(ids) else ids

        return encode
    (model,) = [path] if path.is_file() else path.glob("*.model")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    first = processor.get_piece_size() - 100 if sentinels else processor.get_piece_size()

    def encode(text: str) -> list[int] | None:
        ids = processor.encode(text)
        return None if max(ids, default=0) >= first else ids

    return encode


def unknown(vocabulary: str) -> int | None:
    """Returns the id of the stock library's unknown token."""
    path = pathlib.Path(vocabulary)
    if vocabulary == "bytes":
        return 2
    if (path / "tokenizer.json").exists():
        model = json.loads((path / "tokenizer.json").read_text())["model"]
        if model["type"] == "Unigram":
            return model["unk_id"]
        tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        return tokenizer.token_to_id(model["unk_token"]) if model.get("unk_token") else None
    (model_file,) = [path] if path.is_file() else path.glob("*.model")
    return sentencepiece.SentencePieceProcessor(model_file=str(model_file)).unk_id()


class Rules(NamedTuple):
    """The settings that decide which documents are kept."""

    encode: Encode
    longest: int  # bytes of a document
    validation: float
    listed: frozenset[str] = frozenset()
    min_words: int = 0  # of a filter
    banned: str = ""  # a pattern of a filter
    max_inputs: int = 0
    max_targets: int = 0
    too_long: str = ""
    keeps_empty_targets: bool = False


def expected(reads: Sequence[Read], rules: Rules) -> dict[str, Held]:
    """Returns what a cache must hold of documents in the order of its shards."""
    found = {split: Held([], collections.Counter(), 0) for split in ("train", "validation")}
    share = struct.pack(">Q", int(rules.validation * 2**64))
    for read in reads:
        base = read.id.removesuffix(f"#part{read.number}") if read.number > 1 else read.id
        name = "validation" if hashlib.sha256(base.encode()).digest()[:8] < share else "train"
        kept, left_out, size = found[name]
        made: list[Kept] | str = read.problem or _filtered(read, rules)
        if base in rules.listed or (read.number > 1 and read.id in rules.listed):
            made = LISTED
        made = made or (_pairs if len(read.columns) == 2 else _text)(read, rules)
        if isinstance(made, str):
            left_out[LeftOut(read.id, read.place, made)] += 1
            continue
        found[name] = Held(kept, left_out, size + sum(map(len, read.columns)))
        for each in made:  # a part of a pair may be listed
            if each.id in rules.listed and len(read.columns) == 2:
                left_out[LeftOut(each.id, read.place, LISTED)] += 1
            else:
                kept.append(each)
    return found if rules.validation else {"train": found["train"]}


def _filtered(read: Read, rules: Rules) -> str:
    texts = [column.decode() for column in read.columns]
    sides = ("",) if len(texts) == 1 else (" of inputs", " of targets")
    for text, side in zip(texts, sides, strict=True):
        if len(text.split()) < rules.min_words:
            return f"filtered: length min_words{side}"
    for text, side in zip(texts, sides, strict=True):
        if rules.banned and re.search(rules.banned, text):
            return f"filtered: regex pattern{side}"
    return ""


def _text(read: Read, rules: Rules) -> list[Kept] | str:
    tokens = rules.encode(read.columns[0].decode())
    if not tokens:
        return SPELT if tokens is None else "empty"
    return [Kept(read.id, (tuple(tokens),))]


def _pairs(read: Read, rules: Rules) -> list[Kept] | str:
    """Returns the pairs made of one, or why it is left out."""
    sides = []
    limits = {"inputs": rules.max_inputs, "targets": rules.max_targets}
    for (side, limit), data in zip(limits.items(), read.columns, strict=True):
        texts, long = [data.decode()], len(data) > rules.longest
        if long and rules.too_long == "quarantine":
            return f"{side} too long"
        if long:
            texts = split(texts[0], rules.longest)
            real = [text for text in texts if text.encode().strip()]
            texts = texts[:1] if rules.too_long == "cut" else real
        coded = [rules.encode(text) for text in texts]
        if any(ids is None for ids in coded):
            return SPELT
        stretches = [ids for ids in coded if ids]
        if not stretches and side == "targets" and rules.keeps_empty_targets:
            sides.append([[]])
            continue
        if not stretches:
            return f"empty {side}"
        most = limit - 1 if limit else 10**9
        if rules.too_long == "quarantine" and any(len(ids) > most for ids in stretches):
            return f"{side} too long"
        if rules.too_long == "cut":
            stretches = [stretches[0][:most]]
        sides.append([ids[at : at + most] for ids in stretches for at in range(0, len(ids), most)])
    return [
        Kept(
            f"{read.id}#part{number + 1}" if number else read.id,
            tuple(tuple(side[min(number, len(side) - 1)]) for side in sides),
        )
        for number in range(max(map(len, sides)))
    ]


class Layout(NamedTuple):
    """How a cache's rows are made; `end` is the token after each document."""

    packing: str
    row_tokens: int
    end: int | None
    unknown: int | None = None  # the token of text that the vocabulary cannot spell


def ids(folder: pathlib.Path) -> collections.Counter[str]:
    """Returns the ids of the documents that a cache holds or leaves out, once for each time."""
    found = collections.Counter[str]()
    for path in folder.glob("*.documents-*"):
        lineage = pq.read_table(path, columns=["id", "document_offset"]).to_pylist()
        found.update(piece["id"] for piece in lineage if not piece["document_offset"])
    for path in folder.glob("*.quarantine-*"):
        found.update(json.loads(line)["id"] for line in path.read_text().split("\n")[:-1])
    return found


def check(folder: pathlib.Path, wanted: dict[str, Held], layout: Layout) -> None:
    """Raises a Difference unless a finished cache holds what it must."""
    manifest = json.loads((folder / "manifest.json").read_text())
    _same(f"{folder}: splits", {*manifest["splits"]}, {*wanted})
    for name, held in wanted.items():
        shards, waiting = manifest["splits"][name], collections.deque(held.kept)
        for number, shard in enumerate(shards):
            where = f"{folder}: {name} shard {number}"
            files = f"{name}.%s-{number:05d}-of-{len(shards):05d}"
            rows, lineage = _read_shard(folder, files, shard, where)
            begun = sum(not piece["document_offset"] for piece in lineage)
            here = [waiting.popleft() for _ in range(min(begun, len(waiting)))]
            _same(f"{where}: documents", [begun, shard["documents"]], [len(here)] * 2)
            _check_rows(where, rows, lineage, here, layout)
            tokens = sum(len(ids) for each in here for ids in each.tokens)
            _same(f"{where}: counts", [shard["text_tokens"], shard["rows"]], [tokens, len(rows)])
            unknown = sum(ids.count(layout.unknown) for each in here for ids in each.tokens)
            _same(f"{where}: unknown tokens", shard.get("unknown_tokens", 0), unknown)
        _same(f"{folder}: {name} lacks", [each.id for each in waiting], [])
        _check_left_out(folder, name, shards, held)
        if layout.packing != "pairs":
            size = sum(shard["text_bytes"] for shard in shards)
            _same(f"{folder}: {name} bytes", size, held.text_bytes)


def _same(what: str, found: Any, wanted: Any) -> None:
    if found == wanted:
        return
    if isinstance(found, collections.Counter):
        found, wanted = found - wanted, wanted - found
    if isinstance(found, list):  # from the first difference on
        pairs = enumerate(zip(found, wanted, strict=False))
        at = next((n for n, (one, other) in pairs if one != other), min(len(found), len(wanted)))
        what, found, wanted = f"{what} [{at}]", found[at : at + 9], wanted[at : at + 9]
    raise Difference(f"{what}: {str(found)[:600]} instead of {str(wanted)[:600]}")


def _read_shard(
    folder: pathlib.Path, name: str, shard: dict[str, Any], where: str
) -> tuple[list[Row], list[dict[str, Any]]]:
    """Returns rows and lineage; checks files, checksums, framing and the index."""
    for file, entry in shard["files"].items():
        data = (folder / file).read_bytes()
        _same(f"{where}: {file}", [len(data), hashlib.sha256(data).hexdigest()], [*entry.values()])
    data = (folder / (name % "tfrecord")).read_bytes()
    offsets = [*_offsets(data, where)]
    rows = read_rows(data)
    index = np.load(folder / f"{name % 'rows'}.npy")
    lineage = pq.read_table(folder / f"{name % 'documents'}.parquet").to_pylist()
    starts = collections.Counter(piece["row"] for piece in lineage)
    before = np.cumsum([0, *(starts[row] for row in range(len(rows)))])[: len(rows)].tolist()
    sizes = [len(row["targets"]) + len(row.get("inputs", ())) for row in rows]
    _same(f"{where}: offsets", index["offset"].tolist(), offsets)
    _same(f"{where}: index of documents", index["documents"].tolist(), before)
    _same(f"{where}: index of tokens", index["tokens"].tolist(), sizes)
    return rows, lineage


def _offsets(data: bytes, where: str) -> Iterator[int]:
    """Yields where the records of a TFRecord file begin; checks both CRCs of each."""
    at = 0
    while at < len(data):
        yield at
        (length,) = struct.unpack_from("<Q", data, at)
        for begin, end in ((at, at + 8), (at + 12, at + 12 + length)):
            crc = google_crc32c.value(data[begin:end])
            masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
            _same(f"{where}: CRC at {begin}", *struct.unpack_from("<I", data, end), masked)
        at += 16 + length


def _check_rows(
    where: str,
    rows: list[Row],
    lineage: list[dict[str, Any]],
    documents: list[Kept],
    layout: Layout,
) -> None:
    length = layout.row_tokens
    columns = ("id", "row", "position", "tokens", "document_offset")
    found = [tuple(piece[name] for name in columns) for piece in lineage]
    if layout.packing == "pairs":
        made = [(tuple(row["inputs"]), tuple(row["targets"])) for row in rows]
        sizes = [sum(map(len, each.tokens)) for each in documents]
        pieces = [(each.id, n, 0, sizes[n], 0) for n, each in enumerate(documents)]
        _same(f"{where}: lineage", found, pieces)
        _same(f"{where}: pairs", made, [each.tokens for each in documents])
        return
    texts = [[*each.tokens[0], *([layout.end] * (layout.end is not None))] for each in documents]
    targets = [row["targets"] for row in rows]
    if layout.packing == "concat":
        stream = [token for text in texts for token in text]
        cut = [stream[at : at + length] for at in range(0, len(stream), length)]
        begins = itertools.accumulate(map(len, texts), initial=0)
        pieces = [
            (each.id, *divmod(begin, length), len(text), 0)
            for each, text, begin in zip(documents, texts, begins, strict=False)
        ]
        _same(f"{where}: lineage", found, pieces)
        _same(f"{where}: rows", targets, cut)
    else:
        wanted = collections.Counter(
            (each.id, at, tuple(text[at : at + length]))
            for each, text in zip(documents, texts, strict=True)
            for at in range(0, len(text), length)
        )
        there = collections.Counter(
            (name, offset, tuple(targets[row][position : position + size]))
            for name, row, position, size, offset in found
        )
        _same(f"{where}: pieces", there, wanted)
        filled = [sum(size for _, at, _, size, _ in found if at == n) for n in range(len(rows))]
        _same(f"{where}: sizes of rows", [*map(len, targets)], filled)
        _same(f"{where}: longer rows", [size for size in filled if size > length], [])
    starts = [[place for _, at, place, *_ in found if at == n] for n in range(len(rows))]
    _same(f"{where}: document_starts", [row["document_starts"] for row in rows], starts)


def _check_left_out(
    folder: pathlib.Path, split_: str, shards: list[dict[str, Any]], held: Held
) -> None:
    found, counted = collections.Counter[LeftOut](), collections.Counter[str]()
    for path in folder.glob(f"{split_}.quarantine-*"):
        for line in map(json.loads, path.read_text().split("\n")[:-1]):
            found[LeftOut(line["id"], line["location"], _kind_of(line["reason"]))] += 1
    _same(f"{folder}: {split_} left out", found, held.left_out)
    for shard in shards:
        for reason, count in shard["dropped"].items():
            counted[_kind_of(reason)] += count
    wanted = collections.Counter(one.reason for one in held.left_out.elements())
    _same(f"{folder}: {split_} dropped", counted, wanted)


def _kind_of(reason: str) -> str:
    return SPELT if reason.startswith(_SPELT) else reason
