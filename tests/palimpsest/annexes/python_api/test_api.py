"""The commands from Python: the same bytes, mistakes, interrupts, threads, notebooks, the page."""

import builtins
import json
import os
import re
import threading

import numpy as np
import pytest

import palimpsest
from palimpsest.annexes.python_api import api
from pipeline import verify
from tasks.cache.manifest import CacheManifest
from tasks.terminal import programs
from tests.support import in_process
from tests.support.processes import PYTHONPATH, started
from tests.trainer.conftest import assert_one_line
from trainer.checkpoints import metadata
from trainer.config import Config, LengthsConfig, MetricsConfig, OptimizerConfig
from trainer.config.presets import model_preset

TEXTS = [f"line {n} of a text about {n % 7} boats and {n % 5} seas" for n in range(400)]
RUN = {
    "preset": "t5_1_1_tiny",
    "batch_size": 4,
    "lengths": {"inputs": 32, "targets": 16},
    "optimizer": {"learning_rate": 0.01},
    "metrics": {"every_steps": 2, "tensorboard": False},
    "train_steps": 4,
}
TYPED = ("--preset=t5_1_1_tiny", "--batch_size=4", "--lengths.inputs=32", "--lengths.targets=16",
         "--optimizer.learning_rate=0.01", "--metrics.every_steps=2", "--metrics.tensorboard=false",
         "--train_steps=4")  # fmt: skip


def hashes(model_dir):
    """Returns the step of a run's newest checkpoint and the checksums of its arrays."""
    step, found = metadata.newest(str(model_dir))
    assert found["checksums"]
    return step, found["checksums"]


def fingerprint(folder):
    """Returns the checksums of all files that a cache's manifest lists."""
    manifest = CacheManifest.load(str(folder))
    return [each.files for shards in manifest.splits.values() for each in shards]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("api")


@pytest.fixture(scope="module")
def corpus(folder):
    return palimpsest.write_corpus(TEXTS, folder / "corpus.jsonl", validation=0.1)


