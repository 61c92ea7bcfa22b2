"""A corpus gives the same cache in every format, on a disk or in a bucket that fails."""

import hashlib
import json
import pathlib
import shutil

import pytest

from tasks.reading import sources
from tests.support import corpora as made
from tests.support.corpora import IN_EVERY_FORMAT
from tests.support.servers.gcs import GcsServer

pytestmark = pytest.mark.processes

FORMATS = IN_EVERY_FORMAT


@pytest.fixture(scope="module")
def texts():
    """Returns texts by id, with quotes, line ends, delimiters and other scripts."""
    return {
        f"document {n}": f'Text, "{n}"\nof many\twords: ' + "çà et là, 日本 " * (n % 40)
        for n in range(1500)
    }


@pytest.fixture(scope="module")
def corpora(texts, tmp_path_factory):
    return made.in_every_format(tmp_path_factory.mktemp("corpora"), texts)


def option(spec: str, more: str) -> str:
    return spec + ("" if spec.endswith("&") else "?") + more


def read(spec: str) -> dict[str, str]:
    found = [(row["id"], row["text"]) for row in made.read(spec, 20_000)]
    assert len(found) == len(dict(found))
    return dict(found)


@pytest.mark.google
@pytest.mark.parametrize("form", FORMATS)
def test_every_document_is_read_from_a_failing_bucket(corpora, texts, in_bucket, form):
    path = pathlib.Path(corpora[form].partition(":")[2].partition("?")[0])
    with GcsServer(faults=0.2, seed=4) as gcs:
        in_bucket(gcs)
        gcs.store.put("bucket", f"corpus/{path.name}", path.read_bytes(), {}, {})
        assert read(corpora[form].replace(str(path), f"gs://bucket/corpus/{path.name}")) == texts


@pytest.mark.google
def test_a_saved_data_set_in_a_bucket_is_read(texts, in_bucket, tmp_path):
    import datasets

    rows = {"id": list(texts)[:50], "text": list(texts.values())[:50]}
    whole = datasets.DatasetDict(train=datasets.Dataset.from_dict(rows))
    whole.save_to_disk(tmp_path / "saved", num_shards={"train": 3})
    with GcsServer(faults=0.1, seed=5) as gcs:
        in_bucket(gcs)
        for path in (tmp_path / "saved").rglob("*"):
            if path.is_file():
                name = f"corpus/saved/{path.relative_to(tmp_path / 'saved')}"
                gcs.store.put("bucket", name, path.read_bytes(), {}, {})
        assert read("arrow:gs://bucket/corpus/saved") == dict(list(texts.items())[:50])


def tokens(cache: pathlib.Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(cache.iterdir())
        if path.name.startswith(("train.", "validation.")) and "receipt" not in path.name
    }


@pytest.fixture(scope="module")
def one_piece():
    """Makes files that can be cut be one piece, as those are that cannot."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tasks.reading.cutting._LEAST_PIECES", 1)
        yield


@pytest.fixture(scope="module")
def of_json(one_piece, build, corpora, tmp_path_factory):
    """Returns the shards of a cache of one shard, built of JSON lines."""
    spec = option(corpora["json"], "validation=0.1")
    folder = tmp_path_factory.mktemp("json")
    return tokens(build(folder, f"--corpus={spec}", "--shard_bytes=100000000"))


@pytest.mark.parametrize("form", made.known("csv", "arrow stream", "wet"))
def test_a_cache_is_the_same_in_every_format(one_piece, build, corpora, of_json, tmp_path, form):
    spec = option(corpora[form], "validation=0.1")
    cache = build(tmp_path, f"--corpus={spec}", "--shard_bytes=100000000")
    assert tokens(cache) == of_json
    record = json.loads((cache / "manifest.json").read_text())["plan"]["corpus"]
    assert sources.parse(record["spec"]).kind == spec.partition(":")[0]
    shutil.rmtree(cache)
