"""Runs of recipes: what is kept and redone, the lock file, plans, rehearsals."""

import json
import os
import shutil
import signal
import sys
import time

import pytest

from palimpsest.annexes.recipes import stage_state
from tests.support.processes import launched, started
from tests.trainer.conftest import assert_one_line

pytestmark = pytest.mark.processes

TEXTS = [f"line {n} of a text about {n % 7} boats and {n % 5} seas" for n in range(400)]
# Vocabularies and caches take seconds; the trainer's stages are in the slow tests.
SMALL = """
[corpus.mine]
corpus = "text:{corpus}"

[vocabulary]
vocab_size = 120

[cache.mine]
task = "span_corruption"
row_tokens = 64
"""


@pytest.fixture
def small(tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(TEXTS))
    path = tmp_path / "small.toml"
    path.write_text(SMALL.format(corpus=corpus))
    return path


def ran(path, *flags):
    return started("-m", "palimpsest", "run", path, f"--folder={path.parent / 'out'}", *flags)


def test_stages_run_once_and_their_lock_says_what_they_made(small):
    first = ran(small)
    assert first.returncode == 0, first.stderr
    lock = small.with_suffix(".lock")
    found = json.loads(lock.read_text())
    assert list(found["stages"]) == ["cache.mine", "vocabulary"]
    (made,) = found["stages"]["cache.mine"]["made"].values()
    assert made["documents"] == len(TEXTS)
    assert found["stages"]["cache.mine"]["flags"]["vocabulary"] == ["{folder}/vocabulary"]
    again = ran(small)
    assert again.stdout.count("finished before") == 2
    before = lock.read_bytes()
    lock.unlink()
    # The commands alone make the same.
    for line in ran(small, "--show").stdout.splitlines():
        words = line.replace(str(small.parent / "out"), str(small.parent / "other")).split()
        assert started("-m", *words).returncode == 0
    here = small.parent / "other" / "cache" / "mine_span_corruption"
    there = small.parent / "out" / "cache" / "mine_span_corruption"
    for name in ("manifest.json", "train.tfrecord-00000-of-00001"):
        assert (here / name).read_bytes() == (there / name).read_bytes()
    assert ran(small).returncode == 0
    assert lock.read_bytes() == before


@pytest.mark.slow
def test_a_longer_run_goes_on_and_what_follows_is_made_again(small):
    text = small.read_text() + (
        '[pretrain]\npreset = "t5_1_1_tiny"\ntrain_steps = 4\nbatch_size = 8\n'
        "lengths = { inputs = 32, targets = 16 }\n[evaluate]\n"
    )
    text = text.replace("row_tokens = 64\n", "")
    small.write_text(text)
    assert ran(small).returncode == 0
    small.write_text(text.replace("train_steps = 4", "train_steps = 6"))
    refused = ran(small)
    words = ("pretrain changed: train_steps was 4, is 6", "evaluate (", "--redo")
    assert_one_line(refused.returncode, refused.stderr.splitlines()[-1], *words)
    assert "pretrain (" not in refused.stderr
    assert ran(small, "--redo").returncode == 0
    lock = small.with_suffix(".lock")
    longer = json.loads(lock.read_text())["stages"]
    assert longer["pretrain"]["made"]["step"] == 6
    # As one that was that long from the beginning.
    folder = small.parent / "second"
    again = started("-m", "palimpsest", "run", small, f"--folder={folder}")
    assert again.returncode == 0, again.stderr
    assert json.loads(lock.read_text())["stages"]["pretrain"] == longer["pretrain"]


