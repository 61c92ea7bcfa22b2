"""`trainer.generate` and `trainer.evaluate` on two processes, which write what one writes."""

import json
from pathlib import Path

import pytest

from tasks.terminal.command_line import UserError
from tests.support.runs import command, finish, start_all
from tests.trainer.huggingface.test_export import save_run
from trainer import evaluate, generate

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def run(text_cache, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_processes") / "t5"
    return save_run(text_cache, folder, "t5_1_1_tiny", "--lengths.inputs=64")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sample", "beam"])
def test_two_processes_generate_what_one_does(run, tmp_path, method):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"The list <extra_id_0> {'number ' * n}.\n" for n in range(5)))
    flags = [f"--model_dir={run}", f"--input={prompts}", f"--method={method}"]
    flags += ["--max_new_tokens=5", "--batch_size=4"]
    generate.main([*flags, f"--output={tmp_path}/one.jsonl"])
    both = start_all(command("trainer.generate", *flags, f"--output={tmp_path}/two.jsonl"))
    (first, _), (second, _) = finish(both)
    assert "5 prompts" in first
    assert "prompts" not in second
    one, two = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert len(one) == 5
    for mine, theirs in zip(one, two, strict=True):
        assert theirs["prompt"] == mine["prompt"]
        assert theirs["results"][0].pop("score") == pytest.approx(
            mine["results"][0].pop("score"), abs=2e-4
        )
        assert theirs == mine


@pytest.mark.slow
def test_two_processes_evaluate_as_one_does(run, tmp_path):
    flags = [f"--model_dir={run}", "--metrics=exact_match,character_error_rate", "--examples=6"]
    path, predictions = tmp_path / "one.jsonl", Path(run) / "predictions" / "validation_2.jsonl"
    evaluate.main([*flags, f"--output={path}"])
    one = json.loads(path.read_text())["metrics"]
    lines = predictions.read_text().splitlines()
    predictions.unlink()
    path = tmp_path / "two.jsonl"
    both = start_all(command("trainer.evaluate", *flags, f"--output={path}"))
    (first, _), (second, _) = finish(both)
    assert "exact_match" in first
    assert "loss" not in second
    assert json.loads(path.read_text())["metrics"] == pytest.approx(one, rel=2e-5)
    again = predictions.read_text().splitlines()
    texts = [[json.loads(line)["prediction"] for line in each] for each in (lines, again)]
    assert len(lines) == 6
    assert texts[0] == texts[1]


def test_processes_that_do_not_fit_are_refused(run):
    flags = ["--prompt=a", "--processes.coordinator=localhost:1", "--processes.count=2"]
    with pytest.raises(UserError, match=r"--processes\.index: it must be set if"):
        generate.main([f"--model_dir={run}", *flags])
