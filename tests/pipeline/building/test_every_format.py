"""A corpus gives the same cache in every format, on a disk or in a bucket that fails."""

import pathlib

import pytest

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
