"""Mistakes planted in small recipes: a rehearsal names each in one line."""

import os
import shutil

import pytest

from palimpsest.annexes.recipes import run
from tasks.terminal.command_line import UserError
from tests.support import rehearsals, small_tokenizers
from tests.support.processes import started
from tests.trainer.conftest import assert_one_line, ended

TEXTS = [f"line {n} of a text about {n % 7} boats and {n % 5} seas" for n in range(400)]
BASE = """
[corpus.mine]
corpus = "text:corpus.txt"
[vocabulary]
vocab_size = 120
[cache.mine]
task = "span_corruption"
[pretrain]
preset = "t5_1_1_tiny"
lengths = { inputs = 64, targets = 18 }
"""
PAIRS = BASE + '[cache.qa]\ntask = "supervised"\ncorpus = "json:qa.jsonl?inputs=q&targets=a"\n'
PAIRS += "[finetune.qa]\n"
BERT = BASE.replace("span_corruption", "masked_lm").replace("t5_1_1_tiny", "bert_tiny")
BERT = BERT.replace("inputs = 64, targets = 18", "inputs = 64, targets = 64")
DECODER = BASE.replace("span_corruption", "lm").replace("inputs = 64, targets = 18", "targets = 64")
DECODER += "[export]\n"
EXPORT = BASE + "[export]\n"
LANGUAGES = BASE.replace("text:corpus.txt", "json:data/{language}/*.jsonl")

