"""Runs of weeks: data skipped after a spike, rewinds, branches; killed anywhere and resumed."""

import json
import shutil

import pytest

from tasks.terminal.command_line import UserError
from tests.support.runs import TINY, curve, flags_of, metadata, state
from tests.support.trees import assert_close, assert_equal, same
from tests.support.words import changed
from tests.trainer.conftest import assert_one_line, ended
from trainer import loop, pretrain
from trainer.annexes.comparing import explain, verdict
from trainer.annexes.comparing.document_steps import Sightings
from trainer.annexes.comparing.explanation import Explanation
from trainer.config import load_config
from trainer.setup import prepare

pytestmark = pytest.mark.processes  # whole runs

STEPS, SKIP = 20, "--data.skip=8:12"
GROWING = "--batch_schedule=8: 8; 13: 2"
LONGER = ("--length_schedule=8: inputs=128,targets=34; 13: inputs=64,targets=18", GROWING)
FLAGS = (
    *("--model.num_encoder_layers=1", "--model.num_decoder_layers=1", "--model.dropout_rate=0.1"),
    *(f"--train_steps={STEPS}", "--metrics.every_steps=3", "--metrics.tensorboard=false"),
    *("--checkpoint.every_steps=5", "--checkpoint.keep=None", "--evaluation.every_steps=0"),
    *("--optimizer.name=adamw", "--optimizer.learning_rate=0.01"),
    "--optimizer.schedule=constant",
)


class Killed(BaseException):
    """The end of a run that nothing of it sees."""


def train(cache, model_dir, *flags, kill=None):
    """Runs trainer.pretrain up to its end, or until it asks for the batch of update `kill`."""
    words = [f"--preset={TINY}", *flags_of(cache, model_dir, *FLAGS, *flags)]
    return started(words, kill)


def branched(model_dir, parent, *flags, kill=None):
    """Runs a branch, which has its flags from its parent."""
    return started([f"--branch_from={parent}", f"--model_dir={model_dir}", *flags], kill)


def started(words, kill):
    if kill is None:
        assert pretrain.main(changed(*words)) == 0
        return
    ahead, opened = [], []

    def begin(run, checkpoints, program, _before=loop.begin):
        found = _before(run, checkpoints, program)
        ahead.extend(range(found[0].step + 1, kill))
        opened.append(checkpoints)
        return found

    def put(*arguments, _before=loop.Program.put):
        if not ahead:
            opened[0].close()  # no thread of a killed run writes on
            raise Killed
        ahead.pop()
        return _before(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "begin", begin)
        patch.setattr(loop.Program, "put", put)
        with pytest.raises(Killed):
            pretrain.main(changed(*words))


def assert_same_run(one, other, after=0):
    """Asserts that two runs end in the same bits, and wrote the same metrics after an update."""
    assert_equal(state(one, STEPS), state(other, STEPS))
    lines = [[line for line in curve(each) if line["step"] > after] for each in (one, other)]
    assert lines[0] == lines[1] != []


def history(model_dir):
    return json.loads((model_dir / "config.json").read_text()).get("history")


@pytest.fixture(scope="module")
def plain(text_cache, tmp_path_factory):
    """The folder of a run without a skip."""
    folder = tmp_path_factory.mktemp("plain") / "model"
    train(text_cache, folder)
    return folder


@pytest.fixture(scope="module")
def skipping(text_cache, tmp_path_factory):
    """The folder of a run that left out batches 8 to 11 from its start."""
    folder = tmp_path_factory.mktemp("skipping") / "model"
    train(text_cache, folder, SKIP)
    return folder


@pytest.fixture(scope="module")
def growing(text_cache, tmp_path_factory):
    """The folder of a run whose batches have 8 rows from update 9 on, and 2 from update 14 on."""
    folder = tmp_path_factory.mktemp("growing") / "model"
    train(text_cache, folder, GROWING)
    return folder


@pytest.fixture
def copied(plain, tmp_path):
    """A copy of the plain run."""
    return shutil.copytree(plain, tmp_path / "copy")


def test_a_default_run_records_no_history(plain):
    assert history(plain) is None
    assert "history" not in metadata(plain, STEPS)


def test_killed_before_inside_and_after_a_skip(text_cache, plain, skipping, tmp_path):
    train(text_cache, tmp_path, kill=7)  # the skip may be added while it is ahead
    for kill in (9, 14):
        train(text_cache, tmp_path, SKIP, kill=kill)
    train(text_cache, tmp_path, SKIP)
    assert_same_run(tmp_path, skipping)
    change = "data.skip was (), is ('8:12',)"
    assert history(tmp_path) == [{"after_update": 5, "by": "", "changes": [change]}]
    assert not same(state(plain, STEPS), state(skipping, STEPS))
    assert_equal(state(plain, 5), state(skipping, 5))


