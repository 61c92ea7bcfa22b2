"""Rehearsals: of every recipe of the tree, and of recipes with planted mistakes."""

import shutil

import pytest

from tests.support import rehearsals
from tests.support.processes import started


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Returns a folder with what the recipes of the tree read: data sets and a folder."""
    folder = tmp_path_factory.mktemp("rehearsals")
    (folder / "here").mkdir()
    rehearsals.data_sets(folder / "hub")
    rehearsals.folders(folder / "here")
    return folder


@pytest.fixture(scope="module")
def hub(files):
    """Returns the environment of processes that read a local Hub."""
    with rehearsals.hub(files / "hub", files / "home") as environment:
        yield environment


@pytest.mark.slow
@pytest.mark.parametrize("path", rehearsals.RECIPES, ids=lambda path: path.stem)
def test_a_recipe_of_the_tree_is_rehearsed(path, files, hub, capsys):
    shutil.copy(path, files / "here")
    command = ("-m", "palimpsest", "run", path.name, "--rehearse")
    done = started(*command, cwd=files / "here", env=hub)
    assert done.returncode == 0, done.stdout + done.stderr
    (last,) = done.stdout.splitlines()[-1:]
    assert last.startswith(f"rehearsed {path.name} in ")
    with capsys.disabled():
        print(f"\n{last}")
