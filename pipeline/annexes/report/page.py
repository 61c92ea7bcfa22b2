"""The report on a cache as an HTML page."""

import itertools
import math
from collections import Counter

import numpy as np

from pipeline.annexes.report.findings import Findings
from tasks.annexes.pages import chart
from tasks.annexes.pages import document as html_page
from tasks.cache.manifest import CacheManifest
from tasks.reading.corpus import readable
from tasks.vocabulary import BYTE, CONTROL, UNKNOWN, UNUSED, Vocabulary

_TOP_PIECES = 24
_TOP_FILES = 200  # rows of the file table
_QUANTILES = (0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1)
_BINS_PER_OCTAVE = 2
_MIN_BINS = 8
_AXES = {"bin": "tokens of a document"}


def page(folder: str, manifest: CacheManifest, loaded: Vocabulary, found: Findings) -> str:
    """Returns the report as HTML."""
    plan = manifest.plan
    read, every = found.shards
    note = f"<p class=note>From {read:,} of the {every:,} shards.</p>" if read < every else ""
    sections = [
        ("Splits", _splits(manifest)),
        ("Corpus", _corpus(manifest)),
        ("Document lengths", note + _lengths(found)),
        ("Vocabulary", note + _vocabulary(manifest, loaded, found)),
        ("Duplicates", note + _duplicates(found)),
        ("Left out", _left_out(manifest, found)),
        ("Rows", note + _rows(found)),
        *([("Files", _files(manifest, found, note))] if manifest.plan.corpus.get("files") else []),
        ("Provenance", _provenance(folder, manifest)),
    ]
    body, links = html_page.sections(sections)
    return html_page.document(
        f"Cache of {plan.task}",
        links,
        head=f"<p>{html_page.text(readable(plan.corpus['spec']))}</p>{_headline(manifest)}",
        body=body,
        charts=chart.data(_charts(found), _AXES),
    )


def _headline(manifest: CacheManifest) -> str:
    every = [shard for shards in manifest.splits.values() for shard in shards]
    figures = {
        "documents": f"{_total(manifest, 'documents'):,}",
        "tokens": f"{_total(manifest, 'tokens'):,}",
        "text": _size(_total(manifest, "text_bytes")),
        "on disk": _size(sum(file.bytes for each in every for file in each.files.values())),
        "left out": f"{sum(sum(each.dropped.values()) for each in every):,}",
    }
    return html_page.facts(figures.items(), "figures")


def _total(manifest: CacheManifest, field: str) -> int:
    return sum(manifest.total(split, field) for split in manifest.splits)


def _size(size: int) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if size >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size / 1e3:,.2f} kB"


def _splits(manifest: CacheManifest) -> str:
    rows = []
    for split, shards in manifest.splits.items():
        tokens, count = manifest.total(split, "tokens"), manifest.total(split, "rows")
        room = count * manifest.plan.row_tokens  # 0 for pairs, whose rows have no fixed length
        documents = [manifest.total(split, name) for name in ("documents", "split_documents")]
        counts = (f"{number:,}" for number in (len(shards), *documents, tokens, count))
        rows.append((split, *counts, f"{tokens / room:.2%}" if room else "–"))
    plan = manifest.plan
    header = ("split", "shards", "documents", "split documents", "tokens", "rows", "rows filled")
    if plan.pairs:
        return html_page.table("A pair a row", header, rows) + _pairs(manifest)
    packing = f"{plan.packing} packing into rows of {plan.row_tokens:,} tokens"
    return html_page.table(f"{packing}, separator {plan.separator}", header, rows)


def _pairs(manifest: CacheManifest) -> str:
    rows = []
    for split, shards in manifest.splits.items():
        counts = [shard.pairs for shard in shards if shard.pairs]
        inputs = sum(count.inputs_tokens for count in counts)
        tokens = {"inputs": inputs, "targets": manifest.total(split, "text_tokens") - inputs}
        for side, number in tokens.items():
            longest = max(getattr(count, f"longest_{side}") for count in counts)
            cut = sum(getattr(count, f"cut_{side}") for count in counts)
            rows.append((split, side, f"{number:,}", f"{longest:,}", f"{cut:,}"))
    return html_page.table("Sides", ("split", "side", "tokens", "longest", "cut"), rows)


