"""Reports on runs: results, differences of configuration, what is missing, and the page."""

import html.parser
import json
import math
import shlex
from types import SimpleNamespace

import pytest

from tasks.objectives import Lengths
from tasks.terminal.command_line import UserError
from trainer.annexes.reports import curves, report, sections
from trainer.annexes.reports.page import page, results
from trainer.config import save_config
from trainer.config.from_flags import build_config
from trainer.reporting import drawing, history

EVIL = "<script>hacked=1<"


def made(folder, lines, *flags, record=None):
    """Writes a run with these lines of metrics: (step, split, metrics[, speed])."""
    folder.mkdir(parents=True)
    given = [f"--model_dir={folder}", "--train_steps=20", "--batch_size=4", *flags]
    config, origins = build_config("t5_1_1_tiny", given)
    save_config(config, origins, record)
    names = ("step", "split", "metrics", "speed")
    text = "".join(json.dumps(dict(zip(names, each, strict=False))) + "\n" for each in lines)
    (folder / "metrics.jsonl").write_text(text)
    return str(folder)


def training(steps, rate=2.0, loss=5.0):
    return [
        (
            step,
            "train",
            {"loss": loss + 10 / step, "gradient_norm": 1.0, "learning_rate": 0.1,
             "inputs_full": 0.75, "targets_full": 1.0},
            {"steps_per_second": rate, "tokens_per_second": 100 * rate, "mfu": 0.4,
             "host_memory_bytes": 3_000_000_000, "device_memory_bytes": 9_000_000_000},
        )
        for step in steps
    ]  # fmt: skip


def validation(step, loss, **more):
    values = {"loss": loss, "perplexity": math.exp(loss), "accuracy": 0.3, "unigram_entropy": 5.0}
    return step, "validation", {**values, **more}


