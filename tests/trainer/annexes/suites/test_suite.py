"""Suites of questions: the rows of each architecture, and scores that do not depend on devices."""

import dataclasses
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from tasks.annexes.questions import scores
from tasks.annexes.questions.question import Question, of_text
from tasks.storage import files
from tasks.terminal.command_line import UserError
from tests.support.parameters import slow_unless
from tests.support.runs import ROOT, TASK, TINY, config_of, run_of, trained
from tests.trainer.huggingface.test_export import save_run
from trainer import evaluate, export
from trainer.annexes.suites.filling import Filling
from trainer.annexes.suites.options import SuiteConfig
from trainer.annexes.suites.suite import Suite
from trainer.config import load_config
from trainer.engine.program import Program
from trainer.inference.trained_run import without_data
from trainer.initialization import rewind
from trainer.reporting.metrics import read_metrics

pytestmark = pytest.mark.processes

LM = "python_docs_autoregressive_lm"
BERT = "python_docs_masked_lm"
ASKED = [
    Question("The function ", ("returns", "return the"), 0, " a list of the values."),
    Question("", ("This", "These object"), 0, " is not a string"),
    Question("It is ", ("an int", "int an"), 1, ""),
    of_text("The values of the list are the keys of the dictionary."),
]


def _runs(text_cache, folder, dtype="float32"):
    flags = f"--model.dtype={dtype}", "--lengths.inputs=64"
    return {
        "t5": save_run(text_cache, folder / "t5", "t5_1_1_tiny", *flags),
        "llama": save_run(
            text_cache, folder / "llama", "llama_tiny", flags[0], task=LM, lengths=(None, 48)
        ),
        "bert": save_run(
            text_cache, folder / "bert", "bert_tiny", *flags, task=BERT, lengths=(None, 64)
        ),
    }


@pytest.fixture(scope="module")
def runs(text_cache, tmp_path_factory):
    return _runs(text_cache, tmp_path_factory.mktemp("suites"))


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    path = tmp_path_factory.mktemp("questions") / "mine.jsonl"
    from tasks.annexes.questions import question

    question.write(str(path), ASKED)
    return path


def test_choices_share_their_context_as_in_span_corruption(text_cache):
    run = run_of(text_cache)
    fill = Filling(run)
    ids = run.data.tasks[0].vocabulary
    for asked in ASKED[:3]:
        rows = [row for (row,) in fill(asked)]
        assert len({tuple(row.inputs) for row in rows}) == 1
        for row, choice in zip(rows, asked.choices, strict=True):
            whole = run.data.encode(asked.before + choice + asked.after)
            gap = row.inputs.tolist().index(ids.size - 1)
            filled = [*row.inputs[:gap], *row.targets[1:-1], *row.inputs[gap + 1 : -1]]
            assert filled == whole
            assert [row.targets[0], row.targets[-1]] == [ids.size - 1, ids.size - 2]
            assert row.inputs[-1] == ids.special.eos
            assert (row.first, row.end) == (0, len(row.targets))


@pytest.mark.parametrize(("task", "preset"), [(TASK, TINY), (BERT, "bert_tiny")])
def test_a_text_is_filled_a_few_words_at_a_time(text_cache, task, preset):
    run = run_of(text_cache, task=task, preset=preset, lengths=(64, 64))
    (rows,) = Filling(run)(ASKED[3])
    counted = [token for row in rows for token in row.targets[row.first : row.end].tolist()]
    text = ASKED[3].before + ASKED[3].right
    whole = run.data.encode(text)
    before = len(run.data.encode(ASKED[3].before.rstrip()))
    assert counted == whole[before:]
    if task == TASK:
        assert len(rows) == math.ceil(len(ASKED[3].right.split()) / 2)
        # Each part follows all before it, and no row has what comes after.
        read = [row.inputs[:-2].tolist() for row in rows]
        assert all(whole[: len(each)] == each for each in read)
        assert [len(each) for each in read[1:]] == [
            before + sum(row.end - row.first for row in rows[:number]) for number in (1, 2)
        ]