def test_a_lock_refuses_other_flags_software_and_results(small):
    missing = ran(small, "--locked")
    assert_one_line(missing.returncode, missing.stderr, "there is no", "small.lock")
    assert ran(small).returncode == 0
    elsewhere = started(
        "-m", "palimpsest", "run", small, f"--folder={small.parent / 'second'}", "--locked"
    )
    assert elsewhere.returncode == 0, elsewhere.stderr
    lock = small.with_suffix(".lock")
    good = json.loads(lock.read_text())
    for change, words in (
        (
            lambda value: value["software"].update(numpy="1.0"),
            ("other software: numpy: 1.0 there",),
        ),
        (
            lambda value: value["stages"]["vocabulary"]["flags"].update(vocab_size=["99"]),
            ("vocabulary has other flags", "vocab_size: ['99'] there, ['120'] here"),
        ),
        (
            lambda value: value["stages"]["vocabulary"]["made"].update(
                {"sentencepiece.model": "0"}
            ),
            ("vocabulary made something else", "sentencepiece.model: 0 there"),
        ),
    ):
        changed = json.loads(json.dumps(good))
        change(changed)
        lock.write_text(json.dumps(changed))
        folder = small.parent / f"third-{len(words[0])}"
        refused = started("-m", "palimpsest", "run", small, f"--folder={folder}", "--locked")
        assert refused.returncode == 2
        assert all(each in refused.stderr for each in words), refused.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_recipe_ends_as_one_never_killed(small, number):
    command = [sys.executable, "-m", "palimpsest", "run", small]
    process = launched([*command, f"--folder={small.parent / 'out'}"])
    time.sleep(1.5)
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode != 0
    done = ran(small)
    assert done.returncode == 0, done.stderr
    lock = small.with_suffix(".lock")
    found = lock.read_bytes()
    lock.unlink()
    assert started(*command[1:], f"--folder={small.parent / 'undisturbed'}").returncode == 0
    assert lock.read_bytes() == found


def test_nothing_outside_the_folder_is_removed(small):
    assert ran(small).returncode == 0
    precious = small.parent / "precious"
    precious.mkdir()
    (precious / "notes.txt").write_text("notes")
    text = small.read_text()
    small.write_text(text.replace("[vocabulary]", f'[vocabulary]\noutput = "{precious}"'))
    assert ran(small, "--redo").returncode == 0  # the old vocabulary is what is removed
    assert (precious / "notes.txt").read_text() == "notes"
    assert not (small.parent / "out" / "vocabulary").exists()
    small.write_text(text)
    refused = ran(small, "--redo")
    assert_one_line(refused.returncode, refused.stderr.splitlines()[-1], str(precious), "yourself")
    assert (precious / "notes.txt").exists()


def test_another_name_of_the_folder_or_a_copy_changes_nothing(small, monkeypatch):
    assert ran(small).returncode == 0
    lock = small.with_suffix(".lock").read_bytes()
    (small.parent / "inner").mkdir()
    for cwd, folder in ((small.parent, "out"), (small.parent / "inner", "../out")):
        done = started("-m", "palimpsest", "run", small, f"--folder={folder}", cwd=cwd)
        assert done.stdout.count("finished before") == 2, done.stderr
    shutil.copytree(small.parent / "out", small.parent / "copy")
    done = started("-m", "palimpsest", "run", small, f"--folder={small.parent / 'copy'}")
    assert done.stdout.count("finished before") == 2
    assert small.with_suffix(".lock").read_bytes() == lock


def test_a_mistake_that_made_nothing_needs_no_redo(small):
    text = small.read_text()
    small.write_text(text.replace("corpus.txt", "corpse.txt"))
    assert ran(small).returncode == 2
    small.write_text(text)
    assert ran(small).returncode == 0


def test_a_rehearsal_removes_only_what_it_made(small):
    empty = small.parent / "keep" / "empty"
    empty.mkdir(parents=True)
    done = started("-m", "palimpsest", "run", small, "--rehearse", f"--folder={empty / 'x' / 'y'}")
    assert done.returncode == 0, done.stderr
    assert list(empty.iterdir()) == []


