"""The order of data has a version, which a run keeps; what no epoch reads is counted."""

import json

import numpy as np
import pytest

from tasks.terminal.command_line import UserError
from trainer import pretrain
from trainer.config import config_changes, keep_order, load_config, save_config
from trainer.config.unused_fields import refuse_idle
from trainer.setup import prepare

TASK = "python_docs_span_corruption"


def config_of(*flags):
    return pretrain.build_config("t5_1_1_tiny", list(flags))


def run_of(cache, *flags):
    arguments = [f"--task={TASK}", f"--cache_dir={cache}", "--model_dir=nowhere", "--batch_size=8"]
    return prepare(*config_of(*arguments, *flags))


def forget_the_order(model_dir):
    """Leaves the config.json of a run begun before orders had a version."""
    path = model_dir / "config.json"
    value = json.loads(path.read_text())
    del value["config"]["data"]["order"]
    path.write_text(json.dumps(value))


def test_a_run_from_before_versions_keeps_the_first(tmp_path):
    config, origins = config_of(f"--model_dir={tmp_path}")
    assert config.data.order == 2
    assert keep_order(config, origins) is config
    save_config(config, origins)
    assert load_config(str(tmp_path))[0].data.order == 2
    assert keep_order(config, origins) == config
    assert "data.order" not in origins

    forget_the_order(tmp_path)
    stored, _ = load_config(str(tmp_path))
    assert stored.data.order == 1
    assert config_changes(stored, config, 5) == ["data.order was 1, is 2"]
    resumed = keep_order(config, origins)
    assert config_changes(stored, resumed, 5) == []
    assert origins["data.order"] == "the run in model_dir"
    # Set on the command line, it is refused like any other difference.
    insisted, typed = config_of(f"--model_dir={tmp_path}", "--data.order=2")
    assert keep_order(insisted, typed) is insisted


@pytest.mark.parametrize(
    "text", ["{}", '{"config": {}}', '{"config": []}', '{"config": {"data": {"order": 3}}}']
)
def test_a_configuration_that_cannot_be_read_is_one_line(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json is not a run's configuration of this"):
        keep_order(*config_of(f"--model_dir={tmp_path}"))


def test_the_version_is_no_setting_of_seqio_tasks():
    config, origins = config_of("--task=seqio:anything", "--data.order=1")
    with pytest.raises(UserError, match="order has no effect: seqio orders"):
        refuse_idle(config, origins)
    assert config_changes(config, config_of("--task=seqio:anything")[0], 5) == []


def test_the_version_decides_windows_and_their_order(text_cache):
    runs = {version: run_of(text_cache, f"--data.order={version}") for version in (1, 2)}
    manifest = runs[2].data.tasks[0].manifest
    tokens = [shard.tokens for shard in manifest.splits["train"]]
    width = runs[2].data.sources[0].maker.windows.window_tokens
    counts = {version: len(run.data.sources[0].maker.windows) for version, run in runs.items()}
    assert counts == {1: sum(count // width for count in tokens), 2: sum(tokens) // width}
    assert counts[1] < counts[2]
    first = {version: run.data.batches().places(0).windows for version, run in runs.items()}
    assert not np.array_equal(first[1], first[2])
    rows = {
        version: sum(each.batches for each in run.data.evaluation("validation", 1))
        for version, run in runs.items()
    }
    held = [shard.tokens for shard in manifest.splits["validation"]]
    assert rows == {1: sum(-(-count // width) for count in held), 2: -(-sum(held) // width)}


@pytest.mark.parametrize(
    ("flags", "warned", "says"),
    [
        ((), False, "are not read: the unfinished last window"),
        (("--data.order=1",), True, "window of each shard; a run in another --model_dir"),
        (
            ("--lengths.inputs=1600", "--lengths.targets=400"),
            True,
            "the unfinished last window; use more text or shorter lengths",
        ),
    ],
)
def test_tokens_that_no_epoch_reads_are_counted_at_the_start(text_cache, flags, warned, says):
    run = run_of(text_cache, *flags)
    windows = run.data.sources[0].maker.windows
    total = run.data.tasks[0].manifest.total("train", "tokens")
    unread = total - len(windows) * windows.window_tokens
    lines = [line for line in run.data.consequences() if "are not read" in line[1]]
    ((subject, text),) = lines
    assert text.startswith(f"{unread:,} tokens ({unread / total:.2%}) of {total:,} are not read")
    assert text.endswith(says) or says in text
    assert (subject == "warning") == warned == (unread >= total / 100)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--model.dropout_rate=0.1",), "each part of the batch draws its own dropout"),
        (("--model.num_experts=4",), "tokens are routed to experts within a part"),
    ],
)
def test_microbatches_may_change_only_where_they_change_nothing_else(flags, why):
    def changes(*others):
        return config_changes(
            config_of(*others)[0], config_of("--microbatches=2", *others)[0], step=5
        )

    assert changes() == []
    assert len(changes(*flags)) == 1
    assert changes(*flags)[0].startswith("microbatches was 1, is 2, and " + why)


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--lengths.inputs=1", r"--lengths\.inputs=1 --lengths\.targets=114: inputs length 1"),
        ("--mixing.schedule=nonsense", r"--mixing\.schedule: nonsense: write STEP:TASK=RATE"),
    ],
)
def test_a_mistake_in_a_flag_names_the_flag(text_cache, flag, says):
    with pytest.raises(UserError, match=says):
        run_of(text_cache, flag)
