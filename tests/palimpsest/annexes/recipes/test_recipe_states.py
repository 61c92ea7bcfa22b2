"""States of a recipe's stages: damaged products and records, changed keys, and what is removed.

Vocabularies and caches are real; runs and what reads them write the files that are looked at.
"""

import json
import pathlib
import shutil

import pytest

from palimpsest.annexes.recipes import account, products, recipe, running, stage_state, writable
from palimpsest.annexes.recipes import run as command
from palimpsest.annexes.recipes.recipe import Stage
from palimpsest.commands import COMMANDS
from tasks import annexes
from tasks.storage import files, seal
from tasks.terminal.command_line import UserError
from tests.support import in_process

TEXT = """
[corpus.mine]
corpus = "text:corpus.txt"
[vocabulary]
vocab_size = 120
[cache.mine]
task = "span_corruption"
[pretrain]
train_steps = 6
[evaluate]
[export]
license = "mit"
"""
# The annex t5x may be missing.
T5X = '[export.t5x]\ncommand = "export_t5x"\n' if "export_t5x" in COMMANDS else ""
TEXTS = [f"line {n} of a text about {n % 7} boats and {n % 5} seas" for n in range(300)]
METRICS = {"checkpoints": {"6": {"validation": {"loss": 1.0}}}}


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))


def ended(name, flags):
    """Writes what a stage's command writes, and returns its exit code."""
    place = pathlib.Path(flags["model_dir"])
    output = pathlib.Path(flags.get("output", place))
    if name == "pretrain":
        described = {"config": {}, "cache_fingerprints": {}, "checksums": {"a": "b"}}
        write(place / "checkpoint_6/run/metadata", seal.sealed(described))
        write(place / "checkpoint_6/state/d/values", "values")
        write(place / "config.json", {})
    elif name == "evaluate":
        write(place / "evaluation.json", METRICS)
    elif output.exists():
        return 2
    elif name == "export":
        write(output / "model.safetensors", "weights")
        write(output / "README.md", "card")
    else:
        write(output / "checkpoint_6/state/_METADATA", {})
        write(output / "checkpoint_6/state/d/values", "values")
    return 0


class Process:
    """A stage's command in this process."""

    def __init__(self, words):
        name, *rest = words
        while name not in COMMANDS:
            name = f"{name} {rest.pop(0)}"
        flags = dict(each.removeprefix("--").split("=", 1) for each in rest)
        if name in ("build", "vocab train"):
            modules = {"build": "pipeline.build", "vocab train": "vocab.train"}
            self.code = in_process.run(modules[name], *rest).returncode
        else:
            self.code = ended(name, flags)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    monkeypatch.setattr(running.child, "command", lambda _, words: words)
    monkeypatch.setattr(running.subprocess, "Popen", Process)
    monkeypatch.setattr(running, "waited", lambda process: process.code)
    monkeypatch.setattr(account, "_training", lambda _: [])  # reads a real run


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Returns a folder with a finished recipe."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "corpus.txt").write_text("\n".join(TEXTS))
    (folder / "it.toml").write_text(TEXT + T5X)
    with pytest.MonkeyPatch.context() as patch:
        in_this_process.__wrapped__(patch)
        patch.chdir(folder)
        assert run("it.toml") == 0
    return folder


@pytest.fixture
def here(whole, tmp_path, monkeypatch):
    folder = tmp_path / "here"
    shutil.copytree(whole, folder)
    monkeypatch.chdir(folder)
    return folder


def run(*words):
    return command.main([*words])


def states():
    return {name: each.word for name, each in stage_state.states(recipe.read("it.toml")).items()}


def test_all_stages_are_finished_and_an_export_for_t5x_is_one(here, capsys):
    assert set(states().values()) == {stage_state.FINISHED}
    lock = (here / "it.lock").read_bytes()
    assert run("it.toml") == 0
    assert capsys.readouterr().out.count("finished before") == (6 if T5X else 5)
    assert (here / "it.lock").read_bytes() == lock
    text = (here / "it.toml").read_text()
    (here / "it.toml").write_text(text.replace("= 120", "= 120\nworkers = 2"))  # harmless
    assert set(states().values()) == {stage_state.FINISHED}
    assert not T5X or "checkpoint_6" in json.loads(lock)["stages"]["export.t5x"]["made"]


@pytest.mark.parametrize(
    "name", ["train.rows-00000-of-00001.npy", "COMPLETED", "train.tfrecord-00000-of-00001"]
)
def test_a_cache_without_a_file_is_built_again(here, name):
    path = here / "it/cache/mine_span_corruption" / name
    before = path.read_bytes()
    path.unlink()
    assert states()["cache.mine"] == stage_state.TODO
    lock = (here / "it.lock").read_bytes()
    assert run("it.toml", "--locked") == 0
    assert path.read_bytes() == before
    assert states()["cache.mine"] == stage_state.FINISHED
    assert (here / "it.lock").read_bytes() == lock
    path.write_bytes(before[:-1])  # as an interrupted copy
    assert states()["cache.mine"] == stage_state.TODO or not before