def test_a_lock_also_holds_for_what_was_finished_and_for_all_its_stages(small):
    assert ran(small).returncode == 0
    lock = small.with_suffix(".lock")
    good = json.loads(lock.read_text())
    good["stages"]["vocabulary"]["made"] = {"sentencepiece.model": "0"}
    lock.write_text(json.dumps(good))
    assert "made something else" in ran(small, "--locked").stderr
    good["stages"]["export"] = good["stages"]["vocabulary"]
    lock.write_text(json.dumps(good))
    assert "the stage export" in ran(small, "--locked").stderr
    lock.write_text('{"format": 1, "stages": []}')
    assert_one_line(*refusal(small, "--locked"), "is not a lock file")
    (small.parent / "out" / ".recipe" / "vocabulary.json").write_text("3")
    assert_one_line(*refusal(small), "vocabulary.json is damaged")


def test_a_lock_with_duplicates_holds_where_the_corpus_lies_elsewhere(tmp_path):
    locks = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "corpus.txt").write_text("\n".join([*TEXTS, *TEXTS]))
        path = tmp_path / name / "it.toml"
        path.write_text('[corpus.a]\ncorpus = "text:corpus.txt"\n[dedup]\nduplicates = "exact"\n')
        done = started("-m", "palimpsest", "run", "it.toml", cwd=path.parent)
        assert done.returncode == 0, done.stderr
        locks.append(json.loads(path.with_suffix(".lock").read_text()))
    assert locks[0] == locks[1]
    assert locks[0]["stages"]["dedup"]["made"]["entries"] == len(TEXTS)