def test_rows_before_inside_and_after_a_skip_are_explained(plain, skipping, capsys):
    for step, batch in ((7, 7), (8, 12), (11, 15), (12, 16)):
        assert _of_batch(skipping, step) == _of_batch(plain, batch)
    assert not Explanation(str(skipping), 7).skipped
    capsys.readouterr()
    explain.main([f"--model_dir={skipping}", "--step=9"])
    said = "step 9 reads batch 13; skipped by --data.skip=8:12: batches 8 to 11"
    assert capsys.readouterr().out.splitlines()[0] == said
    explain.main([f"--model_dir={skipping}", "--step=12", "--row=1"])
    assert "step 12 reads batch 16; skipped by --data.skip=8:12" in capsys.readouterr().out


def test_a_document_of_a_skipped_batch_was_not_seen(plain, skipping, capsys):
    shown = Explanation(str(plain), 9).row(2).parts[0].id
    seen, skipped = (list(Sightings(str(each)).of([shown])) for each in (plain, skipping))
    assert {each.step for each in seen} == {9}
    assert [(each.step, each.row) for each in skipped if each.skipped] == [
        (each.step, each.row) for each in seen
    ]
    capsys.readouterr()
    explain.main([f"--model_dir={skipping}", f"--document={shown}"])
    lines = capsys.readouterr().out
    assert f"batch 9, row 2: {shown} (" in lines
    assert "skipped by --data.skip=8:12" in lines
    assert lines.endswith(f"did not see {shown} in any of its {STEPS} steps\n")


def _of_batch(folder, batch):
    explained = Explanation(str(folder), batch)
    return [explained.line(row) for row in range(len(explained))]


def test_a_rewound_run_is_one_that_skipped_from_the_start(text_cache, copied, skipping, capsys):
    (copied / "evaluation.json").write_text('{"checkpoints": {"5": {}, "10": {}}}')
    for name in ("predictions/validation_5", "predictions/validation_15"):
        (copied / f"{name}.jsonl").parent.mkdir(exist_ok=True)
        (copied / f"{name}.jsonl").write_text("{}")
    spike = curve(copied)
    flags = (SKIP, "--rewind_to=5")
    train(text_cache, copied, *flags, kill=14)
    assert "renamed later checkpoints to rewound_checkpoint_10, rewound" in capsys.readouterr().err
    assert json.loads((copied / "evaluation.json").read_text()) == {"checkpoints": {"5": {}}}
    assert [path.name for path in (copied / "predictions").iterdir()] == ["validation_5.jsonl"]
    assert (copied / "rewound_checkpoint_20" / "predictions_validation_15.jsonl").exists()
    # The same command goes on after the rewind, and does not go back again.
    train(text_cache, copied, *flags, kill=18)
    assert "resumes from checkpoint 10" in capsys.readouterr().out
    train(text_cache, copied, *flags)
    assert "resumes from checkpoint 15" in capsys.readouterr().out
    assert_same_run(copied, skipping)
    train(text_cache, copied, *flags)
    train(text_cache, copied, SKIP)
    assert capsys.readouterr().out.count("training is finished") == 2
    change = "data.skip was (), is ('8:12',)"
    entry = {"after_update": 5, "by": "--rewind_to=5", "changes": [change]}
    assert history(copied) == metadata(copied, STEPS)["history"] == [entry]
    for step in (5, 9, 19):
        assert _of_batch(copied, step) == _of_batch(skipping, step)
    kept = copied / "rewound_checkpoint_20"
    assert {each.name for each in copied.glob("rewound_*")} == {
        f"rewound_checkpoint_{step}" for step in (10, 15, 20)
    }
    lines = map(json.loads, (kept / "metrics.jsonl").read_text().splitlines())
    assert [{**line, "speed": None} for line in lines] == spike
    # Another stretch: back again, with what the second attempt made set aside beside the first's.
    train(text_cache, copied, "--data.skip=8:14", "--rewind_to=5", kill=7)
    assert (copied / "rewound_checkpoint_20_2").is_dir()


