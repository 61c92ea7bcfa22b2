"""Recipes: what flows between stages, and the mistakes that are found by reading them."""

import os
import re

import pytest

from palimpsest.annexes.recipes import recipe, run
from palimpsest.annexes.recipes.derived_flags import KINDS
from tasks import annexes, registry
from tasks.terminal.command_line import UserError
from tasks.terminal.flags import given_flags
from tests.support.processes import ROOT
from trainer.config.from_flags import OpenRunFlags, configured

WHOLE = """
[corpus.a]
corpus = "json:a/*.jsonl?column=body"
weight = 2
[corpus.b]
corpus = "parquet:b/*.parquet"
[dedup]
against = "json:test.jsonl"
[vocabulary]
vocab_size = 9000
[cache.mine]
task = "span_corruption"
[cache.qa]
task = "supervised"
corpus = "json:qa.jsonl?inputs=q&targets=a"
[pretrain]
preset = "t5_1_1_small"
lengths = { inputs = 256, targets = 64 }
[finetune.qa]
train_steps = 100
[evaluate]
steps = "all"
[evaluate.qa]
split = "test"
[export]
license = "mit"
[export.qa]
"""


def written(tmp_path, text):
    path = tmp_path / "it.toml"
    path.write_text(text)
    return path


def words_of(path):
    return {stage.name: stage.words for stage in recipe.read(str(path)).stages}


def test_what_a_stage_decides_flows_to_the_next(tmp_path):
    words = words_of(written(tmp_path, WHOLE))
    assert list(words) == [
        *("dedup", "vocabulary", "cache.mine", "cache.qa", "pretrain", "evaluate", "export"),
        *("finetune.qa", "evaluate.qa", "export.qa"),
    ]
    both = {"--corpus=a=json:a/*.jsonl?column=body", "--corpus=b=parquet:b/*.parquet"}
    assert {*both, "--against=json:test.jsonl", "--output=it/duplicates"} == {*words["dedup"]}
    assert {*both, "--weights=a=2,b=1", "--vocab_size=9000"} < {*words["vocabulary"]}
    # 256 inputs hold 284 tokens with 15 % of noise in spans of 3.
    flags = {"--name=mine", "--exclude=it/duplicates/exclude.arrow", "--row_tokens=284"}
    assert {*both, *flags, "--vocabulary=it/vocabulary"} < {*words["cache.mine"]}
    # Packed rows hold examples of lengths of their own.
    packed = WHOLE.replace("[finetune.qa]", "data.pack_examples = true\n[finetune.qa]")
    assert not any(
        "row_tokens" in word for word in words_of(written(tmp_path, packed))["cache.mine"]
    )
    own = packed.replace("true\n", "true\ndata.example_inputs = 256\ndata.example_targets = 64\n")
    assert "--row_tokens=284" in words_of(written(tmp_path, own))["cache.mine"]
    assert "--name=qa" in words["cache.qa"]
    assert not both & {*words["cache.qa"]}
    assert {"--task=mine_span_corruption", "--cache_dir=it/cache"} < {*words["pretrain"]}
    assert {"--task=qa_supervised", "--init_from=it/model"} < {*words["finetune.qa"]}
    assert "--model_dir=it/model" in words["evaluate"]
    assert "--model_dir=it/finetune/qa" in words["evaluate.qa"]
    assert {"--model_dir=it/finetune/qa", "--output=it/export/qa"} == {*words["export.qa"]}