def test_bytes_without_a_token_count_eight_bits_each(text_cache, tmp_path):
    run = run_of(text_cache)
    fill = Filling(run)
    assert fill.unknown_bytes(of_text("one two three four")) == 0
    known, unknown = "one two three four", "one two three \u4e00\u4e00"
    assert fill.unknown_bytes(of_text(unknown)) == 6
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": t}) + "\n" for t in (known, unknown))
    )
    run = run_of(text_cache, f"--evaluation.suite={tmp_path}/a.jsonl")
    program = Program(run)
    suite = Suite(run, program)
    params = program.initial_state().params
    with_bytes = [each.scores[0] for each in suite(params)]
    suite._unknown = [0, 0]
    without = [each.scores[0] for each in suite(params)]
    assert with_bytes[0] == without[0]
    assert with_bytes[1] == pytest.approx(without[1] - 48 * math.log(2))


def test_a_decoder_is_asked_for_all_from_the_choice_on(text_cache):
    run = run_of(text_cache, task=LM, preset="llama_tiny", lengths=(None, 48))
    fill = Filling(run)
    for asked in ASKED:
        before = len(run.data.encode(asked.before.rstrip()))
        for choice, (row,) in zip(asked.choices, fill(asked), strict=True):
            assert row.targets.tolist() == run.data.encode(asked.before + choice + asked.after)
            assert (row.first, row.end) == (before, len(row.targets))


def test_an_encoder_fills_a_choice_from_left_to_right(text_cache):
    run = run_of(text_cache, task=BERT, preset="bert_tiny", lengths=(64, 64))
    fill, ids = Filling(run), run.data.tasks[0].vocabulary
    mask = ids.size - 1
    (question, *_) = ASKED
    for rows in fill(question):
        for at, row in enumerate(rows):
            assert row.targets[0] == ids.size - 2
            assert row.end == row.first + 1 == rows[0].first + at + 1
            masked = np.flatnonzero(row.inputs == mask).tolist()
            assert masked == [*range(row.first, rows[-1].end)]
            assert (np.delete(row.inputs, masked) == np.delete(row.targets, masked)).all()


def test_a_mode_comes_first_and_missing_sentinels_are_refused(text_cache):
    run = run_of(text_cache, task="python_docs_ul2", lengths=(64, 64))
    ((row,), _) = Filling(run)(ASKED[0])
    mode = run.data.tasks[0].task.objective.denoisers[0].mode
    assert row.inputs[0] == run.data.tasks[0].vocabulary.ids.id_of(mode)
    # The same without the run's caches.
    alone = dataclasses.replace(run, data=without_data(run.config).data)
    ((same,), _) = Filling(alone, run.data.tasks[0].vocabulary)(ASKED[0])
    assert same.inputs.tolist() == row.inputs.tolist()
    from tasks import vocabulary

    with pytest.raises(UserError, match="has no sentinels to fill gaps with"):
        Filling(run, vocabulary.load("bytes"))


@pytest.mark.torch
@pytest.mark.parametrize("name", ["t5", "llama", "bert"])
def test_answers_are_those_of_transformers(runs, questions, name, tmp_path):
    import torch
    import transformers

    assert evaluate.main([f"--model_dir={runs[name]}", f"--suite={questions}"]) == 0
    answered = scores.read(scores.path(runs[name], "2"))
    assert [each.question for each in answered] == ASKED
    export.main([f"--model_dir={runs[name]}", f"--output={tmp_path}/exported"])
    kinds = {"t5": "ForSeq2SeqLM", "llama": "ForCausalLM", "bert": "ForMaskedLM"}
    kind = getattr(transformers, f"AutoModel{kinds[name]}")
    model = kind.from_pretrained(f"{tmp_path}/exported").eval()
    from trainer.inference import trained_run

    run = trained_run.open_run(runs[name])
    fill = Filling(run)
    start = model.config.bos_token_id if name == "llama" else None
    assert name != "llama" or run.converter.special.start == start

    def likelihood(row):
        inputs, targets = (torch.tensor(each[None].astype(np.int64)) for each in row[:2])
        with torch.no_grad():
            if name == "t5":
                logits = model(input_ids=inputs, labels=targets).logits
            elif name == "bert":
                logits = model(input_ids=inputs).logits
            else:
                first = torch.full((1, 1), start)
                logits = model(input_ids=torch.cat([first, targets[:, :-1]], 1)).logits
        log = torch.log_softmax(logits.double(), -1)[0]
        places = torch.arange(row.first, row.end)
        return log[places, targets[0, places]].sum().item()

    for each in answered:
        expected = [math.fsum(map(likelihood, rows)) for rows in fill(each.question)]
        np.testing.assert_allclose(each.scores, expected, atol=2e-3)


