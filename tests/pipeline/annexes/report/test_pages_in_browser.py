"""Pages about caches of hostile text in Chromium: see `make test-browser`."""

import json

import pytest

from pipeline.annexes.report import report
from tasks import annexes
from tests.support.browser import opened

pytestmark = pytest.mark.browser

EVIL = "</script><script>hacked = 1</script><img src=x onerror='hacked = 1'>"
TEXTS = [
    EVIL,
    EVIL,
    "nul\x00 escape\x1b[31m red \x9b csi",
    "\u202e\u2066 right to left \u202bעברית العربية",
    "wide" * 4000,
    *(f"text number {number} of many, with some words" for number in range(60)),
]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    lines = [
        json.dumps({"id": f"{EVIL if number < 3 else ''}{number}", "text": text})
        for number, text in enumerate(TEXTS)
    ]
    (folder / f"{EVIL[:9].replace('/', '')}.jsonl").write_text("\n".join([*lines, "not json"]))
    return folder


@pytest.fixture
def pages(hostile, build, tmp_path):
    cache = build(tmp_path / "cache", f"--corpus=json:{hostile}/*.jsonl?validation=0")
    made = {"report": tmp_path / "report.html"}
    report.main([f"--cache={cache}", f"--output={made['report']}"])
    if inspect := annexes.get("commands.caches", "inspect"):
        made["inspect"] = tmp_path / "inspect.html"
        inspect.main([f"--cache={cache}", f"--output={made['inspect']}"])
    return made


def test_pages_of_hostile_text(browser, pages):
    for name, file in pages.items():
        for width in (390, 1280):
            for dark in (False, True):
                with opened(browser, file, width, dark=dark) as found:
                    assert found.errors == []
                    assert found.requests == []
                    assert found.overflow == 0
                    assert found.page.evaluate("typeof hacked") == "undefined"
                    assert found.page.locator("img, iframe, script[src]").count() == 0
                    assert found.page.locator("canvas").count() == (name == "report")
        assert "\x1b" not in file.read_text()
    shown = pages["report"].read_text()
    assert EVIL not in shown