def test_a_rewind_that_was_killed_goes_on(text_cache, copied, skipping, monkeypatch):
    moved = []

    def rename(source, target, _before=loop.files.rename_folder):
        if moved:
            raise Killed
        moved.append(target)
        return _before(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(loop.files, "rename_folder", rename)
        with pytest.raises(Killed):
            train(text_cache, copied, SKIP, "--rewind_to=5")
    train(text_cache, copied, SKIP, "--rewind_to=5")
    assert_same_run(copied, skipping)


def test_a_branch_without_changes_is_its_parents_continuation(skipping, tmp_path, capsys):
    parent = f"{skipping}@10"
    branched(tmp_path / "new", parent, kill=13)
    branched(tmp_path / "new", parent, kill=18)
    # It has its own checkpoints now, and does not need its parent any more.
    moved = skipping.rename(skipping.with_name("moved"))
    branched(tmp_path / "new", parent)
    moved.rename(skipping)
    assert_same_run(tmp_path / "new", skipping, after=10)
    entry = {"after_update": 10, "by": f"--branch_from={parent}", "changes": []}
    assert history(tmp_path / "new") == [entry]
    assert_equal(_of_batch(tmp_path / "new", 11), _of_batch(skipping, 11))
    with pytest.raises(UserError, match=rf"branched from {skipping} after update 10: give --mod"):
        Explanation(str(tmp_path / "new"), 10)
    found = verdict.compare((str(skipping), str(tmp_path / "new")), batches=-1)
    assert found.data.compared == (11, STEPS)
    assert found.data.batch is None


def test_a_branch_may_add_clipping(plain, tmp_path):
    # No gradient is as large, so only the place of the moments in the optimizer's chain changes.
    clipping = ("--optimizer.clip_norm=1e9", "--optimizer.clip_value=1e9")
    branched(tmp_path / "new", f"{plain}@10", *clipping, kill=17)
    branched(tmp_path / "new", f"{plain}@10", *clipping)
    branched(tmp_path / "back", f"{tmp_path}/new@15", "--optimizer.clip_norm=none")
    branched(tmp_path / "low", f"{plain}@10", "--optimizer.clip_norm=1e-3")
    new, back, low = (state(tmp_path / name, STEPS)["params"] for name in ("new", "back", "low"))
    expected = state(plain, STEPS)["params"]
    # Only the rounding of another compilation differs; without moments, percents would.
    for found in (new, back):
        assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not same(low, expected)


def test_a_cool_down_branch(plain, tmp_path):
    flags = (
        *("--optimizer.schedule=constant * linear_cooldown", "--optimizer.cooldown_start=10"),
        *("--optimizer.cooldown_steps=8", "--train_steps=18", "--data.skip=14:16"),
    )
    branched(tmp_path / "whole", f"{plain}@10", *flags)
    branched(tmp_path / "killed", f"{plain}@10", *flags, kill=17)
    branched(tmp_path / "killed", f"{plain}@10", *flags)
    assert_equal(state(tmp_path / "whole", 18), state(tmp_path / "killed", 18))
    assert curve(tmp_path / "whole") == curve(tmp_path / "killed")
    assert not same(state(tmp_path / "whole", 15)["params"], state(plain, 15)["params"])
    changes = " ".join(history(tmp_path / "whole")[0]["changes"])
    for path in ("optimizer.schedule", "optimizer.cooldown_steps", "data.skip", "train_steps"):
        assert f"{path} was " in changes
    # Data and dropout go on: only the rate and the skip differ.
    assert _of_batch(tmp_path / "whole", 13) == _of_batch(plain, 13)
    assert _of_batch(tmp_path / "whole", 14) == _of_batch(plain, 16)


def test_killed_around_changes_of_the_batch(text_cache, plain, growing, tmp_path):
    train(text_cache, tmp_path, kill=8)  # the schedule may be added while it is ahead
    for kill in (9, 13, 16):
        train(text_cache, tmp_path, GROWING, kill=kill)
    # Boundaries in tokens are the same schedule: 2,048 and 4,608 tokens.
    train(text_cache, tmp_path, "--batch_schedule=2.04K: 8; 4.608K: 2")
    assert_same_run(tmp_path, growing)
    change = "batch_schedule was , is 8: 8; 13: 2"
    assert history(tmp_path) == [{"after_update": 5, "by": "", "changes": [change]}]
    assert_equal(state(plain, 5), state(growing, 5))
    assert not same(state(plain, 10), state(growing, 10))


def test_killed_around_changes_of_length(text_cache, plain, tmp_path):
    train(text_cache, tmp_path / "whole", *LONGER)
    folder = tmp_path / "killed"
    # The second entry may change while it is ahead, as long as the longest rows stay.
    train(text_cache, folder, LONGER[0].partition(";")[0], GROWING, kill=9)
    for kill in (13, 16):
        train(text_cache, folder, *LONGER, kill=kill)
    train(text_cache, folder, *LONGER)
    assert_same_run(folder, tmp_path / "whole")
    assert not same(state(plain, 5), state(folder, 5))  # in another order from the start
    # Rows of either length are the ones explained, and their documents are found again.
    run = prepare(*load_config(str(folder)))
    for step, length in ((8, 64), (9, 128), (13, 128), (14, 64)):
        batch, explained = run.data.batches()[step - 1], Explanation(str(folder), step)
        assert batch["encoder_input_tokens"].shape == (len(explained), length)
        made = batch["encoder_input_tokens"][1]
        assert explained.sample(1).trace.inputs.tokens_L.tolist() == made[made > 0].tolist()
        shown = explained.row(1).parts[0].id
        assert (step, 1) in {(each.step, each.row) for each in Sightings(str(folder)).of([shown])}


def test_rows_before_and_after_changes_of_the_batch_are_explained(plain, growing):
    rows = [row for batch in range(1, STEPS + 1) for row in _placeless(plain, batch)]
    first = 0
    for step, size in enumerate([4] * 8 + [8] * 5 + [2] * 3, 1):
        assert _placeless(growing, step) == rows[first : first + size]
        first += size


def _placeless(folder, batch):
    return [line.partition(": ")[2] for line in _of_batch(folder, batch)]


def test_a_rewind_and_a_branch_change_the_batch(text_cache, copied, growing, plain, tmp_path):
    train(text_cache, copied, GROWING, "--rewind_to=5", kill=12)
    train(text_cache, copied, GROWING, "--rewind_to=5")
    assert_same_run(copied, growing)
    branched(tmp_path / "new", f"{plain}@5", GROWING, kill=17)
    branched(tmp_path / "new", f"{plain}@5", GROWING)
    assert_same_run(tmp_path / "new", growing, after=5)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([SKIP], "only --rewind_to an earlier checkpoint changes what it read"),
        ([SKIP, "--rewind_to=10"], "data.skip was unset, is 8:12, but update 10 is made"),
        ([GROWING], "batch_schedule was '', is '8: 8; 13: 2', different before update 20"),
        (LONGER, "they decide the order of all batches"),
        (["--rewind_to=7"], "--rewind_to=7: "),
        (["--rewind_to=7"], "has no checkpoint of step 7; it has 5, 10, 15, 20"),
        (["--rewind_to=0"], "--rewind_to=0: it must be 1 or more"),
        (["--branch_from={plain}@10"], "branch_from was None, is "),
        (["--branch_from={plain}@10", "--init_from={plain}"], "it must be left out if init_from"),
        (["--branch_from={plain}"], "it must be a run's folder and a checkpoint's step"),
    ],
)
def test_what_cannot_go_back_or_branch_is_refused(text_cache, plain, copied, capsys, flags, says):
    before = sorted(each.name for each in copied.iterdir())
    words = [f"--preset={TINY}", *flags_of(text_cache, copied, *FLAGS, *flags)]
    code, errors = ended("trainer.pretrain", [each.format(plain=plain) for each in words], capsys)
    assert_one_line(code, errors, says)
    assert [name for name in sorted(each.name for each in copied.iterdir())] == before


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--branch_from={plain}@7"], "has no checkpoint of step 7; it has 5, 10, 15, 20"),
        (["--branch_from=nowhere@7"], "nowhere holds no run"),
        (["--branch_from={plain}@20"], "raise it"),
        (["--branch_from={plain}@10", "--preset=t5_1_1_small"], "has t5_1_1_tiny, which a branch"),
        (["--branch_from={plain}@10", "--model.mlp_dim=8"], "a branch keeps its run's model"),
        (["--branch_from={plain}@10", SKIP], "but update 10 is made, which read batch 10"),
        (["--branch_from={plain}@10", "--optimizer.name=adafactor"],
         "optimizer.name was adamw, is adafactor; a branch has its run's state"),
        (["--branch_from={plain}@10", "--plateau.metric=loss", "--evaluation.every_steps=5"],
         "plateau.metric was None, is loss; a branch"),
        (["--branch_from={plain}@10", "--rewind_to=5"], "has no checkpoint yet"),
    ],
)  # fmt: skip
def test_a_branch_that_cannot_begin_is_refused(plain, tmp_path, capsys, flags, says):
    words = [each.format(plain=plain) for each in [*flags, f"--model_dir={tmp_path / 'new'}"]]
    code, errors = ended("trainer.pretrain", words, capsys)
    assert_one_line(code, errors, says)


def test_a_branch_into_the_folder_of_another_run_is_refused(plain, skipping, tmp_path, capsys):
    # Without a checkpoint, it is only its record that tells.
    shutil.copy(skipping / "config.json", tmp_path / "config.json")
    for folder in (tmp_path, skipping):
        words = [f"--branch_from={plain}@10", f"--model_dir={folder}"]
        code, errors = ended("trainer.pretrain", words, capsys)
        assert code == 2
        assert "did not branch from" in errors or "different settings (branch_from was" in errors