CORPUS, CACHE, RUN, OUT = "[corpus.mine]", "[cache.mine]", "[pretrain]", "[export]"
# Name -> (recipe, what is replaced, with what, what the line says); found before a stage runs.
# Lines are added below the head of a table, and, for "", at the end.
EARLY = {
    "column": (BASE, "text:corpus.txt", "json:rows.jsonl?column=body", [CORPUS, "body"]),
    "file": (BASE, "corpus.txt", "corpse.txt", [CORPUS, "corpse.txt"]),
    "lengths": (BASE, "targets = 18", "targets = 3", [CACHE, "targets"]),
    "positions": (BERT, "= 64", "= 1024", [RUN, "--lengths.inputs", "--model.max_positions=1024"]),
    "objective": (BASE, "t5_1_1_tiny", "bert_tiny", [RUN, "bert_tiny", "span_corruption"]),
    "heads": (BASE, RUN, "mesh.tensor = 8", [RUN, "--mesh.tensor=8"]),
    "metric": (BASE, "", '[evaluate]\nmetrics = "exact_mach"', ["[evaluate]", "exact_match"]),
    "task": (BASE, '"span', '"spam', [CACHE, "--task=spam_corruption", "mean span_corruption?"]),
    "pairs": (PAIRS, "inputs=q", "inputs=question", ["[cache.qa]", "question"]),
    "export": (DECODER, "t5_1_1_tiny", "mini_switch_primer", [OUT, "transformers", "leave out"]),
    "folder": (BASE, 'preset = "t5_1_1_tiny', 'init_from = "hf:t5-bass', [RUN, "t5-bass is not"]),
    "language": (LANGUAGES, CORPUS, 'languages = ["ro", "xx"]', ["xx"]),
    "list": (BASE, CACHE, 'exclude = "takedwon.txt"', [CACHE, "takedwon.txt"]),
    "against": (BASE, "", "[dedup]\nagainst = 3", ["[dedup]", "'3'", "text:3"]),
    "rows": (BASE, RUN, "model.vocab-size = 64", [RUN, "--model.vocab_size=64", "220 ids"]),
    "runner": (BASE, CACHE, 'runner = "foo"', [CACHE, "--runner=foo", "FnApiRunner"]),
    "flag of a runner": (
        BASE,
        CACHE,
        'runner = "FnApiRunner"\nflink_mastre = "x"',
        [CACHE, "mastre"],
    ),
    "steps": (BASE, "", '[evaluate]\nstep = "banana"', ["[evaluate]", "banana"]),
    "later step": (BASE, "", "train_steps = 9\n[export]\nsteps = 10", [OUT, "after 9 updates"]),
    "repository": (EXPORT, "", 'push_to = "not a name!"', [OUT, "--push_to=not a", "OWNER/"]),
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Returns the folder of a recipe, where its command runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("\n".join(TEXTS))
    rehearsals.write(tmp_path / "rows.jsonl", ({"text": text} for text in TEXTS))
    rehearsals.write(tmp_path / "qa.jsonl", ({"q": text, "a": text[:9]} for text in TEXTS))
    (tmp_path / "data/ro").mkdir(parents=True)
    shutil.copy(tmp_path / "rows.jsonl", tmp_path / "data/ro")
    return tmp_path


def refused(here, text, capsys, *flags):
    """Returns the exit code and the errors of a rehearsal in this process."""
    (here / "it.toml").write_text(text)
    return ended("palimpsest.annexes.recipes.run", ["it.toml", "--rehearse", *flags], capsys)


def rehearsed(here, text, *flags, **environment):
    """Rehearses in a process of its own."""
    (here / "it.toml").write_text(text)
    command = ("-m", "palimpsest", "run", "it.toml", "--rehearse", *flags)
    return started(*command, cwd=here, env={**rehearsals.variables(), **environment})


@pytest.mark.processes
@pytest.mark.parametrize("name", EARLY)
def test_a_mistake_is_found_before_a_stage_runs(name, here, monkeypatch, capsys):
    text, before, after, says = EARLY[name]
    assert before in text
    if before[:1] == "[":
        after = f"{before}\n{after}"
    monkeypatch.setattr("palimpsest.annexes.recipes.rehearsals.rehearsal.told", None)
    text = text.replace(before, after) if before else f"{text}{after}\n"
    code, errors = refused(here, text, capsys)
    assert_one_line(code, errors, *says)
    print(errors)
    assert not (here / "it").exists()


def test_a_folder_that_cannot_be_written_is_named(here, capsys):
    (here / "out").write_text("a file")
    code, errors = refused(here, BASE, capsys, "--folder=out/mine")
    assert_one_line(code, errors, "out/mine", "cannot be written", "--folder")


def test_an_export_that_is_there_is_named(here, capsys):
    (here / "taken").mkdir()
    code, errors = refused(here, EXPORT + 'output = "taken"\n', capsys)
    assert_one_line(code, errors, "[export]", "--output=taken exists", "name another folder")


@pytest.mark.processes
def test_a_small_corpus_without_validation_is_named(here):
    # The hash holds out none of 30 documents with the default share.
    rehearsals.write(here / "s.jsonl", ({"text": text} for text in TEXTS[:30]))
    text = BASE.replace("text:corpus.txt", "json:s.jsonl").replace("= 120", "= 40")
    done = rehearsed(here, text)
    says = [
        "[pretrain] it/cache/mine_span_corruption has no text in split validation",
        "?validation",
    ]
    assert_one_line(done.returncode, done.stderr, *says)
    done = rehearsed(here, f"{text}evaluation.every_steps = 0\n")
    assert done.returncode == 0, done.stderr


@pytest.mark.google
def test_a_bucket_that_does_not_exist_is_named(here, gcs, capsys):
    code, errors = refused(here, BASE, capsys, "--folder=gs://bukket/mine")
    assert_one_line(code, errors, "gs://bukket", "bucket")
    assert gcs


def test_a_mesh_divides_the_table_that_the_cache_will_give(here, monkeypatch, capsys):
    # The preset has 50,257 rows, and a run rounds up what its cache has.
    monkeypatch.setattr(
        "palimpsest.annexes.recipes.rehearsals.rehearsal._rehearse", lambda stage: None
    )
    (here / "it.toml").write_text(
        DECODER.replace("t5_1_1_tiny", "gpt2_small").replace(
            "[pretrain]", "[pretrain]\nmesh.tensor = 2"
        )
    )
    assert run.main(["it.toml", "--rehearse"]) == 0
    assert "rehearsed it.toml" in capsys.readouterr().out


def test_a_model_is_made_small_in_every_preset():
    from palimpsest.annexes.recipes.rehearsals.shrinking import small_model
    from trainer.config.from_flags import build_config
    from trainer.config.presets import MODEL_PRESETS
    from trainer.model.spec import model_spec

    for name, model in MODEL_PRESETS.items():
        small = small_model(model)
        config, _ = build_config(name, [f"--model.{key}={each}" for key, each in small.items()])
        assert model_spec(config.model)
        assert config.model.emb_dim <= 64


@pytest.mark.processes
def test_a_missing_package_of_a_metric_is_named(here):
    # As in an installation without the extra "eval".
    (here / "site").mkdir()
    blocked = "import sys; sys.modules['sacrebleu'] = None\n"
    (here / "site" / "sitecustomize.py").write_text(blocked)
    text = BASE + 'evaluation.metrics = "bleu"\n'
    path = os.pathsep.join([str(here / "site"), rehearsals.variables()["PYTHONPATH"]])
    done = rehearsed(here, text, PYTHONPATH=path)
    assert_one_line(done.returncode, done.stderr, "[pretrain]", "sacrebleu", "[eval]")


@pytest.mark.processes
def test_a_data_set_that_does_not_exist_is_named(here):
    (here / "hub").mkdir()
    with rehearsals.hub(here / "hub", here / "home") as environment:
        text = BASE.replace("text:corpus.txt", "hf:some/body")
        done = rehearsed(here, text, **environment)
    assert_one_line(done.returncode, done.stderr, "[corpus.mine]", "hf:some/body")


@pytest.fixture
def vocabulary(here):
    """Returns a SentencePiece model of another run, without sentinels."""
    path = here / "words"
    return small_tokenizers.t5(path, TEXTS, 60)


@pytest.mark.processes
def test_a_vocabulary_without_sentinels_is_named(here, vocabulary, capsys):
    text = BASE.replace("[pretrain]", f'vocabulary = "{vocabulary}"\n[pretrain]')
    text = text.replace("[vocabulary]\nvocab_size = 120\n", "")
    code, errors = refused(here, text, capsys)
    assert_one_line(code, errors, "[cache.mine]", "28 sentinels", "--extra_ids")


@pytest.mark.processes
def test_a_mask_that_the_vocabulary_lacks_is_named(here, capsys):
    text = BERT.replace("[pretrain]", '[pretrain]\nobjective = "mask=[MASQUE]"')
    code, errors = refused(here, text, capsys)
    assert_one_line(code, errors, "[pretrain]", "[MASQUE]")


@pytest.mark.slow
def test_a_run_of_other_sizes_or_settings_is_named(here, monkeypatch, capsys):
    (here / "first.toml").write_text(BASE.replace("[pretrain]", "[pretrain]\ntrain_steps = 2"))
    done = started("-m", "palimpsest", "run", "first.toml", cwd=here, env=rehearsals.variables())
    assert done.returncode == 0, done.stderr
    other = '[pretrain]\ninit_from = "first/model"\ninit_from_state = false\nmodel.mlp_dim = 96'
    code, errors = refused(here, BASE.replace("[pretrain]", other), capsys)
    assert_one_line(code, errors, "[pretrain]", "--init_from=first/model", "96", "--model fields")
    # The same size is rehearsed, from random parameters.
    done = rehearsed(here, BASE.replace("[pretrain]", other.replace("\nmodel.mlp_dim = 96", "")))
    assert done.returncode == 0, done.stderr
    # Its folder is that of a run with other settings, or the run goes on there.
    there = BASE + 'model_dir = "first/model"\ntrain_steps = 4\n'
    code, errors = refused(here, there + "seed = 7\n", capsys)
    assert_one_line(code, errors, "[pretrain] --model_dir=first/model holds", "seed was 0, is 7")
    code, errors = refused(here, there.replace("t5_1_1_tiny", "t5_1_0_tiny"), capsys)
    assert_one_line(code, errors, "[pretrain] --model_dir=first/model", "preset was t5_1_1_tiny")
    monkeypatch.setattr(
        "palimpsest.annexes.recipes.rehearsals.rehearsal._rehearse", lambda stage: None
    )
    (here / "it.toml").write_text(there)
    assert run.main(["it.toml", "--rehearse"]) == 0


def test_a_slice_reaches_the_plan_of_the_real_run(here, monkeypatch, capsys):
    planned = []

    def told(stage, words):
        planned.extend(words)
        raise UserError(f"[{stage.name}] the run does not fit")

    monkeypatch.setattr("palimpsest.annexes.recipes.planning.told", told)
    code, errors = refused(here, BASE, capsys, "--topology=v5e:2x2")
    assert_one_line(code, errors, "[pretrain] the run does not fit")
    assert planned[0] == "plan"
    assert {"--topology=v5e:2x2", "--preset=t5_1_1_tiny", "--lengths.inputs=64"} <= {*planned}
    assert not [word for word in planned if word.startswith("--cache_dir")]


@pytest.mark.slow
def test_a_run_that_does_not_fit_a_slice_is_named(here, capsys):
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the extra gpu-plan")
    text = BASE.replace("t5_1_1_tiny", "t5_1_1_xxl")
    code, errors = refused(here, text, capsys, "--topology=h100:1")
    assert_one_line(code, errors, "[pretrain]", "does not fit h100:1")