def test_a_run_answers_its_suite(text_cache, questions, tmp_path, capsys):
    flags = ["--train_steps=4", "--evaluation.every_steps=2", "--metrics.tensorboard=false"]
    suite = f"{questions},{ROOT}/tasks/annexes/questions/files/english/agreement.jsonl"
    flags += [f"--evaluation.suite={suite}"]
    flags += ["--evaluation.examples=4", "--checkpoint.best_metric=mine/suite_accuracy"]
    model_dir = trained(text_cache, tmp_path / "model", *flags, lengths=(64, 18))
    found = [line for line in read_metrics(str(model_dir)) if "suite" in line["split"]]
    assert {line["step"] for line in found} == {2, 4}
    by_split = {line["split"]: line["metrics"] for line in found if line["step"] == 4}
    assert {"suite/mine", "suite/agreement"} <= by_split.keys()
    ours = by_split["suite/mine"]
    assert ours["suite_accuracy_low"] <= ours["suite_accuracy"] <= ours["suite_accuracy_high"]
    before = scores.path(str(model_dir), "4")
    answers = files.read_bytes(before)
    names = sorted(path.name for path in (model_dir / "suite").iterdir())
    assert names == ["2.jsonl", "4.jsonl"]
    # The command gives what the run gave.
    evaluate.main([f"--model_dir={model_dir}", f"--suite={suite}"])
    assert files.read_bytes(before) == answers
    assert files.read_json(f"{model_dir}/evaluation.json")["checkpoints"]["4"] == {
        split: metrics for split, metrics in by_split.items() if split.startswith("suite/")
    }
    assert "chance  unigram  copying" in capsys.readouterr().out
    # The run's watched set need not be in another suite.
    other = f"--suite={ROOT}/tasks/annexes/questions/files/english/order.jsonl"
    assert evaluate.main([f"--model_dir={model_dir}", other, "--examples=1"]) == 0


def test_answers_after_a_rewind_are_kept_beside_its_checkpoint(tmp_path):
    for folder in ("suite", "aside"):
        (tmp_path / folder).mkdir()
    for name in ("5", "10.last3", "20"):
        (tmp_path / "suite" / f"{name}.jsonl").write_text("{}")
    rewind._move_answers(str(tmp_path), 5, f"{tmp_path}/aside")
    assert files.list_names(f"{tmp_path}/suite") == ["5.jsonl"]
    assert sorted(files.list_names(f"{tmp_path}/aside")) == [
        "suite_10.last3.jsonl",
        "suite_20.jsonl",
    ]


def test_settings_of_older_runs_are_read(tmp_path):
    config = dataclasses.asdict(config_of())
    for name in ("suite", "probes"):
        evaluation = {**config["evaluation"], name: "english"}
        old = {"config": {**config, "evaluation": evaluation, "suite": {}}}
        (tmp_path / "config.json").write_text(json.dumps(old))
        assert load_config(str(tmp_path))[0].suite == SuiteConfig("english")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--suite=nothing"], "--suite=nothing: no such suite"),
        (["--suite=english", "--metrics=bleu"], "--metrics is for a split"),
        (["--suite=english", "--plot=a.png"], "--plot is for a split"),
        (["--suite=english", "--split=train"], "--split=train has no effect with --suite"),
        (["--suite="], "--suite is empty"),
    ],
)
def test_mistakes_are_named(runs, flags, says):
    with pytest.raises(UserError, match=says):
        evaluate.main([f"--model_dir={runs['t5']}", *flags])


