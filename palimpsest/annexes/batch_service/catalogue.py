"""Pages about the caches of a folder: a list, each cache's counts, and some of its windows."""

import functools
import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from tasks import registry
from tasks.annexes.inspecting import show
from tasks.annexes.inspecting.inspect import samples
from tasks.annexes.pages import document as html_page
from tasks.cache.cache import Cache
from tasks.cache.manifest import MANIFEST, CacheManifest, cache_names
from tasks.objectives import Lengths
from tasks.reading.corpus import readable
from tasks.storage import files
from tasks.terminal import toml_flags
from tasks.terminal.command_line import UserError
from trainer.data.origins import Document

# Seconds for which a list of caches, or a manifest, is not read again.
_FRESH_SECONDS = 30
# Windows on a page, and characters of a value on it.
_WINDOWS, _LONGEST_VALUE = 5, 200
_COUNTS = ("documents", "tokens", "text_bytes", "rows")


class Catalogue:
    """The finished caches in a folder, or the folder's own."""

    def __init__(self, cache_dir: str, licenses: Mapping[str, str]):
        """`licenses` maps names of caches, or patterns, to licences; the first that fits counts."""
        self._cache_dir, self._licenses = cache_dir, licenses

    def names(self) -> list[str]:
        """Returns the names of the caches, sorted."""
        return list(_names(self._cache_dir, _now()))

    def folder(self, name: str) -> str:
        """Returns the folder of a cache; raises UserError if there is none of this name."""
        if name not in self.names():
            raise UserError(f"no cache {name}")
        alone = files.exists(files.join(self._cache_dir, MANIFEST))
        return self._cache_dir if alone else files.join(self._cache_dir, name)

    def manifest(self, name: str) -> CacheManifest:
        """Returns a cache's manifest."""
        return _manifest(self.folder(name), _now())

    def list_page(self, names: list[str]) -> str:
        """Returns the page that lists these caches with their counts."""
        header = ("cache", "corpus", "licence", "packing", *map(_words, _COUNTS), "")
        rows = [(name, *self._row(name), _link(name)) for name in names]
        table = html_page.table("Caches", header, rows, html_last=True)
        return html_page.document("Caches", {}, "", f"<main>{table}</main>")

    def _row(self, name: str) -> tuple[str, ...]:
        manifest = self.manifest(name)
        counts = (f"{_total(manifest, count):,}" for count in _COUNTS)
        corpus = readable(str(manifest.plan.corpus["spec"]))
        return corpus, self._license(name), manifest.plan.packing, *counts

    def _license(self, name: str) -> str:
        fits = (text for pattern, text in self._licenses.items() if fnmatchcase(name, pattern))
        return next(fits, "not stated")

    def page(self, name: str) -> str:
        """Returns the page of a cache: counts by split, and what made it."""
        manifest = self.manifest(name)
        plan = manifest.plan
        rows = [
            (split, f"{len(shards):,}", *(f"{manifest.total(split, each):,}" for each in _COUNTS))
            for split, shards in manifest.splits.items()
        ]
        splits = html_page.table("Splits", ("split", "shards", *map(_words, _COUNTS)), rows)
        made = {
            "fingerprint": plan.fingerprint,
            "licence": self._license(name),
            "packing": plan.packing,
            "tokens in a row": plan.row_tokens,
            "vocabulary": plan.vocabulary.sha256,
            **{f"corpus: {key}": _short(value) for key, value in plan.corpus.items() if value},
            **{f"software: {key}": value for key, value in manifest.software.items()},
        }
        body = f"<main>{splits}{html_page.facts(made.items(), 'facts')}</main>"
        links = {
            f"/caches/{name}/windows": "some windows",
            f"/explain?task={name}&batch=0&row=0": "documents of a row",
        }
        found = (f"<a href={html_page.attribute(to)}>{words}</a>" for to, words in links.items())
        return html_page.document(f"Cache {name}", {}, f"<p>{', '.join(found)}</p>", body)

    def windows_page(self, name: str, seed: int) -> str:
        """Returns a page of windows that `seed` draws, as `palimpsest inspect` shows them."""
        cache = Cache.open(self.folder(name))
        task = registry.find(name)
        lengths = task.lengths if task else Lengths(0, 0)
        found = samples(cache, "train", task, lengths, _WINDOWS, seed)
        return show.page(f"{name}: windows of train, seed {seed}", found, cache.ids)

    def json(self, names: list[str]) -> str:
        """Returns the caches' counts and fingerprints as JSON."""
        found = {name: self.manifest(name) for name in names}
        value = {
            name: {
                "fingerprint": manifest.plan.fingerprint,
                "corpus": readable(str(manifest.plan.corpus["spec"])),
                "license": self._license(name),
                "splits": {
                    split: {count: manifest.total(split, count) for count in _COUNTS}
                    for split in manifest.splits
                },
            }
            for name, manifest in found.items()
        }
        return json.dumps(value, indent=1)


def documents_page(
    place: Mapping[str, Any], config: Mapping[str, Any], documents: Sequence[Sequence[Any]]
) -> str:
    """Returns a page of the documents (`trainer.data.origins.Document`) of a row of a batch."""
    title = f"Batch {place['batch']}, row {place['row']}"
    facts = html_page.facts(((name, _short(value)) for name, value in config.items()), "facts")
    table = html_page.table("Documents", Document._fields, documents)
    return html_page.document(title, {}, "", f"<main>{facts}{table}</main>")


def read_licenses(path: str | None) -> dict[str, str]:
    """Returns pattern -> licence of a TOML file; raises UserError if it has anything else."""
    found = toml_flags.read(pathlib.Path(path)) if path else {}
    for name, text in found.items():
        if not isinstance(text, str):
            raise UserError(f'{path}: {name} must be a text, as in "c4_*" = "odc-by"')
    return found


def _now() -> int:
    return int(time.monotonic() // _FRESH_SECONDS)


@functools.lru_cache(maxsize=4)
def _names(cache_dir: str, _: int) -> tuple[str, ...]:
    if files.exists(files.join(cache_dir, MANIFEST)):
        return (CacheManifest.load(cache_dir, check=False).plan.task,)
    return tuple(cache_names(cache_dir))


@functools.lru_cache(maxsize=16)
def _manifest(folder: str, _: int) -> CacheManifest:
    return CacheManifest.load(folder, check=False)


def _total(manifest: CacheManifest, count: str) -> int:
    return sum(manifest.total(split, count) for split in manifest.splits)


def _words(count: str) -> str:
    return "bytes of text" if count == "text_bytes" else count


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"


def _link(name: str) -> str:
    return f"<a href={html_page.attribute(f'/caches/{name}')}>more</a>"