def test_a_key_overrides_what_flows_and_a_stage_can_be_named(tmp_path):
    text = WHOLE + '[finetune.more]\ninit_from = "{finetune.qa}"\ntask = "qa_supervised"\n'
    text = text.replace("[vocabulary]", '[vocabulary]\noutput = "gs://bucket/words"')
    read = recipe.read(str(written(tmp_path, text)))
    stage = read.stage("finetune.more", "only")
    assert "--init_from=it/finetune/qa" in stage.words
    assert set(stage.needs) == {"cache.qa", "finetune.qa"}
    assert "--vocabulary=gs://bucket/words" in read.stage("cache.qa", "only").words
    after = [each.name for each in read.after([read.stage("cache.qa", "only")])]
    assert after == ["cache.qa", "finetune.qa", "evaluate.qa", "export.qa", "finetune.more"]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("[vocabulary]", "[vocabulry]", "unknown table [vocabulry] (did you mean vocabulary?)"),
        ("vocab_size = 9", "vocab_siz = 9", "[vocabulary]: unknown flag --vocab_siz (did you mean"),
        ("= 9000", '= "x"', "[vocabulary]: --vocab_size=x: it must be a whole number"),
        ("= 9000", "= 9000\nalpha = 0.3", "alpha and the weights of corpora are alternatives"),
        ("[finetune.qa]", "[cache.b]\ntask = 'lm'\n[finetune.qa]", "has several languages"),
        ("[finetune.qa]", "[finetune.ga]", "[finetune.ga] reads [cache.ga], and there is none: "),
        ("[finetune.qa]", "[finetune]", "[finetune] has the key train_steps"),
        ("weight = 2", "wait = 2", "unknown: wait"),
        ("weight = 2", 'weight = 2\ncolumn = "x"', "unknown: column"),
        ("weight = 2", 'language = "x"', "unknown: language (did you mean languages?)"),
        ("[finetune.qa]", '[finetune.qa]\ncorpora = ["a"]', "a key of dedup, vocabulary, cache"),
        ('split = "test"', 'model_dir = "{finetune.q}"', "no stage finetune.q (did you mean"),
        ('license = "mit"', 'command = "exprt"', "must be one of export"),
        ("[export.qa]", "[export.q.a]\nb = 1", "[export.q]: unknown flag --a.b"),
        ("[corpus.a]", "[corpus.a", "is not TOML"),
    ],
)
def test_a_mistake_in_a_recipe_is_named(tmp_path, before, after, message):
    path = written(tmp_path, WHOLE.replace(before, after, 1))
    with pytest.raises(UserError) as error:
        recipe.read(str(path))
    assert message in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda it: it.stem)
def test_recipes_of_the_tree_are_whole(path):
    read = recipe.read(str(path))
    head, _ = recipe.tables_of(path, path.read_text())
    assert {"title", "source"} <= head.keys() or path.stem == "demo"
    for stage in read.stages:
        if stage.kind != "pretrain" or "init_from" in stage.flags:
            continue
        flags = given_flags(OpenRunFlags, stage.words)
        config, origins = configured(flags)
        origin = origins.get("optimizer.name", "")
        assert origin.startswith(("optimizer preset", "command line")) or path.stem == "demo"
        task = registry.get(config.task)
        assert task.objective.window_tokens(task.lengths)


def test_show_prints_commands_and_runs_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run.main([str(ROOT / "recipes" / "demo.toml"), "--show"]) == 0
    shown = capsys.readouterr().out.splitlines()
    commands = ["vocab train", "build", "pretrain", "evaluate", "report"]
    assert all(map(str.startswith, shown, (f"palimpsest {each} " for each in commands)))
    assert "--row_tokens=26" in shown[1]  # the task's window for 24 inputs
    assert not list(tmp_path.iterdir())


A, WORDS = "[corpus.a]\ncorpus = 'text:a'\n", "[vocabulary]\ncorpus = 'text:a'\n"
X = "[cache.x]\ntask = 'lm'\nvocabulary = 'bytes'\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[evaluate]", "needs the key model_dir or a [pretrain]"),
        ("[[cache]]\ntask = 'lm'", "cache must be a table, [cache] or [cache.NAME]"),
        ("[[cache.a]]\ntask = 'lm'", "[[cache.a]] is a list of tables: write [cache.a]"),
        (f"{X}corpus = 'text:a'\ndry_run = true", "dry_run makes no whole cache.x"),
        (f"[recipe]\nfolder = 'a,b'\n{A}[dedup]\n{X}", "the folder a,b has a comma"),
        ("[recipe]\nfolder = '/'\n[vocabulary]", "name a folder of its own"),
        ("[recipe]\ntitle = 3\n[vocabulary]", "title = 3: it must be a text"),
        ("[cache.x]\nvocabulary = 'bytes'", "needs the key task"),
        (f"{WORDS}output = ''", "needs the key output"),
        ("[vocabulary]\ncorpora = 3", "must be a list of names"),
        ("[vocabulary]\nvocab_size = {a = 1}", "has no such table"),
        (f"{WORDS}output = '{{vocabulary}}/x'", "refers to itself"),
        (f"{A}languages = 3\n[vocabulary]", "languages (texts)"),
        (f"{A}weight = 0\n[vocabulary]", "a number above 0"),
        (f"[pretrain]\nlengths = {{inputs = 'abc'}}\n{X}", "inputs=abc"),
        (
            f"{X}{X}".replace("'lm'", "'rlm_lm'").replace("e.x", "e.y", 1),
            "[cache.y] and [cache.x] both write it/cache/rlm_lm",
        ),
        (f"{A}[vocabulary]\ncorpora = ['a', 'a']", "corpora: a is there twice"),
        (
            f"{X}corpus = 'text:a'\n[pretrain]\ntask = 'y_lm'",
            "[pretrain]: --task=y_lm: no [cache] makes it (did you mean x_lm?)",
        ),
        (
            f"{A}{A.replace('s.a', 's.ro')}{X}[pretrain]\ntask = 'x_a_mlm'",
            "--task=x_a_mlm: no [cache] makes it",
        ),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(tmp_path, text, message):
    with pytest.raises(UserError, match=re.escape(message)):
        recipe.read(str(written(tmp_path, text)))


