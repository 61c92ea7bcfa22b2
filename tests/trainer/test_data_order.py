"""The order of data has a version; what no epoch reads is counted."""

import json

import pytest

from tasks.terminal.command_line import UserError
from trainer.config import config_changes, load_config, save_config
from trainer.config.from_flags import build_config
from trainer.setup import prepare

TASK = "python_docs_span_corruption"


def config_of(*flags):
    return build_config("t5_1_1_tiny", list(flags))


def run_of(cache, *flags):
    arguments = [f"--task={TASK}", f"--cache_dir={cache}", "--model_dir=nowhere", "--batch_size=8"]
    return prepare(*config_of(*arguments, *flags))


def forget_the_order(model_dir):
    """Leaves the config.json of a run begun before orders had a version."""
    path = model_dir / "config.json"
    value = json.loads(path.read_text())
    del value["config"]["data"]["order"]
    path.write_text(json.dumps(value))


def test_a_run_from_before_versions_is_refused(tmp_path):
    save_config(*config_of(f"--model_dir={tmp_path}"))
    assert load_config(str(tmp_path))[0].data.order == 2
    forget_the_order(tmp_path)
    with pytest.raises(UserError, match=r"data\.order is 1; it must be one of 2"):
        load_config(str(tmp_path))


def test_windows_run_over_the_borders_of_shards(text_cache):
    run = run_of(text_cache)
    manifest = run.data.tasks[0].manifest
    tokens = [shard.tokens for shard in manifest.splits["train"]]
    windows = run.data.sources[0].maker.windows
    assert len(windows) == sum(tokens) // windows.window_tokens
    rows = sum(each.batches for each in run.data.evaluation("validation", 1))
    held = [shard.tokens for shard in manifest.splits["validation"]]
    assert rows == -(-sum(held) // windows.window_tokens)


@pytest.mark.parametrize(
    ("flags", "warned", "says"),
    [
        ((), False, "are not read: the unfinished last window"),
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
