"""Rehearsals: of every recipe of the tree, and of recipes with planted mistakes."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from palimpsest.annexes.recipes import recipe as recipes
from palimpsest.annexes.recipes.recipe import Stage
from palimpsest.annexes.recipes.rehearsals import exported, real_runs, rehearsal, samples, shrinking
from tasks.reading import sources
from tasks.terminal.command_line import UserError
from tests.support import rehearsals
from tests.support.processes import started, wait_for
from tests.trainer.huggingface.conftest import Exported
from trainer import huggingface
from trainer.config import field_paths
from trainer.config.from_flags import build_config
from trainer.huggingface import configs


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


@pytest.mark.parametrize("name", ["t5_1_1", "t5_1_0", "umt5", "llama3", "gemma", "gpt2", "bert"])
def test_a_folder_of_transformers_is_made_small(name, tmp_path):
    whole = Exported(name, tmp_path / "whole")
    (tmp_path / "whole" / "spiece.model").write_text("a tokenizer")
    (tmp_path / "whole" / "pytorch_model.bin").write_text("weights")
    shrinking.folder(str(tmp_path / "whole"), tmp_path / "small")
    small = huggingface.model_config(str(tmp_path / "small"))
    assert small.head_dim <= 16
    assert small.num_decoder_layers <= 2 >= small.num_encoder_layers
    expected = replace(whole.config, **shrinking.small_model(whole.config))
    assert configs.same_model(small, expected)
    assert huggingface.load(str(tmp_path / "small"), small)
    assert (tmp_path / "small" / "spiece.model").read_text() == "a tokenizer"
    assert not (tmp_path / "small" / "pytorch_model.bin").exists()


TEXTS = [f"line {n} of a text about {n % 7} boats" for n in range(6000)]


def small_tables(here, text):
    """Returns the tables of a rehearsal of a recipe; its runs keep their models."""
    path = here / "it.toml"
    path.write_text(text)
    whole = recipes.tables_of(path, text)[1]
    runs = dict.fromkeys(name for name in whole if name.startswith(("pretrain", "finetune")))
    (here / "scratch").mkdir(exist_ok=True)
    return shrinking.tables(whole, runs, 1, here / "scratch")


PLACES = """
[corpus.mine]
corpus = "text:corpus.txt"
[vocabulary]
vocab-size = [300]
output = "of-mine"
[cache.mine]
task = "span_corruption"
cache-dir = "caches"
[pretrain]
preset = "t5_1_1_tiny"
model-dir = "model"
cache-dir = "caches"
data.local-dir = "local"
metrics.wandb = "project"
[evaluate]
step = "4"
output = "evaluation.json"
plot = "it.png"
[report]
output = "it.html"
picture = "it.png"
[export]
steps = 4
push-to = "a/b"
output = "out"
cache-dir = "caches"
"""


def test_keys_of_any_spelling_do_not_lead_out_of_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("\n".join(TEXTS))
    tables = small_tables(tmp_path, PLACES)
    assert tables["vocabulary"] == {"vocab_size": 300}
    assert tables["cache.mine"] == {"task": "span_corruption"}
    assert not {"metrics.wandb", "data.local_dir"} & tables["pretrain"].keys()
    assert [tables[name] for name in ("evaluate", "report", "export")] == [{}, {}, {}]
    scratch = str(tmp_path / "scratch")
    small = recipes.of_tables(pathlib.Path("it.toml"), tables, f"{scratch}/run")
    shrinking.check_places(small, scratch)
    for key, place in (("output", f"{scratch}/../out"), ("cache_dir", "gs://bucket/caches")):
        name = "export" if key == "output" else "pretrain"
        other = {**tables, name: {**tables[name], key: place}}
        found = recipes.of_tables(pathlib.Path("it.toml"), other, f"{scratch}/run")
        with pytest.raises(UserError, match=rf"\[{name}\] a rehearsal would write to {place}"):
            shrinking.check_places(found, scratch)


def test_what_twenty_updates_cannot_hold_is_made_to_fit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("\n".join(TEXTS))
    run = 'train_tokens = "1B"\n[evaluate]'
    text = PLACES.replace("[evaluate]", run).replace("[report]", 'average = "last:5"\n[report]')
    tables = small_tables(tmp_path, text)
    kept = {name for name in tables["pretrain"] if name.startswith("train_")}
    assert kept == {"train_steps"}
    assert tables["evaluate"] == {"average": "last:2"}


SCHEDULE = "--length_schedule=7000: targets=4096"
LONG = "--length_schedule=2M: inputs=1024,targets=230"
MICROBATCH = "--tokens_per_microbatch_per_replica=8192"
LM = ("lm_tiny", "--lengths.targets=512")


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        # 954 updates, if all rows were of the longest length.
        (
            (*LM, SCHEDULE, "--batch_size=256", "--train_tokens=1B"),
            {"train_steps": 7079, "batch_size": 256},
        ),
        (
            (*LM, "--length_schedule=70: targets=1536", "--tokens_per_batch=16384"),
            {"batch_size": 32, "tokens_per_batch": None},
        ),
        (
            (*LM, "--batch_schedule=7000: 32", SCHEDULE, "--batch_size=256", MICROBATCH),
            {"microbatches": 16},
        ),
        (
            ("t5_1_1_tiny", "--task=rlm_span_corruption", LONG, "--batch_size=8"),
            {"lengths.inputs": 1024, "lengths.targets": 230},
        ),
    ],
)
def test_a_schedule_of_lengths_keeps_its_updates_and_rows(flags, found):
    preset, *words = flags
    config, origins = build_config(preset, [*words, "--model_dir=model"])
    run = real_runs._divided(config, origins)
    values = dict(field_paths.leaves(run))
    assert {name: values[name] for name in found} == found
    assert run.length_schedule == ""


def sample(here, lines, window=0, options=""):
    """Returns the options and the rows of a sample of lines, and whether it leaves none out."""
    (here / "corpus.txt").write_text("\n".join(lines))
    (here / str(window)).mkdir()
    made = samples.Samples(here / str(window), window)
    spec = made.of("corpus.it", f"text:{here}/corpus.txt{options}", None)["corpus"]
    path, _, given = spec.removeprefix("json:").partition("?")
    return given, len(pathlib.Path(path).read_text().splitlines()), made.are_whole(spec)


def test_a_sample_fills_windows_and_shows_a_whole_corpus_as_it_is(tmp_path):
    assert sample(tmp_path, TEXTS, 1) == ("validation=0.1&id=id", 400, False)
    _, rows, whole = sample(tmp_path, TEXTS, 626)
    assert 1000 < rows < 2000
    assert not whole
    assert sample(tmp_path, TEXTS[:400], 2) == ("validation=0.01&id=id", 400, True)
    assert sample(tmp_path, TEXTS, 3, "?validation=0") == ("validation=0.0&id=id", 400, False)
    assert sample(tmp_path, ["a long line " * 500], 4) == ("validation=0.01&id=id", 1, False)


def test_a_vocabulary_is_capped_unless_its_corpus_is_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = PLACES.partition("[cache.mine]")[0].replace("300", "3000")
    for lines, size in ((TEXTS, 1000), (TEXTS[:300], [3000])):
        (tmp_path / "corpus.txt").write_text("\n".join(lines))
        assert small_tables(tmp_path, text)["vocabulary"]["vocab_size"] == size


def test_what_reads_a_model_elsewhere_is_checked_and_not_rehearsed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "it.toml"
    path.write_text('[report]\nmodel_dir = "model"\n[evaluate]\nmodel_dir = "model"\n')
    with pytest.raises(UserError, match=r"\[evaluate\] --model_dir=model: no such folder"):
        rehearsal.rehearse(str(path), None)
    (tmp_path / "model").mkdir()
    assert rehearsal.rehearse(str(path), None) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"rehearsed {path}")
    assert not os.listdir(tmp_path / "model")
    text = (
        '[pretrain]\n[evaluate.old]\nmodel_dir = "model"\n[evaluate.own]\nmodel_dir = "{pretrain}"'
    )
    tables = small_tables(tmp_path, text)
    assert tables["evaluate.old"] == {}
    assert tables["evaluate.own"] == {"model_dir": "{pretrain}"}


@pytest.mark.processes
def test_sigterm_leaves_nothing_behind(tmp_path):
    (tmp_path / "corpus.txt").write_text("\n".join(TEXTS))
    (tmp_path / "it.toml").write_text(PLACES.partition("[evaluate]")[0])
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "palimpsest", "run", "it.toml", "--rehearse"],
        cwd=tmp_path, env={**rehearsals.variables(), "TMPDIR": str(temporary)},
    )  # fmt: skip
    assert wait_for(lambda: list(temporary.glob("rehearsal_*/run/*")), process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143
    assert not os.listdir(temporary)


WHOLE = """
[corpus.a]
corpus = "json:news/*.jsonl"
[corpus.b]
corpus = "text:texts/a/*.txt?document=file"
[dedup]
against = ["json:takedowns.jsonl", "json:qa.jsonl?column=q"]
[vocabulary]
vocab_size = 300
[cache.mine]
task = "span_corruption"
[cache.qa]
task = "supervised"
corpus = "json:qa.jsonl?inputs=q&targets=a"
[pretrain]
gin_file = "it.gin"
[finetune.qa]
train_steps = 1000
lengths = { inputs = 64, targets = 8 }
evaluation.metrics = "exact_match"
[evaluate.pretrained]
[evaluate.qa]
metrics = "token_f1"
[export.pretrained]
[export.qa]
"""
GIN = """\
include 't5x/examples/t5/t5_1_1/base.gin'
include 't5x/configs/runs/pretrain.gin'

