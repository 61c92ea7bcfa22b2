"""Exclude lists of tasks of several languages."""

import shutil

import pytest

from pipeline import verify
from tasks.cache.manifest import CacheManifest
from tests.pipeline.annexes.foreign_lists.test_translation import EVERY, TWINS, search
from tests.pipeline.exclusion.named_documents import LANGUAGES, held, write
from tests.pipeline.exclusion.named_documents import build as build

pytestmark = pytest.mark.processes


class Killed(BaseException):
    """Simulates SIGKILL."""


@pytest.mark.parametrize("of", ["dedup", "ids"])
@pytest.mark.parametrize("killed", [False, True])
def test_lists_stay_in_force_for_languages_that_are_built_later(
    build, tmp_path, monkeypatch, of, killed
):
    folder = tmp_path / "c"
    for language in LANGUAGES:
        write(folder, language, TWINS, ids=of == "ids")
    write(tmp_path / "later", "sw", {"sw4": "en1", "sw6": "sw2"}, ids=of == "ids")
    languages = folder / "{language}" / "*.jsonl"
    if of == "dedup":
        shutil.copytree(tmp_path / "later" / "sw", folder / "sw")
        path = search(tmp_path, languages)
        shutil.rmtree(folder / "sw")
        gone = {"sw4", "sw6", "en3", "ro5", "ro7"}
    else:
        path = tmp_path / "ids"
        path.write_text("doc8\n")
        gone = {"en8", "ro8", "sw8"}
    if killed:
        with monkeypatch.context() as patch:
            patch.setattr("pipeline.building.engine.summary.show", lambda *_: _killed())
            with pytest.raises(Killed):
                build(languages, f"--exclude={path}")
    else:
        build(languages, f"--exclude={path}")
    cache_dir = build(languages)
    shutil.copytree(tmp_path / "later" / "sw", folder / "sw")
    build(languages, "--extend")
    everything = EVERY | {f"sw{number}" for number in range(10)}
    if of == "ids":  # whose twins stay
        everything = everything - {*TWINS, "sw4", "sw6"} | {"EN1", "RO2", "EN4", "SW2"}
    assert held(cache_dir) == everything - gone
    assert CacheManifest.load(f"{cache_dir}/x_sw_lm").plan.exclude
    for language in (*LANGUAGES, "sw"):
        assert verify.main([f"--cache={cache_dir}/x_{language}_lm", f"--exclude={path}"]) == 0


def test_lists_of_languages_are_kept_in_one_order(build, tmp_path, checksums):
    for language in LANGUAGES:
        write(tmp_path / "c", language, {})
        (tmp_path / f"c/{language}/data.jsonl").rename(tmp_path / f"c/{language}/{language}.jsonl")
    # The first is of the second language alone.
    given = [tmp_path / "first", tmp_path / "second"]
    given[0].write_text("ro.jsonl:2\n")
    given[1].write_text("en.jsonl:1\nro.jsonl:1\n")
    pattern = tmp_path / "c" / "{language}" / "*.jsonl"
    build(pattern, f"--exclude={given[0]}")
    taken_down = build(pattern, f"--exclude={given[1]}")
    for number, order in enumerate((given, given[::-1])):
        whole = tmp_path / f"whole{number}"
        build(pattern, f"--exclude={order[0]},{order[1]}", cache_dir=whole)
        assert checksums(whole / "x_lm") == checksums(taken_down / "x_lm")


def _killed():
    raise Killed


def test_lists_of_ids_of_version_0_2_0_hold_for_further_languages(build, tmp_path):
    for language in LANGUAGES:
        write(tmp_path / "c", language, {}, ids=True)
    (tmp_path / "ids").write_text("doc8\n")
    languages = tmp_path / "c" / "{language}" / "*.jsonl"
    cache_dir = build(languages, f"--exclude={tmp_path}/ids")
    for path in (cache_dir / "x_lm").iterdir():
        if path.name != "languages.json":
            path.unlink()
    write(tmp_path / "c", "de", {}, ids=True)
    build(languages, "--extend")
    everything = {f"{language}{number}" for language in (*LANGUAGES, "de") for number in range(10)}
    assert held(cache_dir) == everything - {"en8", "ro8", "de8"}
