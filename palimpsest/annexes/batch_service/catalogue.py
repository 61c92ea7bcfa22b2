"""Pages about the caches of a folder: a list, each cache's counts, and some of its windows."""

import functools
import json
import time

from tasks import registry
from tasks.annexes.inspecting import show
from tasks.annexes.inspecting.inspect import samples
from tasks.annexes.pages import document as html_page
from tasks.cache.cache import Cache
from tasks.cache.manifest import MANIFEST, CacheManifest, cache_names
from tasks.objectives import Lengths
from tasks.reading.corpus import readable
from tasks.storage import files
from tasks.terminal.command_line import UserError

# Seconds for which a list of caches, or a manifest, is not read again.
_FRESH_SECONDS = 30
# Windows on a page, and characters of a value on it.
_WINDOWS, _LONGEST_VALUE = 5, 200
_COUNTS = ("documents", "tokens", "text_bytes", "rows")


class Catalogue:
    """The finished caches in a folder, or the folder's own."""

    def __init__(self, cache_dir: str, task_module: str | None = None):
        self._cache_dir, self._task_module = cache_dir, task_module

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
        header = ("cache", "corpus", "packing", *map(_words, _COUNTS), "")
        rows = [(name, *self._row(name), _link(name)) for name in names]
        table = html_page.table("Caches", header, rows, html_last=True)
        return html_page.document("Caches", {}, "", f"<main>{table}</main>")

    def _row(self, name: str) -> tuple[str, ...]:
        manifest = self.manifest(name)
        counts = (f"{_total(manifest, count):,}" for count in _COUNTS)
        return readable(str(manifest.plan.corpus["spec"])), manifest.plan.packing, *counts

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
            "packing": plan.packing,
            "tokens in a row": plan.row_tokens,
            "vocabulary": plan.vocabulary.sha256,
            **{f"corpus: {key}": _short(value) for key, value in plan.corpus.items() if value},
            **{f"software: {key}": value for key, value in manifest.software.items()},
        }
        body = f"<main>{splits}{html_page.facts(made.items(), 'facts')}</main>"
        link = f"<p><a href='/caches/{name}/windows'>some windows</a></p>"
        return html_page.document(f"Cache {name}", {}, link, body)

    def windows_page(self, name: str, seed: int) -> str:
        """Returns a page of windows that `seed` draws, as `palimpsest inspect` shows them."""
        cache = Cache.open(self.folder(name))
        task = registry.find(name, self._task_module)
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
                "splits": {
                    split: {count: manifest.total(split, count) for count in _COUNTS}
                    for split in manifest.splits
                },
            }
            for name, manifest in found.items()
        }
        return json.dumps(value, indent=1)


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