@pytest.fixture(scope="module")
def cache(folder, corpus):
    vocabulary = palimpsest.train_vocabulary(
        corpus=corpus, vocab_size=70, output=folder / "vocabulary"
    )
    return palimpsest.build(
        corpus=[corpus], vocabulary=vocabulary, name="mine", task="span_corruption",
        cache_dir=folder / "cache",
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(folder, cache):
    return palimpsest.pretrain(
        **RUN, task=cache.task, cache_dir=cache, model_dir=folder / "model",
        **{"evaluation.every_steps": 2},
    )  # fmt: skip


def test_the_import_loads_next_to_nothing():
    code = "import sys, palimpsest; {}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    alone = set(started("-c", code.format("1")).stdout.split())
    assert "palimpsest" in alone
    assert not alone & {"numpy", "tasks", "trainer"}
    used = set(started("-c", code.format("palimpsest.write_corpus")).stdout.split())
    assert "trainer" in used
    assert not used & {"jax", "apache_beam", "pandas", "pipeline"}


def test_a_file_with_the_name_of_a_package_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    (tmp_path / "tasks.py").write_text("raise SystemExit('tasks.py was run')\n")
    (tmp_path / "script.py").write_text("import palimpsest\nprint(palimpsest.UserError)\n")
    done = started("script.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_name_is_there():
    assert {*palimpsest.__all__} <= {*dir(palimpsest)}
    assert all(getattr(palimpsest, name).__doc__ for name in palimpsest.__all__)
    assert {*api.__all__, "batches"} <= {*palimpsest.__all__}
    with pytest.raises(AttributeError, match="no attribute 'bild'"):
        palimpsest.bild  # noqa: B018


def test_a_vocabulary_encodes(folder, cache):
    vocabulary = palimpsest.Vocabulary(folder / "vocabulary")
    ids = vocabulary.encode("boats <extra_id_0> seas")
    assert ids.count(len(vocabulary) - 1) == 1
    assert vocabulary.decode(ids) == "boats <extra_id_0> seas"
    for same in (np.array(ids), np.array(ids, np.uint16), [*map(np.int32, ids)], tuple(ids)):
        assert vocabulary.decode(same) == "boats <extra_id_0> seas"
    assert vocabulary.decode([]) == vocabulary.decode(np.array([])) == ""


@pytest.mark.parametrize("wrong", [99999, 170, -1, 1.5, "3", None, [3], 1 << 70])
def test_an_id_outside_the_vocabulary_is_refused(folder, cache, wrong):
    vocabulary = palimpsest.Vocabulary(folder / "vocabulary")
    said = f"{re.escape(repr(wrong))} is no id of the vocabulary .*: it has 170 ids, from 0 to 169"
    with pytest.raises(palimpsest.UserError, match=said):
        vocabulary.decode([3, wrong])


@pytest.mark.parametrize("text", ["a \ud800", 3, None, b"a"], ids=ascii)
def test_a_text_is_whole_characters(folder, cache, text):
    with pytest.raises(palimpsest.UserError, match=r"^text (must be a text|has half a character)"):
        palimpsest.Vocabulary(folder / "vocabulary").encode(text)


@pytest.mark.processes
def test_the_results_are_the_commands(tmp_path, folder, corpus, cache, model):
    build = ("--name=mine", "--task=span_corruption", f"--vocabulary={folder}/vocabulary")
    done = in_process.run("pipeline.build", *build, f"--corpus={corpus}", f"--cache_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert fingerprint(tmp_path / cache.task) == fingerprint(folder / "cache" / cache.task)
    where = (f"--task={cache.task}", f"--cache_dir={tmp_path}", f"--model_dir={tmp_path}/model")
    done = in_process.run("trainer.pretrain", *TYPED, *where, "--evaluation.every_steps=2")
    assert done.returncode == 0, done.stderr
    assert hashes(tmp_path / "model") == hashes(folder / "model")
    filled = in_process.run(
        "trainer.annexes.suites.fill", "a <extra_id_0>", f"--model_dir={tmp_path}/model"
    )
    assert f"{model.fill('a <extra_id_0>')}\n" == filled.stdout


@pytest.mark.processes
def test_configuration_objects_are_the_same_as_flags(tmp_path, cache, model):
    parts = {
        "lengths": LengthsConfig(32, 16),
        "optimizer": OptimizerConfig(learning_rate=0.01),
        "metrics": MetricsConfig(every_steps=2, tensorboard=False),
    }
    where = {"task": cache.task, "cache_dir": cache.cache_dir}
    config = Config(
        "t5_1_1_tiny", model_preset("t5_1_1_tiny"), **parts, **where, train_steps=4, batch_size=4,
        model_dir=f"{tmp_path}/whole",
    )  # fmt: skip
    palimpsest.pretrain(config)
    some = {"preset": "t5_1_1_tiny", "train_steps": 4, "batch_size": 4}
    palimpsest.pretrain(**parts, **where, **some, model_dir=f"{tmp_path}/parts")
    records = []
    for name in ("whole", "parts"):
        assert hashes(tmp_path / name) == hashes(model.model_dir)
        record = json.loads((tmp_path / name / "config.json").read_text())
        assert record["config"].pop("model_dir") == f"{tmp_path}/{name}"
        records.append((record["config"], record["origins"]))
    assert records[0] == records[1]
    with pytest.raises(palimpsest.UserError, match="a configuration object or flags, not both"):
        palimpsest.pretrain(config, train_steps=5)


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [("vocab train", "json:x", "corpus=…, or a vocab.train.Flags, not 'json:x'"),
     ("build", ["json:x"], "task=…, or a pipeline.building.options.Options, not"),
     ("pretrain", {"preset": "x"}, "=…, or a trainer.config.Config, not {'preset'"),
     ("build", Config, "or a pipeline.building.options.Options, not <class"),
     ("evaluate", "all", "model_dir=…, or a trainer.config.evaluation.EvaluateFlags, not 'all'")],
)  # fmt: skip
def test_a_value_without_its_name_is_refused(name, given, said):
    with pytest.raises(
        palimpsest.UserError, match=f"^{name}: give flags by name, such as .*{said}"
    ):
        palimpsest.call(name, given)


@pytest.mark.parametrize(
    ("call", "said"),
    [(lambda: palimpsest.Cache(None, "x"), "None: it must be the path of a file or a folder"),
     (lambda: palimpsest.Cache("cache", 3), "task must be a text, not 3"),
     (lambda: palimpsest.Vocabulary(3), "3: it must be the path"),
     (lambda: palimpsest.Model(3), "3: it must be the path"),
     (lambda: palimpsest.call(None), "command must be a text, not None"),
     (lambda: palimpsest.call(["build"]), "command must be a text"),
     (lambda: palimpsest.write_corpus(["a"], 3), "3: it must be the path"),
     (lambda: palimpsest.write_corpus(["a"], ""), "'': it must be the path"),
     (lambda: palimpsest.pretrain(corpus="json:x"), "call palimpsest.build.corpus='json:x', …. f"),
     (lambda: palimpsest.build(corpus={"text": TEXTS}), "corpus is a SPEC, not .*: write_corpus"),
     (lambda: palimpsest.pretrain(print_config="values"), "print_config makes no model: use pali")],
)  # fmt: skip
def test_a_value_of_another_type_is_refused(call, said):
    with pytest.raises(palimpsest.UserError, match=said):
        call()


@pytest.mark.parametrize(("notebook", "begin"), [(True, "!palimpsest"), (False, "palimpsest")])
def test_advice_can_be_run_where_it_is_printed(notebook, begin, monkeypatch):
    monkeypatch.setattr(builtins, "__IPYTHON__", notebook, raising=False)
    if not notebook:
        monkeypatch.delattr(builtins, "__IPYTHON__")
    said = []
    monkeypatch.setattr(
        type(verify.main), "call", lambda *_: said.append(programs.program("trainer.evaluate"))
    )
    palimpsest.call("verify", cache="x")
    assert said == [f"{begin} evaluate"]


def test_a_mistake_is_the_line_of_the_command(capsys):
    for module, function, words in (
        ("trainer.pretrain", palimpsest.pretrain, {"preset": "t5", "model_dir": "x"}),
        ("trainer.pretrain", palimpsest.pretrain, {"prset": "t5"}),
        ("trainer.finetune", palimpsest.finetune, {"model_dir": None}),
        ("pipeline.build", palimpsest.build, {"task": "lm"}),
        (
            "vocab.train",
            palimpsest.train_vocabulary,
            {"corpus": "text:no/*", "output": "/dev/null/v"},
        ),
    ):
        with pytest.raises(palimpsest.UserError) as error:
            function(**words)
        typed = [f"--{name}={value}" for name, value in words.items() if value is not None]
        done = in_process.run(module, *typed)
        assert_one_line(done.returncode, done.stderr, f": error: {error.value}\n".strip())
    with pytest.raises(palimpsest.UserError, match=r"unknown command pretrian \(did you mean"):
        palimpsest.call("pretrian")
    with pytest.raises(palimpsest.UserError, match="x holds no run"):
        palimpsest.Model("x")


@pytest.mark.processes
def test_finished_work_is_kept_and_a_run_goes_on(folder, corpus, cache, capsys):
    assert palimpsest.write_corpus(TEXTS, folder / "corpus.jsonl", validation=0.1) == corpus
    how = {"corpus": corpus, "vocabulary": folder / "vocabulary", "cache_dir": cache}
    palimpsest.train_vocabulary(corpus=corpus, vocab_size=70, output=folder / "vocabulary")
    palimpsest.build(**how, name="mine", task="span_corruption")
    said = capsys.readouterr().out
    assert "the vocabulary is already finished" in said
    assert "mine_span_corruption is complete and valid: nothing to do" in said
    for last, said in (
        (3, "up to step 3"),
        (3, "training is finished"),
        (5, "checkpoint 3, up to"),
    ):
        palimpsest.pretrain(
            **RUN | {"train_steps": last}, task=cache.task, cache_dir=cache, model_dir=folder / "on"
        )
        assert said in capsys.readouterr().out
    assert hashes(folder / "on")[0] == 5


def test_a_cache_as_data_frames(folder, cache):
    counts = cache.counts()
    manifest = CacheManifest.load(f"{cache.cache_dir}/{cache.task}")
    assert counts.index.names == ["task", "split"]
    assert counts.documents.sum() == len(TEXTS)
    assert counts.loc[cache.task, "train"].tokens == manifest.total("train", "tokens")
    examples = cache.examples(3, inputs=32, targets=16)
    assert len(examples) == 3
    row = examples.iloc[0]
    assert "<extra_id_0>" in row.inputs
    assert row.targets.startswith("<extra_id_0>")
    gap = re.match(r"<extra_id_0> *(.*?)<extra_id_1>", row.targets)[1].strip()
    assert gap in row.text
    assert "boats" in examples.text.str.cat()
    cache.verify(workers=1)
    assert palimpsest.Cache(cache.cache_dir, cache.task).counts().equals(counts)
    with pytest.raises(palimpsest.UserError, match="no cache for task other"):
        palimpsest.Cache(cache.cache_dir, "other")


def test_a_damaged_cache_raises(tmp_path, corpus, folder):
    cache = palimpsest.build(
        corpus=corpus, vocabulary=folder / "vocabulary", name="b", task="lm", cache_dir=tmp_path
    )
    (rows, *_) = (tmp_path / "b_lm").glob("*train.tfrecord-*")
    data = bytearray(rows.read_bytes())
    data[100] ^= 1
    rows.write_bytes(data)
    with pytest.raises(palimpsest.UserError, match="has faults"):
        cache.verify(workers=1)


@pytest.mark.processes
def test_a_model_as_data_frames(model, capsys):
    metrics = model.metrics()
    assert (metrics.index.name, [*metrics.index]) == ("step", [2, 4])
    assert {"loss", "steps_per_second"} <= {*metrics.columns}
    assert [*model.metrics("validation").index] == [2, 4]
    with pytest.raises(palimpsest.UserError, match=r"no metrics of test: it has train, validation"):
        model.metrics("test")
    evaluated = model.evaluate()
    assert [*evaluated.index] == [(4, "validation")]
    # In other batches the sums differ by rounding.
    assert evaluated.loss.iloc[0] == pytest.approx(model.metrics("validation").loss[4], rel=1e-5)
    assert model.config.train_steps == 4
    batch = model.examples(step=2)
    assert len(batch) == 4
    assert model.examples(step=2, row=1).text.iloc[0] == batch.text.iloc[1]


@pytest.mark.processes
def test_text_from_a_model(model, capfd):
    made = model.generate(["a <extra_id_0>", "b"], max_new_tokens=4, method="beam",
                          num_return_sequences=2)  # fmt: skip
    assert [*made.prompt] == ["a <extra_id_0>"] * 2 + ["b"] * 2
    assert all(len(ids) <= 4 for ids in made.ids)
    assert made.score[0] >= made.score[1]
    generator = model._generator[1]
    assert model.fill("a <extra_id_0>", max_new_tokens=4)
    assert model._generator[1] is not generator
    generator = model._generator[1]
    assert model.fill("b <extra_id_0>", max_new_tokens=4)
    assert model._generator[1] is generator
    with pytest.raises(palimpsest.UserError, match="has no gap"):
        model.fill("no gap")
    with pytest.raises(palimpsest.UserError, match=r"output is for files: use palimpsest\.call"):
        model.generate(["a"], output="answers.jsonl")
    prompts = (each for each in ["a <extra_id_0>", "b"])
    assert [*model.generate(prompts, max_new_tokens=4).prompt] == ["a <extra_id_0>", "b"]
    nothing = model.generate([])
    assert ([*nothing.columns], len(nothing)) == ([*made.columns], 0)
    for prompts in (["a", "b\ud800"], ["a", 3]):
        with pytest.raises(palimpsest.UserError, match=r"^prompt 2 "):
            model.generate(prompts)
    for prompts in (made, {"prompt": "a"}, None):
        with pytest.raises(palimpsest.UserError, match=r"^prompts: "):
            model.generate(prompts)
    for text in ("\udfff <extra_id_0>", 3):
        with pytest.raises(palimpsest.UserError, match=r"^text "):
            model.fill(text)
    with pytest.raises(palimpsest.UserError, match=r"^the prompt has half a character"):
        generator.ids("\udfff")
    with pytest.raises(palimpsest.UserError, match="give flags by name"):
        model.evaluate("all")


@pytest.mark.processes
def test_places_stay_when_the_current_folder_changes(
    tmp_path, folder, corpus, cache, model, monkeypatch, capsys
):
    monkeypatch.chdir(folder)
    vocabulary = palimpsest.Vocabulary("vocabulary")
    here = palimpsest.Cache("cache", cache.task)
    run = palimpsest.pretrain(**RUN, task=here.task, cache_dir=here, model_dir="relative")
    assert (vocabulary.folder, here.cache_dir, run.model_dir) == ("vocabulary", "cache", "relative")
    assert run.config.cache_dir == "cache"
    filled = run.fill("a <extra_id_0>", max_new_tokens=4)
    names, evaluated, batch = palimpsest.Vocabulary("bytes"), run.evaluate(), run.examples(step=2)
    monkeypatch.chdir(tmp_path)
    assert os.fspath(vocabulary) == f"{folder}/vocabulary"
    assert (here.cache_dir, run.model_dir) == (f"{folder}/cache", f"{folder}/relative")
    assert (repr(run), names.folder) == ("Model('relative')", "bytes")
    assert here.examples(2).equals(palimpsest.Cache(cache.cache_dir, cache.task).examples(2))
    here.verify(workers=1)
    assert [*run.metrics().index] == [2, 4]
    capsys.readouterr()
    assert run.fill("a <extra_id_0>", max_new_tokens=4) == filled
    assert "without its data" not in capsys.readouterr().err
    assert run.evaluate().equals(evaluated)
    assert run.examples(step=2).equals(batch)
    how = {"corpus": corpus, "vocabulary": vocabulary, "cache_dir": here}
    assert palimpsest.build(**how, name="mine", task="span_corruption").cache_dir == here.cache_dir
    tuned = palimpsest.finetune(
        init_from=run, task=here.task, cache_dir=here, train_steps=1, model_dir="tuned",
        batch_size=4, lengths=RUN["lengths"],
    )  # fmt: skip
    assert tuned.config.cache_dir == f"{folder}/cache"


def in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@pytest.mark.processes
def test_a_run_in_another_thread(tmp_path, cache, model):
    made = []

    def train():
        where = {"task": cache.task, "cache_dir": cache, "model_dir": tmp_path}
        made.append(palimpsest.pretrain(**RUN, **where))

    in_thread(train)
    assert [hashes(each.model_dir) for each in made] == [hashes(model.model_dir)]


@pytest.mark.processes
def test_a_recipe_in_another_thread(tmp_path):
    palimpsest.write_corpus(TEXTS, tmp_path / "corpus.jsonl")
    recipe = tmp_path / "small.toml"
    recipe.write_text(f'[vocabulary]\ncorpus = "json:{tmp_path}/corpus.jsonl"\nvocab_size = 120\n')
    codes = []
    run = {"recipe": str(recipe), "folder": tmp_path / "out"}
    in_thread(lambda: codes.append(palimpsest.call("run", **run)))
    assert codes == [0]
    assert recipe.with_suffix(".lock").exists()
