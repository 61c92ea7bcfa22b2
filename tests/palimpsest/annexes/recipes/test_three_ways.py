"""The three ways of docs/README.md, as they stand there, make the same model."""

import re
import shlex
import sys

import pytest

from tests.support.processes import ROOT, completed
from tests.support.same_demo import state

# What makes it small enough for a test.
SMALLER = {
    "train_steps=3600": "train_steps=4",
    "train_steps = 3600": "train_steps = 4",
    "palimpsest run demo": "palimpsest run demo.toml",
}


def smaller(text):
    for before, after in SMALLER.items():
        text = text.replace(before, after)
    return text


def ran(words, folder):
    done = completed([sys.executable, *words], cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_three_ways_lead_to_the_same_model(tmp_path):
    page = (ROOT / "docs/README.md").read_text().replace("\\\n", " ")
    recipe, commands, code = re.split(r"^\*\*", page.partition("## Pages")[0], flags=re.M)[1:]
    (folder := tmp_path / "recipe").mkdir()
    text = (ROOT / "recipes/demo.toml").read_text()
    assert "train_steps = 3600" in text
    (folder / "demo.toml").write_text(smaller(text))
    filled = {}
    for name, section in (("recipe", recipe), ("commands", commands)):
        (folder := tmp_path / name).mkdir(exist_ok=True)
        lines = re.findall(r"^    (palimpsest .+)$", section, re.MULTILINE)
        assert lines
        for line in lines:
            filled[name] = ran(["-m", *shlex.split(smaller(line))], folder)
    (folder := tmp_path / "python").mkdir()
    (block,) = re.findall(r"```python\n(.*?)```", code, re.DOTALL)
    (folder / "three.py").write_text(smaller(block))
    filled["python"] = ran(["three.py"], folder)
    assert len(set(filled.values())) == 1, filled
    assert filled["recipe"].endswith("False otherwise (not reliable!).")
    first, *others = (state(str(tmp_path / name / "demo" / "model")) for name in filled)
    for other in others:
        assert all((mine == theirs).all() for mine, theirs in zip(first, other, strict=True))