@pytest.mark.parametrize(
    ("name", "stage", "word"),
    [
        ("model/checkpoint_6/state", "pretrain", stage_state.TODO),  # its command says what to do
        ("model/config.json", "pretrain", stage_state.DAMAGED),
        ("export/pretrain/model.safetensors", "export", stage_state.DAMAGED),
        *[("export/t5x/checkpoint_6/state/d/values", "export.t5x", stage_state.DAMAGED)][
            : bool(T5X)
        ],
        ("vocabulary/sentencepiece.model", "vocabulary", stage_state.DAMAGED),
        ("model/evaluation.json", "evaluate", stage_state.TODO),
        ("export/pretrain", "export", stage_state.TODO),
    ],
)
def test_a_product_without_a_file_is_not_finished(here, name, stage, word, capsys):
    path = here / "it" / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert states()[stage] == word
    if word == stage_state.DAMAGED:
        with pytest.raises(UserError, match=f"{stage} changed: .*{path.name} is missing"):
            run("it.toml")
    if "state" not in name:
        capsys.readouterr()
        assert run("it.toml", "--redo") == 0
        assert path.exists()
        assert "cache.mine: finished before" in capsys.readouterr().out
        assert set(states().values()) == {stage_state.FINISHED}


def test_a_cut_evaluation_is_made_again_and_others_do_not_count(here, capsys):
    path = here / "it/model/evaluation.json"
    path.write_text(json.dumps(METRICS)[:20])
    with pytest.raises(UserError, match=r"evaluate changed.*is missing or was changed.*--redo"):
        run("it.toml")
    assert run("it.toml", "--redo") == 0
    more = METRICS["checkpoints"]["6"] | {"train": {"loss": 2.0}}
    write(path, {"checkpoints": {"6": more}})
    (here / "it/export/pretrain/README.md").write_text("a card that was edited")
    assert set(states().values()) == {stage_state.FINISHED}


@pytest.mark.parametrize(
    "flags", [["--only=evaluate"], ["--only=export"], ["--from=evaluate"], ["--from=pretrain"]]
)
def test_a_part_does_not_take_what_an_earlier_stage_has_to_make_again(here, flags):
    before = [(here / name).read_bytes() for name in ("it.lock", "it/RECIPE.md")]
    (here / "it.toml").write_text(TEXT.replace("= 120", "= 110").replace("= 6", "= 5"))
    with pytest.raises(UserError, match="vocabulary changed: vocab_size was 120, is 110"):
        run("it.toml", *flags, "--redo")
    assert [(here / name).read_bytes() for name in ("it.lock", "it/RECIPE.md")] == before
    (here / "it.toml").write_text(TEXT.replace("= 6", "= 9"))
    if flags != ["--from=pretrain"]:
        with pytest.raises(UserError, match="pretrain changed: train_steps was 6, is 9"):
            run("it.toml", *flags)
    # A part that does not depend on it is well; the lock then says nothing of the rest.
    assert run("it.toml", "--only=vocabulary") == 0
    assert list(json.loads((here / "it.lock").read_text())["stages"]) == [
        "cache.mine",
        "vocabulary",
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"flags": {"vocab_size": [400]}},
        {"inputs": {"json:c.jsonl": {"c.jsonl": 3}}},
        {"needs": {"a": 3}},
        {"made": 3},
        None,
    ],
)
def test_a_damaged_record_is_named(here, change):
    path = here / "it/.recipe/vocabulary.json"
    value = json.loads(path.read_text())
    path.unlink()
    path.mkdir() if change is None else write(path, value | change)
    with pytest.raises(UserError, match=r"vocabulary.json is damaged: delete it"):
        run("it.toml")


def test_a_run_without_a_checkpoint_takes_other_settings(here):
    path = here / "it/.recipe/pretrain.json"
    write(path, json.loads(path.read_text()) | {"made": None})
    (here / "it.toml").write_text(TEXT.replace("= 6", "= 5"))
    assert states()["pretrain"] == stage_state.CHANGED
    shutil.rmtree(here / "it/model/checkpoint_6")
    assert states()["pretrain"] == stage_state.BEGUN


def test_a_vocabulary_and_a_folder_of_ones_own_are_looked_at_again(here):
    shutil.copytree(here / "it/vocabulary", here / "words")
    shutil.copytree(here / "it/export/pretrain", here / "start")
    text = TEXT.replace("[vocabulary]\nvocab_size = 120\n", "")
    text = text.replace('corruption"', 'corruption"\nvocabulary = "words"')
    (here / "it.toml").write_text(
        text.replace("= 6", '= 6\ninit_from = "hf:start"\nlengths = {inputs = 32, targets = 16}')
    )
    assert run("it.toml", "--redo") == 0
    assert set(states().values()) == {stage_state.FINISHED}
    for name in ("words/sentencepiece.model", "start/model.safetensors"):
        path = here / name
        before = path.read_bytes()
        path.write_bytes(before)  # at another time
        assert set(states().values()) == {stage_state.FINISHED}
        path.write_bytes(before[::-1])
        stage = "cache.mine" if "words" in name else "pretrain"
        found = stage_state.states(recipe.read("it.toml"))[stage]
        assert found.word == stage_state.CHANGED
        assert f"{path.name} was edited" in found.why
        with pytest.raises(UserError, match=f"{stage} changed"):
            run("it.toml", "--locked")
        path.write_bytes(before)


