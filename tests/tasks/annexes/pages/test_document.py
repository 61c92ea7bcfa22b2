"""Pages escape their text, and their style and script are installed with the package."""

import base64
import hashlib
import pathlib
import re

from tasks.annexes.pages import document as page

FOLDER = pathlib.Path(page.__file__).parent
ASSETS = sorted(
    path.name for path in FOLDER.iterdir() if path.suffix in (".css", ".js", ".LICENSE")
)


def test_text_is_escaped():
    assert page.text("<b>&'\"\x1b\x9b\n\t") == "&lt;b&gt;&amp;&#x27;&quot;␛\ufffd\n\t"
    assert page.attribute('a"b') == '"a&quot;b"'
    assert page.text("a\ud800b") == "a\ufffdb"
    made = page.document("<i>", {"one": "<u>"}, head="", body="")
    assert "<title>&lt;i&gt;</title>" in made
    assert "<a href='#one'>&lt;u&gt;</a>" in made
    assert "<script>" not in made


def test_a_page_allows_its_own_scripts_and_nothing_else():
    made = page.document("t", {}, head="", body="", tokens=True, charts="{}")
    policy = re.search(r'Content-Security-Policy content="([^"]+)"', made)[1]
    assert "default-src 'none'" in policy
    scripts = re.findall(r"<script>(.*?)</script>", made, re.DOTALL)
    assert len(scripts) == 3
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert "script-src 'none'" in page.document("t", {}, head="", body="")


def test_uplot_is_the_release_that_its_origin_names():
    origin = (FOLDER / "ORIGIN.md").read_text()
    known = dict(reversed(line.split()) for line in re.findall(r"[0-9a-f]{64}  uPlot\S+", origin))
    assert set(known) == {name for name in ASSETS if name.startswith("uPlot")}
    for name, digest in known.items():
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == digest
    (version,) = re.findall(r"`uplot` ([\d.]+)", origin)
    assert f"(v{version})" in (FOLDER / "uPlot.iife.min.js").read_text()[:80]


def test_columns_of_numbers_are_flush_right():
    made = page.table("", ("name", "count", "html"), [("1", "2,000", "<b>")], html_last=True)
    assert "<tr><td>1</td><td class=number>2,000</td><td><b></td></tr>" in made
    assert "number" not in page.table("", ("name", "count"), [])
