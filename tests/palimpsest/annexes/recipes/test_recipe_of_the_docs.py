"""The recipe of docs/recipes.md, on files as it names them."""

import csv
import json
import random
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.processes import ROOT, started

WORDS = {
    "en": "the sea is calm and our boat goes out before the sun is up again",
    "ro": "marea este lină și barca noastră iese înainte ca soarele să răsară iar",
    "hu": "a tenger nyugodt és a hajónk kifut mielőtt a nap újra felkel ma",
}
# What makes it small enough for a test.
SMALLER = {
    "vocab_size = 32000": "vocab_size = 100",
    "workers = 8": "workers = 2",
    "t5_1_1_small": "t5_1_1_tiny",
    "train_steps = 100000": "train_steps = 6\nbatch_size = 8",
}


def recipe_text():
    (text,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/recipes.md").read_text(), re.DOTALL)
    return text


def texts_of(language, count, seed):
    drawn = random.Random(f"{language} {seed}")
    return [" ".join(drawn.choices(WORDS[language].split(), k=60)) for _ in range(count)]


@pytest.mark.slow
def test_the_recipe_of_the_docs_runs(tmp_path):
    text = recipe_text()
    assert len(text.splitlines()) < 40
    for before, after in SMALLER.items():
        assert before in text
        text = text.replace(before, after)
    (tmp_path / "mine.toml").write_text(text)
    english, romanian, hungarian = (texts_of(name, 300, 0) for name in WORDS)
    tested = english[:10]
    shared = texts_of("ro", 5, 1)  # the same documents in two of the sources
    for folder in ("news", "carti"):
        (tmp_path / folder).mkdir()
    lines = [json.dumps({"body": each}) for each in [*english, *shared]]
    (tmp_path / "news" / "a.jsonl").write_text("\n".join(lines))
    pq.write_table(pa.table({"content": [*romanian, *shared]}), tmp_path / "carti" / "a.parquet")
    with (tmp_path / "wiki.csv").open("w", encoding="utf-8") as file:
        csv.writer(file).writerows([["id", "txt"], *enumerate(hungarian)])
    test = [json.dumps({"text": each}) for each in tested]
    (tmp_path / "test.jsonl").write_text("\n".join(test))
    done = started("-m", "palimpsest", "run", "mine.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    stages = json.loads((tmp_path / "mine.lock").read_text())["stages"]
    caches = stages["cache.mine"]["made"]
    assert {name: each["documents"] for name, each in caches.items()} == {
        "mine_en_span_corruption": 305 - len(tested),
        "mine_ro_span_corruption": 300,  # the first of two sources keeps a document
        "mine_hu_span_corruption": 300,
    }
    config = json.loads((tmp_path / "mine" / "export" / "pretrain" / "config.json").read_text())
    assert config["vocab_size"] >= 200
    card = (tmp_path / "mine" / "export" / "pretrain" / "README.md").read_text()
    assert 'license: "apache-2.0"' in card
    assert "mine_hu_span_corruption" in card
    # Elsewhere, the lock holds from the corpora to the export.
    second = ("--folder=second", "--locked")
    again = started("-m", "palimpsest", "run", "mine.toml", *second, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
