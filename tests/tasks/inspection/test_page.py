"""Pages escape their text, and their style and script are installed with the package."""

import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

from tasks.inspection import page

ROOT = pathlib.Path(__file__).parents[3]


def test_text_is_escaped():
    assert page.text("<b>&'\"\x1b\x9b\n\t") == "&lt;b&gt;&amp;&#x27;&quot;␛\ufffd\n\t"
    assert page.attribute('a"b') == '"a&quot;b"'
    made = page.document("<i>", {"one": "<u>"}, head="", body="", interactive=False)
    assert "<title>&lt;i&gt;</title>" in made
    assert "<a href='#one'>&lt;u&gt;</a>" in made
    assert "<script>" not in made


def test_columns_of_numbers_are_flush_right():
    made = page.table("", ("name", "count", "html"), [("1", "2,000", "<b>")], html_last=True)
    assert "<tr><td>1</td><td class=number>2,000</td><td><b></td></tr>" in made
    assert "number" not in page.table("", ("name", "count"), [])


def test_a_wheel_contains_style_and_script(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "tasks", source / "tasks", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    command = [sys.executable, "-c", build, str(tmp_path)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in ("page.css", "page.js"):
            path = f"tasks/inspection/{name}"
            assert archive.read(path) == (ROOT / path).read_bytes()
