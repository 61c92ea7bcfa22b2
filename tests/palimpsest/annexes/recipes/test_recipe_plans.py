"""Plans of recipes: what is finished, what is left, and what cannot be read."""

import pytest

from tests.palimpsest.annexes.recipes.test_recipe_runs import TEXTS, ran, refusal
from tests.palimpsest.annexes.recipes.test_recipe_runs import small as small
from tests.trainer.conftest import assert_one_line

pytestmark = pytest.mark.processes


def test_a_plan_knows_what_is_finished_and_what_is_left(small):
    before = ran(small, "--plan")
    assert before.returncode == 0, before.stderr
    assert not (small.parent / "out").exists()
    size = (small.parent / "corpus.txt").stat().st_size / 1e6
    rows = {line.split()[0]: line for line in before.stdout.splitlines()}
    assert f"{size:,.1f}" in rows["vocabulary"]
    assert rows["cache.mine"].split()[1:4] == ["to", "do", str(len(TEXTS))]
    assert rows["cache.mine"].endswith("the rest needs vocabulary")
    assert ran(small, "--only=vocabulary").returncode == 0
    (line,) = (each for each in ran(small, "--plan").stdout.splitlines() if "cache.mine" in each)
    assert line.split()[1:4] == ["to", "do", str(len(TEXTS))]
    assert ran(small).returncode == 0
    after = ran(small, "--plan").stdout
    assert after.count("finished") == 2
    assert_one_line(*refusal(small, "--topology=v5e:4x4"), "no effect without --plan")
    assert_one_line(*refusal(small, "--plan", "--redo"), "leave out --redo")


def test_a_plan_goes_on_without_the_hub_but_not_with_a_mistake(small, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("PALIMPSEST_RETRY_SECONDS", "1")
    stage = '[cache.far]\ntask = "lm"\ncorpus = "{}"\nvocabulary = "bytes"\n'
    small.write_text(stage.format("hf:somebody/texts"))
    planned = ran(small, "--plan")
    assert planned.returncode == 0, planned.stderr
    assert "not read: the Hugging Face Hub cannot be reached" in planned.stdout
    small.write_text(stage.format("text:nowhere.txt"))
    assert_one_line(*refusal(small, "--plan"), "[cache.far]", "nowhere.txt")