def test_caches_of_languages_are_removed_with_their_stage(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("\n".join(TEXTS))
    path = tmp_path / "two.toml"
    path.write_text(
        "".join(f'[corpus.{name}]\ncorpus = "text:{tmp_path}/{name}.txt"\n' for name in "ab")
        + '[cache.mine]\ntask = "span_corruption"\nvocabulary = "bytes"\nrow_tokens = 64\n'
        "extra_ids = 100\n"
    )
    assert ran(path).returncode == 0
    made = json.loads(path.with_suffix(".lock").read_text())["stages"]["cache.mine"]["made"]
    assert list(made) == ["mine_a_span_corruption", "mine_b_span_corruption"]
    path.write_text(path.read_text().replace("row_tokens = 64", "row_tokens = 32"))
    assert ran(path).returncode == 2
    again = ran(path, "--redo")
    assert again.returncode == 0, again.stderr
    other = json.loads(path.with_suffix(".lock").read_text())["stages"]["cache.mine"]["made"]
    assert other["mine_a_span_corruption"]["rows"] > made["mine_a_span_corruption"]["rows"]


def test_parts_of_a_recipe(small):
    assert_one_line(*refusal(small, "--only=cache.mine"), "needs vocabulary", "not finished")
    assert ran(small, "--until=vocabulary").returncode == 0
    assert ran(small, "--from=cache.mine").returncode == 0
    assert_one_line(*refusal(small, "--only=cache.mini"), "(did you mean cache.mine?)")
    assert_one_line(*refusal(small, "--from=cache.mine", "--until=vocabulary"), "comes after")
    assert_one_line(*refusal(small, "--rehearse", "--from=cache.mine"), "leave out --from")


def refusal(path, *flags):
    done = ran(path, *flags)
    return done.returncode, done.stderr


def test_an_edited_corpus_is_noticed_and_a_touched_one_is_not(small):
    corpus = small.parent / "corpus.txt"
    assert ran(small).returncode == 0
    text = corpus.read_text()
    corpus.write_text(text)  # the same bytes at another time
    assert ran(small).stdout.count("finished before") == 2
    corpus.write_text(text.replace("boats", "ships"))
    refused = ran(small)
    assert refused.stdout.count("corpus.txt was edited") == 2
    assert_one_line(refused.returncode, refused.stderr, "vocabulary (", "cache.mine (", "--redo")
    lock = small.with_suffix(".lock")
    before = json.loads(lock.read_text())["stages"]["cache.mine"]["made"]["mine_span_corruption"]
    assert ran(small, "--redo").returncode == 0
    after = json.loads(lock.read_text())["stages"]["cache.mine"]["made"]["mine_span_corruption"]
    assert before["corpus"]["files"] == after["corpus"]["files"] == 1
    assert before["corpus"]["sha256"] != after["corpus"]["sha256"]
    corpus.unlink()  # deleted after use
    assert ran(small).stdout.count("finished before") == 2


def test_a_new_file_of_a_corpus_is_noticed(small):
    small.write_text(small.read_text().replace("corpus.txt", "*.txt"))
    assert ran(small).returncode == 0
    (small.parent / "more.txt").write_text("more\n")
    assert "more.txt is new" in ran(small).stdout


def test_the_account_says_what_was_used_and_left_out(small):
    assert ran(small).returncode == 0
    account = (small.parent / "out" / "RECIPE.md").read_text()
    made = json.loads(small.with_suffix(".lock").read_text())["stages"]["cache.mine"]["made"]
    (cache,) = made.values()
    (row,) = (line for line in account.splitlines() if "mine_span_corruption |" in line)
    for value in (f"{cache['tokens']:,}", cache["sha256"][:12], cache["corpus"]["sha256"][:12]):
        assert value in row
    assert "palimpsest run small.toml --folder=OTHER --locked" in account
    assert small.read_text().strip() in account


def test_a_rehearsal_leaves_out_the_runner_and_its_flags(small):
    more = 'row_tokens = 64\nrunner = "DataflowRunner"\nproject = "p"\nregion = "r"'
    small.write_text(small.read_text().replace("row_tokens = 64", more))
    done = ran(small, "--rehearse")
    assert done.returncode == 0, done.stderr
    assert "--project=p" in ran(small, "--show").stdout


def test_the_name_of_the_folder_is_replaced_only_where_it_is_the_folder(small):
    locks = []
    for folder in ("t", "span"):  # letters of other values
        command = ["-m", "palimpsest", "run", small.name, f"--folder={folder}"]
        done = started(*command, cwd=small.parent)
        assert done.returncode == 0, done.stderr
        locks.append(small.with_suffix(".lock").read_bytes())
    assert locks[0] == locks[1]


def test_a_part_or_another_folder_keeps_the_rest_of_the_lock(small):
    assert ran(small).returncode == 0
    lock = small.with_suffix(".lock")
    whole = lock.read_bytes()
    command = ["-m", "palimpsest", "run", small, f"--folder={small.parent / 'other'}"]
    assert started(*command, "--only=vocabulary").returncode == 0
    assert lock.read_bytes() == whole
    assert started(*command, "--only=vocabulary", "--locked").returncode == 0
    # What depends on another vocabulary does not stay.
    small.write_text(small.read_text().replace("vocab_size = 120", "vocab_size = 110"))
    folder = f"--folder={small.parent / 'third'}"
    assert started(*command[:-1], folder, "--only=vocabulary").returncode == 0
    assert list(json.loads(lock.read_text())["stages"]) == ["vocabulary"]
    refused = started(*command[:-1], folder, "--locked")
    assert_one_line(refused.returncode, refused.stderr, "has no stage cache.mine")


@pytest.mark.parametrize(
    ("place", "inside"),
    [
        ("out/a", True),
        ("out/a/../b/", True),
        ("out", False),
        ("out/", False),
        ("out/../a", False),
        ("other/a", False),
        ("gs://b/out/a", False),
    ],
)
def test_places_inside_a_folder(place, inside):
    assert stage_state.is_inside(place, "out") == inside
    if not place.startswith("gs:"):
        assert stage_state.is_inside(f"gs://b/{place}", "gs://b/out") == inside


def test_what_was_there_before_is_not_removed(small):
    (folder := small.parent / "out" / "vocabulary").mkdir(parents=True)
    (folder / "notes.txt").write_text("notes")
    assert ran(small).returncode == 0
    small.write_text(small.read_text().replace("vocab_size = 120", "vocab_size = 110"))
    assert_one_line(*refusal(small, "--redo"), str(folder), "yourself: it was there before")
    assert (folder / "notes.txt").exists()


def test_a_lock_that_is_a_folder_is_no_lock(small):
    small.with_suffix(".lock").mkdir()
    assert_one_line(*refusal(small, "--locked"), "there is no file", "small.lock")
