"""The tests' server follows the rules of Cloud Storage that its clients rely on."""

import json
import urllib.error
import urllib.request

import pytest

from tests.support.servers.gcs import GcsServer
from tests.support.servers.gcs_http import PART_BYTES

pytestmark = pytest.mark.processes


@pytest.fixture
def gcs():
    with GcsServer() as server:
        yield server


def ask(gcs, method, path, body=None, **headers):
    """Sends a request; returns (status, headers, body)."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(gcs.url + path, body, names, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def put(gcs, name, data=b"", **query):
    more = "".join(f"&{key}={value}" for key, value in query.items())
    path = f"/upload/storage/v1/b/bucket/o?uploadType=media&name={name}{more}"
    return ask(gcs, "POST", path, data)[0]


def names(gcs, **query):
    """Lists the bucket; returns (objects and folders, number of pages)."""
    found, pages, token = [], 0, ""
    while pages == 0 or token:
        asked = "&".join(f"{key}={value}" for key, value in query.items())
        page = f"&pageToken={token}" if token else ""
        status, _, body = ask(gcs, "GET", f"/storage/v1/b/bucket/o?{asked}{page}")
        assert status == 200
        answer = json.loads(body)
        found += [item["name"] for item in answer.get("items", [])] + answer.get("prefixes", [])
        pages, token = pages + 1, answer.get("nextPageToken")
    return found, pages


def test_an_object_is_written_only_if_its_precondition_holds(gcs):
    assert put(gcs, "a", b"one", ifGenerationMatch=0) == 200
    assert put(gcs, "a", b"two", ifGenerationMatch=0) == 412
    generation = gcs.store.buckets["bucket"]["a"].resource["generation"]
    assert put(gcs, "a", b"three", ifGenerationMatch=generation) == 200
    assert put(gcs, "a", b"four", ifGenerationMatch=generation) == 412
    assert gcs.read("a") == b"three"
    assert ask(gcs, "DELETE", f"/b/bucket/o/a?ifGenerationMatch={generation}")[0] == 412
    assert ask(gcs, "GET", f"/b/bucket/o/a?generation={generation}")[0] == 404
    assert ask(gcs, "DELETE", "/b/bucket/o/a")[0] == 204
    assert ask(gcs, "DELETE", "/b/bucket/o/a")[0] == 404


def test_a_listing_has_pages_folders_and_bounds(gcs):
    for name in ("a/1", "a/2", "a/b/3", "a/b/", "c", "d/"):
        assert put(gcs, name) == 200
    assert names(gcs) == (["a/1", "a/2", "a/b/", "a/b/3", "c", "d/"], 1)
    assert names(gcs, maxResults=2) == (["a/1", "a/2", "a/b/", "a/b/3", "c", "d/"], 3)
    assert names(gcs, prefix="a/", delimiter="/")[0] == ["a/1", "a/2", "a/b/"]
    assert names(gcs, prefix="a/b/", delimiter="/")[0] == ["a/b/", "a/b/3"]
    assert names(gcs, startOffset="a/2", endOffset="c")[0] == ["a/2", "a/b/", "a/b/3"]
    assert ask(gcs, "GET", "/storage/v1/b/none/o")[0] == 404


def test_an_upload_in_parts_appears_with_its_last_byte(gcs):
    begin = "/upload/storage/v1/b/bucket/o?uploadType=resumable&name=a"
    place = ask(gcs, "POST", begin)[1]["Location"].removeprefix(gcs.url)
    data = bytes(range(256)) * (PART_BYTES // 128)
    half = len(data) // 2
    short = ask(gcs, "PUT", place, data[:100], Content_Range=f"bytes 0-99/{len(data)}")
    assert short[0] == 400
    first = f"bytes 0-{half - 1}/{len(data)}"
    for _ in range(2):  # repeated, as after a lost response
        status, headers, _ = ask(gcs, "PUT", place, data[:half], Content_Range=first)
        assert (status, headers["Range"]) == (308, f"bytes=0-{half - 1}")
    assert gcs.names() == []
    for _ in range(2):
        rest = f"bytes {half}-{len(data) - 1}/{len(data)}"
        assert ask(gcs, "PUT", place, data[half:], Content_Range=rest)[0] == 200
    assert gcs.read("a") == data