def test_a_watched_set_that_the_suite_lacks_is_refused_at_the_start(
    text_cache, questions, tmp_path
):
    flags = [f"--evaluation.suite={questions}", "--train_steps=4", "--evaluation.every_steps=2"]
    flags += ["--evaluation.examples=3", "--metrics.tensorboard=false"]
    for metric in ("suite_bits_per_byte", "other/suite_accuracy"):
        with pytest.raises(UserError, match=f"{metric}: the suite has mine/suite_accuracy$"):
            trained(text_cache, tmp_path, *flags, f"--stopping.metric={metric}", lengths=(64, 18))
    # Nothing keeps the folder from another setting.
    trained(text_cache, tmp_path, *flags, "--stopping.metric=mine/suite_accuracy", lengths=(64, 18))


def test_questions_longer_than_a_table_of_positions_are_left_out(text_cache, tmp_path, capsys):
    long, short = (json.dumps({"text": "many words " * count}) + "\n" for count in (60, 6))
    (tmp_path / "a.jsonl").write_text(short + long + short)
    flags = "--model.position=absolute", "--model.max_positions=64"
    flags += (f"--evaluation.suite={tmp_path}/a.jsonl",)
    run = run_of(text_cache, *flags, task=LM, preset="llama_tiny", lengths=(None, 48))
    program = Program(run)
    answered = Suite(run, program)(program.initial_state().params)
    assert len(answered) == 2
    says = "1 of 3 questions of a are left out: 1 longer than the model's 64 positions"
    assert says in capsys.readouterr().err
    (tmp_path / "a.jsonl").write_text(long)
    with pytest.raises(UserError, match="a has no question for this model"):
        Suite(run, program)


def test_choices_that_the_vocabulary_cannot_tell_apart_are_left_out(text_cache, tmp_path, capsys):
    cloze = {"cloze": "It is {} here", "choices": ["\u4e00", "\u4e8c"], "answer": 0}
    fair = {**cloze, "choices": ["one", "two"]}
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, (cloze, fair))))
    flags = (f"--evaluation.suite={tmp_path}/a.jsonl", "--evaluation.batch_size=3")
    for name in ({}, {"task": BERT, "preset": "bert_tiny", "lengths": (64, 64)}):
        run = run_of(text_cache, *flags, **name)
        program = Program(run)
        (answered,) = Suite(run, program)(program.initial_state().params)
        assert answered.question.choices == ("one", "two")
        assert "1 of 2 questions of a are left out" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.parametrize("name", slow_unless(["t5"], ["t5", "llama", "bert"]))
def test_four_devices_give_the_scores_of_one(runs, name, tmp_path):
    made = []
    for devices in (1, 4):
        flags = [f"--model_dir={runs[name]}", "--suite=english,romanian", "--examples=5"]
        usual = os.environ["XLA_FLAGS"]
        forced = f"{usual} --xla_force_host_platform_device_count={devices}"
        env = os.environ | {"XLA_FLAGS": forced, "PYTHONPATH": str(ROOT)}
        words = [sys.executable, "-m", "trainer.evaluate", *flags, "--batch_size=8"]
        subprocess.run([*words, f"--output={tmp_path}/{devices}.json"], env=env, check=True)
        made.append((
            json.loads((tmp_path / f"{devices}.json").read_text()),
            scores.read(scores.path(runs[name], "2")),
        ))  # fmt: skip
    (one, answers), (four, others) = made
    for split, metrics in one["checkpoints"]["2"].items():
        assert four["checkpoints"]["2"][split] == pytest.approx(metrics, rel=1e-5), split
    for each, other in zip(answers, others, strict=True):
        assert each.scores == pytest.approx(other.scores, abs=2e-3)
        assert each.question == other.question