def test_evaluations_of_one_model_have_files_of_their_own(tmp_path):
    text = "[pretrain]\npreset = 't5_1_1_tiny'\n[evaluate.a]\n[evaluate.b]\n[export.b]\n"
    outputs = {
        stage.name: stage.output for stage in recipe.read(str(written(tmp_path, text))).stages
    }
    assert outputs["evaluate.a"] == "it/evaluations/a.json"
    assert outputs["evaluate.b"] == "it/evaluations/b.json"
    assert outputs["export.b"] == "it/export/b"


def test_a_run_on_one_language_of_a_cache_needs_the_cache(tmp_path):
    text = "".join(f"[corpus.{name}]\ncorpus = 'text:{name}'\n" for name in ("en", "ro"))
    text += "[cache.x]\ntask = 'lm'\nvocabulary = 'a'\n[pretrain]\ntask = 'x_en_lm=2,x_ro_lm=1'"
    assert recipe.read(str(written(tmp_path, text))).stage("pretrain", "only").needs == ("cache.x",)
    elsewhere = f"{text}\ncache_dir = 'others'\n".replace("x_en_lm=2,x_ro_lm=1", "y_lm")
    assert recipe.read(str(written(tmp_path, elsewhere))).stages[-1].needs == ()


@pytest.mark.parametrize("stage", ["", "[vocabulary]\ncorpus = 'text:a'\n"])
def test_columns_of_templates_may_have_the_names_of_stages(tmp_path, stage):
    spec = "json:q.jsonl?inputs={vocabulary} {report} {{dedup}} {folder}&targets={title}"
    text = f"{stage}[cache.a]\ntask = 'supervised'\ncorpus = '{spec}'\n"
    words = words_of(written(tmp_path, text + "vocabulary = 'v'\n"))
    assert f"--corpus={spec}" in words["cache.a"]


def test_a_report_lies_beside_the_run_that_it_is_of(tmp_path):
    text = '[report]\nmodel_dir = "a/model"\n'
    assert recipe.read(str(written(tmp_path, text))).stages[0].output == "a/model/report.html"
    text = f"[pretrain]\n{text.replace('report', 'report.old')}"
    assert recipe.read(str(written(tmp_path, text))).stages[1].output == "a/model/report_old.html"
    text = text.replace("a/model", "{folder}/model")
    assert recipe.read(str(written(tmp_path, text))).stages[1].output == "it/model/report_old.html"


def test_the_folder_can_be_named(tmp_path):
    text = '[vocabulary]\ncorpus = "text:a"\noutput = "{folder}/words"\n'
    read = recipe.read(str(written(tmp_path, text)), "gs://bucket/here")
    assert read.stages[0].output == "gs://bucket/here/words"
    assert read.portable["vocabulary"].output == "{folder}/words"


def test_a_recipe_has_a_name_that_its_folder_and_lock_leave_free(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, folder, says in (
        ("it.lock", None, "rename it to it.toml"),
        ("it", None, "a name that ends in .toml"),
        ("it.toml", "it.toml", "choose another --folder"),
        ("/dev/null", None, "is not a regular file"),
    ):
        if name != "/dev/null":
            (tmp_path / name).write_text("[vocabulary]\ncorpus = 'text:a'\n")
        with pytest.raises(UserError, match=re.escape(says)):
            recipe.read(name, folder)
    os.mkfifo("pipe.toml")
    with pytest.raises(UserError, match="is not a regular file"):
        recipe.read("pipe.toml")
    with pytest.raises(UserError, match="is a folder"):
        recipe.read(str(tmp_path))
    assert recipe.read("it", "other").folder == "other"


def test_no_annex_can_be_deleted_that_has_the_command_of_a_stage():
    (recipes,) = (annex for annex in annexes.annexes() if annex.name == "recipes")
    commands = {kind.command for kind in KINDS.values()}
    for annex in annexes.annexes():
        for slot, entries in annex.slots.items():
            if slot.startswith("commands.") and commands & entries.keys():
                assert annex.name in recipes.needs