class Parsed(html.parser.HTMLParser):
    """A page: text outside of scripts, tags, and the chart's data."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.data, self.inside = [], "", "", ""
        self.feed(text)
        self.charts = json.loads(self.data) if self.data else {"charts": []}

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.inside = dict(attributes).get("id") or tag

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside == "chart-data":
            self.data += data
        elif self.inside not in ("script", "style"):
            self.text += data


def parsed(*folders):
    return Parsed(page(history.load_all(folders)))


@pytest.mark.parametrize(
    ("entropy", "says"),
    [(5.688, "5.688 nats, 1.061 above the loss"), (2.0, "2.000 nats, 2.627 below the loss")],
)
def test_the_unigram_entropy_may_be_below_the_loss(entropy, says, tmp_path):
    line = validation(5, 4.627, unigram_entropy=entropy)
    run = history.load(made(tmp_path / "a", [line]), "a")
    assert dict(results(run))["unigram entropy"] == says


def test_every_command_to_run_next_can_be_pasted(tmp_path, capsys):
    folder = made(tmp_path / "my model", [*training([20]), validation(20, 4.6)])
    report.main([f"--model_dir={folder}"])
    lines = capsys.readouterr().out.partition("Next:\n")[2].splitlines()
    assert not any("…" in line for line in lines)
    assert lines[0].endswith("run the training command again with --train_steps=40")
    assert shlex.split(lines[1])[-2:] == [f"--model_dir={folder}", "--steps=all"]
    assert "set --metrics.tensorboard=true" in lines[2]
    (tmp_path / "my model" / "tensorboard").mkdir()
    report.main([f"--model_dir={folder}"])
    lines = capsys.readouterr().out.partition("Next:\n")[2].splitlines()
    assert shlex.split(lines[2], comments=True)[-1] == f"--logdir={folder}/tensorboard"
    assert lines[2].endswith("  # pip install tensorboard")


def test_charts_of_several_runs(tmp_path):
    shares = {"rates": [[0, [["a", 0.25], ["b", 0.75]]], [10, [["a", 1.0]]]]}
    ends = [validation(20, 4.5, bits_per_byte=1.5), (20, "validation/a", {"loss": 4})]
    one = made(tmp_path / "one", [*training([10, 20]), *ends], record=shares)
    other = made(tmp_path / "two", training([5, 15], rate=4.0), "--seed=3")
    found = parsed(one, other)
    charts = {chart["key"]: chart for chart in found.charts["charts"]}
    assert [each["label"] for each in charts["loss"]["series"]] == [
        "one train",
        "one validation",
        "two train",
    ]
    assert [each["colour"] for each in charts["loss"]["series"]] == [0, 0, 1]
    columns = found.charts["columns"][charts["loss"]["series"][2]["x"]]
    assert columns["steps"] == [5, 15]
    assert columns["tokens"] == [500, 1500]
    assert columns["hours"] == pytest.approx([5 / 4 / 3600, 15 / 4 / 3600], rel=1e-5)
    assert charts["padding"]["series"][0]["y"] == [0.25, 0.25]
    assert charts["memory"]["series"][0]["y"] == [9, 9]
    assert {"mfu", "learning_rate".replace("_", "-"), "bits-per-byte", "gradient-norm"} <= {*charts}
    assert "loss-validation-a" in charts
    # Differences of configuration, and the shares of the mixture.
    assert "seed" in found.text
    for share in ("25.00%", "75.00%", "100.00%"):
        assert share in found.text
    assert "two did not record the rates of its tasks" in found.text


def test_what_is_missing_is_said(tmp_path):
    empty = made(tmp_path / "empty", [])
    found = parsed(empty)
    assert "No training metrics yet" in found.text
    assert "No validation metrics yet" in found.text
    assert "No metrics are recorded yet" in found.text
    assert found.charts["charts"] == []
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match="holds no run"):
        history.load(str(tmp_path / "none"), "none")
    one = parsed(made(tmp_path / "one", [(1, "train", {"loss": 7.0}, {})]))
    assert [chart["key"] for chart in one.charts["charts"]] == ["loss"]
    # A single record has no speed, so there are no hours to draw over.
    assert list(one.charts["columns"][0]) == ["steps", "tokens"]


def test_values_that_are_not_finite_are_gaps_and_counted(tmp_path):
    lines = [(1, "train", {"loss": 7.0}), (2, "train", {"loss": math.nan}),
             (3, "validation", {"loss": math.inf, "unigram_entropy": 5.0})]  # fmt: skip
    found = parsed(made(tmp_path / "a", lines))
    assert found.charts["charts"][0]["series"][0]["y"] == [7.0, None]
    assert "2 values are not finite, which leaves gaps" in found.text


def test_evaluations_of_checkpoints_are_drawn_too(tmp_path):
    folder = made(tmp_path / "a", [validation(20, 4.5)])
    written = {
        "checkpoints": {"10": {"validation": {"loss": 4.75}}, "20": {"validation": {"loss": 9}}}
    }
    (tmp_path / "a" / "evaluation.json").write_text(json.dumps(written))
    points = history.load(folder, "a").points("validation", "loss")
    # What the run wrote counts where there are both.
    assert (points.steps, points.values) == ([10, 20], [4.75, 4.5])


def test_hours_follow_the_recorded_speed(tmp_path):
    lines = [(10, "train", {"loss": 1}, {}), (20, "train", {"loss": 1}, {"steps_per_second": 10.0}),
             (30, "train", {"loss": 1}, {"steps_per_second": 5.0})]  # fmt: skip
    run = history.load(made(tmp_path / "a", lines), "a")
    seconds = [3600 * hour for hour in run.hours([0, 10, 20, 25, 30, 40])]
    assert seconds == pytest.approx([0, 1, 2, 3, 4, 6])


@pytest.mark.parametrize(("has_decoder", "sides"), [(False, 1), (True, 2)])
def test_an_encoder_has_no_second_side(has_decoder, sides):
    run = SimpleNamespace(config=SimpleNamespace(model=SimpleNamespace(has_decoder=has_decoder)))
    phase = SimpleNamespace(rows=32, lengths=Lengths(512, 512))
    assert history.History._positions(run, phase) == sides * 32 * 512


def test_runs_are_named_by_what_tells_them_apart(tmp_path):
    folders = [made(tmp_path / f"{name}/model", training([5])) for name in ("x", "y")]
    assert [run.name for run in history.load_all(folders)] == ["x", "y"]
    nested = made(tmp_path / "x/model/model", training([5]))
    names = [run.name for run in history.load_all([folders[0], nested])]
    assert names[0] != names[1]
    assert history.load_all(folders[:1])[0].name == "model"
    with pytest.raises(UserError, match="named twice"):
        history.load_all([folders[0], f"{folders[0]}/"])


@pytest.mark.parametrize(
    ("name", "count"), [("task", 8), ("RONEC", 8), ("RONEC", 60), ("LONG" * 30, 1)]
)
def test_the_title_of_a_mixture_fits_its_picture(name, count, tmp_path, monkeypatch):
    from matplotlib import pyplot

    kept = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    tasks = [f"{name}_{number}_span_corruption={number}" for number in range(1, count + 1)]
    runs = history.load_all([made(tmp_path / "a", training([5, 10]), f"--task={','.join(tasks)}")])
    drawing.draw_losses(runs, str(tmp_path / "a.png"))
    (figure,) = kept
    title = figure.axes[0].title.get_window_extent()
    shown = figure.axes[0].title.get_text()
    assert shown.endswith("…") == (count == 60)
    assert count == 60 or tasks[-1] in shown.replace("\n", "")
    assert figure.bbox.contains(*title.p0)
    assert figure.bbox.contains(*title.p1)


def test_mistakes_are_one_line(tmp_path):
    with pytest.raises(UserError, match="name a run"):
        report.main([])
    with pytest.raises(UserError, match="--picture writes a PNG"):
        report.main(["x", "--output=x.png"])
    with pytest.raises(UserError, match="no loss to draw"):
        report.main([made(tmp_path / "a", []), f"--picture={tmp_path}/a.png"])
    with pytest.raises(UserError, match="is a folder: name a file"):
        report.main([str(tmp_path / "a"), f"--output={tmp_path}"])


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("evaluation.json", '{"checkpoints": []}', "is not what trainer.evaluate writes"),
        ("evaluation.json", '{"checkpoints": {"x": {}}}', "is not what trainer.evaluate writes"),
        ("evaluation.json", "[]", "is not what trainer.evaluate writes"),
        ("config.json", "[]", "has no configuration of a run"),
    ],
)
def test_a_damaged_file_of_a_run_is_named(tmp_path, name, text, says):
    folder = made(tmp_path / "a", training([20]))
    (tmp_path / "a" / name).write_text(text)
    with pytest.raises(UserError, match=says):
        report.main([folder])


def test_hostile_text_stays_text(tmp_path):
    folder = made(
        tmp_path / EVIL.replace("/", ""),
        [*training([5]), validation(10, 4.0), (10, "validation", {f"</script>{EVIL}": 1.0})],
        f"--metrics.wandb={EVIL}\x1b[31m\u202e",
    )
    found = page([history.load(folder, EVIL)] * 2)
    assert EVIL not in found
    assert "\x1b" not in found
    read = Parsed(found)
    assert read.tags.count("script") == 3
    assert EVIL in read.text
    labels = [each["label"] for chart in read.charts["charts"] for each in chart["series"]]
    assert any(EVIL in label for label in labels)
    keys = [chart.key for chart in curves.charts([history.load(folder, "a")])]
    assert all(key.replace("-", "").isalnum() for key in keys)


def test_a_cache_without_validation_text_has_no_completions():
    run = SimpleNamespace(config=SimpleNamespace(model=SimpleNamespace(has_decoder=True)))
    shown = sections._completed(run, SimpleNamespace(tasks=[]), 2, None)
    assert "The caches have no validation rows." in shown
