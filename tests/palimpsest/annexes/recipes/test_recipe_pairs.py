"""Pairs of a recipe are held against the lengths of its runs as soon as their cache is there."""

import json

import pytest

from tests.palimpsest.annexes.recipes.test_recipe_runs import TEXTS, ran
from tests.palimpsest.annexes.recipes.test_recipe_runs import small as small
from tests.trainer.conftest import assert_one_line

pytestmark = pytest.mark.processes

PAIRS = """
[corpus.qa]
corpus = "json:{corpus}?inputs={{q}}&targets={{a}}"

[vocabulary]
vocab_size = 120
corpora = ["mine"]

[corpus.mine]
corpus = "text:{texts}"

[cache.mine]
task = "span_corruption"
corpora = ["mine"]

[cache.qa]
task = "supervised"
corpora = ["qa"]

[pretrain]
preset = "t5_1_1_tiny"
lengths.inputs = 32
lengths.targets = 16

[finetune.qa]
lengths.inputs = 24
lengths.targets = 24
"""


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("", "--lengths.inputs=512 holds 511"),
        ("lengths.inputs = 2048\n", "--lengths.targets=512 holds 511"),
    ],
)
def test_lengths_that_a_run_leaves_out_are_the_tasks(small, given, says):
    pairs = small.parent / "qa.jsonl"
    rows = [{"q": text, "a": "boats"} for text in TEXTS]
    rows[300] = {side: TEXTS[0] * 60 for side in "qa"}
    pairs.write_text("\n".join(map(json.dumps, rows)))
    recipe = PAIRS.format(corpus=pairs, texts=small.parent / "corpus.txt")
    both = "lengths.inputs = 24\nlengths.targets = 24\n"
    small.write_text(recipe.replace(both, given))
    done = ran(small, "--until=cache.qa")
    line = done.stderr.splitlines()[-1]
    assert_one_line(done.returncode, line, "[finetune.qa]", "qa_supervised has", says)


def test_a_pair_that_is_too_long_is_named_before_any_training(small):
    pairs = small.parent / "qa.jsonl"
    rows = [{"q": text, "a": "boats"} for text in TEXTS]
    rows[300]["q"] *= 3
    pairs.write_text("\n".join(map(json.dumps, rows)))
    recipe = PAIRS.format(corpus=pairs, texts=small.parent / "corpus.txt")
    small.write_text(recipe)
    done = ran(small, "--until=cache.qa")
    line = done.stderr.splitlines()[-1]
    words = ("[finetune.qa]", "qa_supervised has inputs of up to", "--lengths.inputs=24 holds 23")
    assert_one_line(done.returncode, line, *words)
    assert not (small.parent / "out/model").exists()
    # The cache is kept; a run that cuts long pairs has nothing against it.
    small.write_text(f'{recipe}objective = ["too_long=cut"]\n')
    done = ran(small, "--until=cache.qa")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished before") == 3
