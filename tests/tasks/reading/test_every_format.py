"""A corpus in a bucket whose requests fail holds the same documents in every format."""

import pathlib

import pytest

from tests.support.corpora import IN_EVERY_FORMAT, in_every_format, read
from tests.support.servers.gcs import GcsServer

pytestmark = [pytest.mark.google, pytest.mark.processes]

# Texts with quotes, line ends, delimiters and other scripts.
TEXTS = {
    f"document {n}": f'Text, "{n}"\nof many\twords: ' + "çà et là, 日本 " * (n % 40)
    for n in range(1500)
}


@pytest.mark.parametrize("form", IN_EVERY_FORMAT)
def test_every_document_is_read_from_a_failing_bucket(in_bucket, tmp_path, form):
    spec = in_every_format(tmp_path, TEXTS)[form]
    path = pathlib.Path(spec.partition(":")[2].partition("?")[0])
    with GcsServer(faults=0.2, seed=4) as gcs:
        in_bucket(gcs)
        gcs.store.put("bucket", f"corpus/{path.name}", path.read_bytes(), {}, {})
        found = read(spec.replace(str(path), f"gs://bucket/corpus/{path.name}"), 20_000)
    assert sorted((row["id"], row["text"]) for row in found) == sorted(TEXTS.items())