MIXTURE_OR_TASK_NAME = 'mine_span_corruption'
TASK_FEATURE_LENGTHS = {'inputs': 64, 'targets': 18}
TRAIN_STEPS = 6000
BATCH_SIZE = 128
DROPOUT_RATE = 0.1
partitioning.PjitPartitioner.num_partitions = 4
"""


@pytest.mark.slow
def test_gin_files_duplicates_and_pairs_are_rehearsed(files, hub):
    here = files / "here"
    (here / "it.toml").write_text(WHOLE)
    (here / "it.gin").write_text(GIN)
    rehearsals.write(here / "takedowns.jsonl", [{"text": "a text of its own " * 9}])
    pairs = ({"q": f"what is {n} and {n % 7}", "a": str(n % 7)} for n in range(400))
    rehearsals.write(here / "qa.jsonl", pairs)
    done = started("-m", "palimpsest", "run", "it.toml", "--rehearse", cwd=here, env=hub)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("loaded by transformers") == 2
    assert "finetune.qa: 10 updates" in done.stdout


@pytest.mark.torch
@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "lost"),
    [("t5_1_1", "encoder.final_layer_norm.weight"), ("bert", "cls.predictions.bias")],
)
def test_an_export_that_transformers_does_not_load_whole_is_named(name, lost, tmp_path):
    whole = Exported(name, tmp_path / "whole")
    assert exported.problem(str(whole.folder)) is None
    whole.write(whole.written, {key: each for key, each in whole.tensors.items() if key != lost})
    stage = Stage("export", "export", {}, str(whole.folder), ())
    with pytest.raises(UserError, match=rf"\[export\] .*not load .*whole: missing_keys {lost}"):
        rehearsal._load(stage)


SMALL_PAIRS = """
[corpus.mine]
corpus = "text:{folder}/mine.txt"
[vocabulary]
vocab_size = 8000
corpora = ["mine"]
[cache.qa]
task = "supervised"
corpus = "json:{folder}/qa.jsonl?inputs={{q}}&targets={{a}}"
corpora = []
[finetune.qa]
preset = "t5_1_1_tiny"
lengths = {{ inputs = 64, targets = 8 }}
"""


@pytest.mark.parametrize(
    ("rows", "key", "expected"),
    [
        (40_000, "", ["too_long=cut"]),
        (40_000, 'objective = ["too_long=refuse"]', ["too_long=refuse"]),
        (10, "", None),  # the rehearsal's vocabulary is the recipe's
    ],
)
def test_pairs_are_cut_where_the_vocabulary_is_of_a_sample(rows, key, expected, tmp_path):
    (tmp_path / "mine.txt").write_text("\n".join(f"line {n} of text" for n in range(rows)))
    rehearsals.write(tmp_path / "qa.jsonl", [{"q": "what", "a": "7"}] * 10)
    path = tmp_path / "it.toml"
    whole = recipes.tables_of(path, SMALL_PAIRS.format(folder=tmp_path) + key)[1]
    (tmp_path / "scratch").mkdir()
    tables = shrinking.tables(whole, {"finetune.qa": None}, 1, tmp_path / "scratch")
    assert tables["finetune.qa"].get("objective") == expected


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3])
def test_a_sample_has_documents_to_hold_out(share, tmp_path):
    (tmp_path / "mine.txt").write_text("\n".join(f"line {n} of text" for n in range(6000)))
    spec = f"text:{tmp_path}/mine.txt?validation={share}"
    text = samples.Samples(tmp_path, 8).of("vocabulary", spec, None)["corpus"]
    corpus = sources.resolve(sources.parse(text))
    found = {"train": 0, "validation": 0}
    for piece in corpus.pieces:
        for split, batch in sources.read(corpus, piece):
            found[split] += batch.num_rows
    assert found["validation"] >= 30
    assert found["train"] >= 300
