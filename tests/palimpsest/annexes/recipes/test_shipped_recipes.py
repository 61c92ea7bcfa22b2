"""Recipes by name: `palimpsest recipes`, and `palimpsest run NAME` in any folder."""

import json
import tomllib

import pytest

from palimpsest.annexes.recipes import recipe, shipped
from tasks.terminal.command_line import UserError
from tests.palimpsest.test_palimpsest import ended
from tests.support.processes import ROOT, started

FILES = {path.stem: path for path in ROOT.glob("recipes/*.toml")}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_list_has_every_recipe_with_its_title(here, capsys):
    assert ended("recipes") == 0
    lines = capsys.readouterr().out.splitlines()
    for name, path in FILES.items():
        title = tomllib.loads(path.read_text())["recipe"]["title"]
        assert [line for line in lines if line.split()[:1] == [name] and line.endswith(title)]
    assert len(lines) == len(FILES) + 2


def test_a_copy_is_the_recipe_and_replaces_nothing(here, capsys):
    assert ended("recipes", "--copy=march_v1") == 0
    file = here / "march_v1.toml"
    assert file.read_bytes() == FILES["march_v1"].read_bytes()
    file.write_text("edited")
    assert ended("recipes", "--copy=march_v1") == 2
    assert "march_v1.toml is here already: move it" in capsys.readouterr().err
    assert file.read_text() == "edited"
    assert ended("recipes", "--copy=marsh_v1") == 2
    assert "no recipe marsh_v1 (did you mean march_v1?)" in capsys.readouterr().err
    assert ended("recipes", "--copy=DEMO.toml") == 2
    assert "no recipe DEMO.toml (did you mean demo?)" in capsys.readouterr().err
    assert ended("recipes", "--copy=") == 2
    assert "--copy= names no recipe" in capsys.readouterr().err


def test_a_recipe_by_name_is_that_of_its_file_in_the_current_folder(here):
    for name, path in FILES.items():
        by_name, by_path = recipe.read(name), recipe.read(str(path))
        assert (by_name.stages, by_name.text) == (by_path.stages, by_path.text)
        assert by_name.folder == name


def test_a_recipe_of_a_wheel_comes_before_a_neighbour_of_the_packages(here, monkeypatch):
    (here / "palimpsest/annexes/recipes/files").mkdir(parents=True)
    (here / "recipes").mkdir()
    (here / "palimpsest/annexes/recipes/files/other.toml").touch()
    (here / "recipes/foreign.toml").touch()
    monkeypatch.setattr(shipped, "__file__", str(here / "palimpsest/annexes/recipes/shipped.py"))
    assert [*shipped.files.__wrapped__()] == ["other"]


@pytest.mark.parametrize("name", ["demo", "demo.toml"])
def test_a_file_of_the_same_name_is_not_passed_over(here, name):
    (here / name).write_text((ROOT / "recipes/march_v1.toml").read_text())
    with pytest.raises(UserError, match=f"and {name} is also a file here: give ./{name} to run"):
        recipe.read("demo")
    assert recipe.read(f"./{name}", "out").head["title"] == "MARCH V1"


def test_a_folder_of_that_name_is_where_the_results_go(here):
    (here / "demo").mkdir()
    assert recipe.read("demo").folder == "demo"


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("dmeo", r"there is no recipe dmeo \(did you mean demo\?\); palimpsest recipes lists them"),
        ("mine", r"there is no recipe mine \(did you mean mine.toml\?\)"),
        ("other.toml", "other.toml: no such file"),
        ("./demo", r"no file \./demo; palimpsest run demo runs Palimpsest's recipe"),
        ("recipes/march_v1.toml", "palimpsest run march_v1 runs"),
        ("DEMO", r"did you mean demo\?"),
    ],
)
def test_other_words(here, word, says):
    (here / "mine.toml").touch()
    with pytest.raises(UserError, match=says):
        recipe.read(word)


def test_a_folder_that_checkpoints_cannot_use_is_refused_before_any_stage(here, monkeypatch):
    with pytest.raises(UserError, match=r"\[pretrain\]: --model_dir=q\[1\]/model: checkpoints"):
        recipe.read("demo", "q[1]")
    (here / "w[1]").mkdir()
    monkeypatch.chdir(here / "w[1]")
    with pytest.raises(UserError, match=r"--model_dir=demo/model, which is .*w\[1\]/demo/model: "):
        recipe.read("demo")


def test_a_file_without_a_suffix_is_still_a_recipe(here):
    (here / "mine").write_text((ROOT / "recipes/demo.toml").read_text())
    assert recipe.read("mine", "out").text


@pytest.mark.processes
def test_a_run_by_name_writes_to_the_current_folder(here):
    done = started("-m", "palimpsest", "run", "demo", "--only=vocabulary", cwd=here)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in here.iterdir()} == {"demo", "demo.lock"}
    assert [*json.loads((here / "demo.lock").read_text())["stages"]] == ["vocabulary"]
    assert "`palimpsest run demo --folder=OTHER --locked`" in (here / "demo/RECIPE.md").read_text()
    again = started("-m", "palimpsest", "run", "demo", "--only=vocabulary", "--locked", cwd=here)
    assert again.stdout.startswith("vocabulary: finished before"), again.stderr