def _corpus(manifest: CacheManifest) -> str:
    record = manifest.plan.corpus
    facts = [
        (name, value if isinstance(value, str) else f"{value:,}")
        for name, value in sorted(record.items())
        if isinstance(value, str | int | float) and value != ""
    ]
    return html_page.table("As resolved by the build", ("name", "value"), facts)


def _files(manifest: CacheManifest, found: Findings, note: str) -> str:
    sources = manifest.plan.corpus["files"]
    rows = []
    for file in sources[:_TOP_FILES]:
        documents, tokens = found.by_file.get(file["name"], ("–", "–"))
        state = file.get("sha256") or file.get("etag") or "–"
        cells = [n if isinstance(n, str) else f"{n:,}" for n in (documents, tokens)]
        rows.append((file["name"], file["split"], f"{file['bytes']:,}", *cells, state[:16]))
    shown = "" if len(sources) <= _TOP_FILES else f", the first {_TOP_FILES}"
    header = ("file", "split", "bytes", "documents", "tokens", "sha256 or etag")
    table = html_page.table(f"Files: {len(sources):,}{shown}", header, rows)
    if found.by_file:
        return table + note
    own = "The corpus has its own document ids, which do not name files."
    return f"{table}<p class=note>{own}</p>"


def _lengths(found: Findings) -> str:
    if not len(found.lengths):
        return "<p>The cache holds no documents.</p>"
    quantiles = np.quantile(found.lengths, _QUANTILES, method="lower").astype(int)
    names = ["minimum", *(f"{share:.0%}" for share in _QUANTILES[1:-1]), "maximum"]
    table = html_page.table(
        f"Tokens per document: quantiles of {len(found.lengths):,} documents",
        ("quantile", *names),
        [("tokens", *(f"{value:,}" for value in quantiles))],
    )
    mean = found.lengths.mean()
    return f"{chart.figures(_charts(found), _AXES)}{table}<p>The mean is {mean:,.1f} tokens.</p>"


def _charts(found: Findings) -> list[chart.Chart]:
    if not len(found.lengths):
        return []
    bins = np.floor(np.log2(np.maximum(found.lengths, 1)) * _BINS_PER_OCTAVE).astype(int)
    low = int(bins.min())
    counts = np.bincount(bins - low, minlength=_MIN_BINS).tolist()
    edges = [
        math.ceil(2 ** ((low + number) / _BINS_PER_OCTAVE)) for number in range(len(counts) + 1)
    ]
    labels = [f"{begin:,}\u2013{end - 1:,}" for begin, end in itertools.pairwise(edges)]
    bars = chart.Series("documents", {"bin": range(len(counts))}, counts)
    return [chart.Chart("lengths", "Documents by length", [bars], "in tokens", labels)]