def test_the_account_has_the_recipe_that_ran(here, monkeypatch):
    init = Process.__init__

    def edited(self, words):
        (here / "it.toml").unlink(missing_ok=True)
        init(self, words)

    monkeypatch.setattr(Process, "__init__", edited)
    assert run("it.toml", "--folder=other") == 0
    assert TEXT.strip() in (here / "other/RECIPE.md").read_text()


def test_a_lock_that_cannot_be_written_is_noticed_at_the_start(here, monkeypatch):
    (here / "it.lock").unlink()
    (here / "it.lock").mkdir()
    for flags in (["--folder=other"], ["--rehearse", "--folder=other"]):
        with pytest.raises(UserError, match=r"it.lock is a folder"):
            run("it.toml", *flags)

    def full(path, data):
        raise PermissionError(13, "Permission denied")

    (here / "it.lock").rmdir()
    monkeypatch.setattr(writable.files, "write_bytes", full)
    with pytest.raises(UserError, match=r"cannot be written \(Permission denied\): it.lock goes"):
        run("it.toml", "--folder=other")
    assert not (here / "other").exists()


@pytest.mark.google
@pytest.mark.parametrize("store", ["gs://bucket", "memory:/", ""])
def test_only_the_folder_itself_is_removed_whatever_its_name(store, here, gcs):
    places = [f"{store}/{name}" if store else name for name in ("run1", "run2", "run[12]")]
    (here / "it.toml").write_text('[vocabulary]\ncorpus = "text:corpus.txt"\n')
    for place in places:
        read = recipe.read("it.toml", place)
        (stage,) = read.stages
        stage_state.begin(read, stage, {})
        for name in ("manifest.json", "inner/deep"):
            folder = f"{place}/vocabulary/{name}".rpartition("/")[0]
            files.make_folder(folder)
            files.write_bytes(f"{place}/vocabulary/{name}", b"{}")
    stage_state.forget(read, [stage])
    for place in places[:2]:
        assert files.list_tree(f"{place}/vocabulary") == {"manifest.json": 2, "inner/deep": 2}
        assert files.exists(f"{place}/.recipe/vocabulary.json")
    assert not files.exists(f"{places[2]}/vocabulary")
    assert not files.exists(f"{places[2]}/.recipe/vocabulary.json")


def test_a_record_of_an_earlier_version_may_have_former_names_and_flags_that_are_gone(here):
    (here / "it.toml").write_text(TEXT.replace("= 6", "= 6\nmesh.tensor = 1"))
    path = here / "it/.recipe/pretrain.json"
    value = json.loads(path.read_text())
    value["flags"]["mesh.num_partitions"] = ["1"]
    write(path, value)
    assert states()["pretrain"] == stage_state.FINISHED
    value["flags"]["averages.ema_decay"] = ["0.9"]
    write(path, value)
    assert states()["pretrain"] == stage_state.CHANGED


@pytest.mark.parametrize(
    ("old", "new", "goes_on"),
    [("300B", "1000B", True), ("300B", "100B", False), (None, "300B", False), ("1B", None, False)],
)
def test_a_run_measured_in_tokens_cannot_become_shorter(old, new, goes_on):
    stage = Stage("pretrain", "pretrain", {}, "model", ())
    old, new = ((text,) if text else None for text in (old, new))
    assert stage_state._goes_on(stage, "train_tokens", old, new) == goes_on


@pytest.mark.parametrize(
    ("flags", "written"),
    [
        ({}, "validation"),
        ({"average": "last:3"}, "validation.last3"),
        ({"average": "last:3", "task": "mine_ul2"}, "mine_ul2:validation.last3"),
        *(({name: "x"}, f"{name}/english") for name in annexes.entries("evaluate")),
    ],
)
def test_what_an_evaluation_wrote_is_found(tmp_path, flags, written):
    found = {"checkpoints": {"6": {written: {"loss": 1.0}, "other": {"loss": 2.0}}}}
    write(tmp_path / "evaluation.json", found)
    texts = {"model_dir": ("model",), "steps": ("6",)} | {name: (v,) for name, v in flags.items()}
    stage = Stage("evaluate", "evaluate", texts, str(tmp_path / "evaluation.json"), ())
    assert products._evaluate(stage) == {"metrics": {"6": {written: {"loss": 1.0}}}}