def _vocabulary(manifest: CacheManifest, loaded: Vocabulary, found: Findings) -> str:
    kinds = np.array(loaded.ids.kinds[: loaded.record.pieces])
    total = max(int(found.pieces.sum()), 1)
    of_text = [
        token
        for token, kind in enumerate(kinds[: loaded.first_sentinel].tolist())
        if kind not in (CONTROL, UNKNOWN, UNUSED)
    ]
    unused = sum(not found.pieces[token] for token in of_text)
    in_bytes = sum(int(found.pieces[token]) for token in of_text if kinds[token] == BYTE)
    rate = _total(manifest, "text_bytes") / max(_total(manifest, "text_tokens"), 1)
    facts = [
        ("pieces of text", f"{len(of_text):,}"),
        ("never used", f"{unused / max(len(of_text), 1):.2%}"),
        ("bytes per token", f"{rate:.3f}"),
        ("tokens per word", f"{found.word_tokens / max(found.words, 1):.3f}"),
        ("unknown tokens", f"{found.pieces[: len(kinds)][kinds == UNKNOWN].sum() / total:.4%}"),
        ("byte-fallback tokens", f"{in_bytes / total:.4%}"),
    ]
    order = np.argsort(-found.pieces, kind="stable")[:_TOP_PIECES].tolist()
    most = max(int(found.pieces.max()), 1)
    rows = [
        (
            loaded.piece(token),
            f"{found.pieces[token]:,}",
            f"{found.pieces[token] / total:.2%}",
            f"<span class=bar style='width:{10 * found.pieces[token] / most:.2f}rem'></span>",
        )
        for token in order
        if found.pieces[token]
    ]
    return html_page.table("Fit to the corpus", ("name", "value"), facts) + html_page.table(
        "The most frequent pieces", ("piece", "times", "share", ""), rows, html_last=True
    )


def _duplicates(found: Findings) -> str:
    if not found.duplicates:
        return "<p>No two documents have the same tokens.</p>"
    share = found.duplicates / max(len(found.lengths), 1)
    rows = [
        (group.start, f"{group.count:,}", ", ".join(group.ids)) for group in found.top_duplicates
    ]
    facts = [
        ("documents with the same tokens as an earlier one", f"{found.duplicates:,}"),
        ("share of the documents", f"{share:.2%}"),
        ("groups of equal documents", f"{found.groups:,}"),
    ]
    return html_page.table("Nothing was removed", ("name", "value"), facts) + html_page.table(
        "The largest groups", ("begins with", "documents", "some ids"), rows
    )


def _left_out(manifest: CacheManifest, found: Findings) -> str:
    counts, edits = Counter[str](), Counter[str]()
    for split, shards in manifest.splits.items():
        counts.update(manifest.dropped(split))
        for shard in shards:
            edits.update(shard.edits or {})
    edited = [(what, f"{count:,}") for what, count in sorted(edits.items())]
    more = html_page.table("Edits by filters", ("what", "times"), edited) if edited else ""
    if not counts:
        return "<p>No document was left out.</p>" + more
    rows = []
    for reason, count in counts.most_common():
        examples = found.quarantine.get(reason, [])
        places = "; ".join(
            (f"{name} ({place})" if name else place) + (f": {text}" if text else "")
            for name, place, text in examples
        )
        rows.append((reason, f"{count:,}", places or "in shards that were not read"))
    header = ("reason", "documents", "some of them")
    return html_page.table("Documents by reason", header, rows) + more


def _rows(found: Findings) -> str:
    if not found.rows:
        return "<p>The shards that were read hold no rows.</p>"
    parts = ["<p>Decoded text; each document begins with its id.</p>"]
    for row in found.rows:
        text = "".join(
            (f"<b>{html_page.text(name)}</b> " if name else "") + html_page.text(part) + "\n"
            for name, part in row.parts
        )
        parts.append(f"<h3 class=note>{html_page.text(row.place)}</h3>")
        parts.append(f"<div class=row>{text.rstrip()}</div>")
    return "".join(parts)


def _provenance(folder: str, manifest: CacheManifest) -> str:
    vocabulary = manifest.plan.vocabulary
    facts = [
        ("cache", folder),
        ("fingerprint of the plan", manifest.plan.fingerprint),
        ("SHA-256 of the vocabulary", vocabulary.sha256),
        ("ids", f"{vocabulary.size:,}, including {vocabulary.sentinels} sentinels"),
        *([("law of SentencePiece", law)] if (law := manifest.plan.sentencepiece_law) else []),
        ("format", manifest.plan.format),
        *sorted(manifest.software.items()),
    ]
    return html_page.table("", ("name", "value"), facts) + (
        "<p class=note>manifest.json records the SHA-256 of every file; "
        "<code>python -m pipeline.verify</code> checks them.</p>"
    )
