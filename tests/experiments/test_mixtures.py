"""Mixture search: a known law found again, laws that runs do not identify, a search end to end."""

import json
import pathlib
import re
import sys

import numpy as np
import pytest

from experiments import mixtures as mixtures_command
from experiments.laws import mixture
from experiments.sweeps import definition
from tasks.terminal.command_line import UserError
from tests.support import in_process
from tests.support.processes import completed

TASKS = ("docs_full_lm", "code_full_lm", "en_full_lm", "ro_full_lm")
# The other law takes seconds.
FORM = "--form=exponential"
AROUND = "docs_full_lm=0.22,code_full_lm=0.45,en_full_lm=0.15,ro_full_lm=0.18"
# c and t of each task: its own share lowers its loss most.
LAWS = np.array(
    [
        [0.5, -2.0, 0.3, 0.4, 0.4],
        [1.0, 0.3, -1.5, 0.2, 0.1],
        [0.8, 0.2, 0.1, -2.2, 0.4],
        [1.0, 0.5, 0.5, 0.2, -2.0],
    ]
)
NOISE = 0.005


EXPONENTIAL, POWER = (mixture.FORMS[name] for name in ("exponential", "power"))


def losses(shares, noise=NOISE, form=EXPONENTIAL, laws=LAWS):
    exact = form.at(laws, shares[:, None])
    return exact + np.random.default_rng(1).normal(0, noise, exact.shape)


def mixtures(*flags):
    return in_process.run("experiments.mixtures", *flags)


def refused(says, *flags):
    found = mixtures(*flags)
    assert found.returncode == 2
    assert says in found.stderr
    assert len(found.stderr.splitlines()) == 1


@pytest.fixture(scope="module")
def drawn():
    return mixture.draw(np.array([0.22, 0.45, 0.15, 0.18]), 24)


def test_a_known_law_is_found_again(drawn):
    found = mixture.fit(EXPONENTIAL, drawn, losses(drawn))
    assert found.refusal == ""
    assert found.rank_correlation > 0.95
    assert found.error < 2 * NOISE
    # Only differences of a task's t are identified well: a common part is a factor of exp.
    differences = found.laws[:, 1:] - found.laws[:, 1:].mean(axis=1, keepdims=True)
    truth = LAWS[:, 1:] - LAWS[:, 1:].mean(axis=1, keepdims=True)
    np.testing.assert_allclose(differences, truth, atol=0.3)
    best, low, high = found.best()
    # The minimum by random shares.
    tried = np.random.default_rng(2).dirichlet(np.ones(4), 50_000)
    exact = losses(tried, noise=0).mean(axis=1)
    np.testing.assert_allclose(best, tried[exact.argmin()], atol=0.05)
    assert (low <= best).all()
    assert (best <= high).all()
    value, below, above = found.at(best)
    assert below < losses(best[None], noise=0).mean() < above
    assert value == pytest.approx(exact.min(), abs=2 * NOISE)
    # The mean of four losses has half the noise of one; 95 % are within twice that.
    assert 1.5 * NOISE < above - below < 4 * NOISE


def test_a_power_law_of_effective_tokens_is_found_again(drawn):
    """A token of another task counts a tenth: then no task's share can be left to the others."""
    a = 4 * (0.1 + 0.9 * np.eye(4))
    laws = np.column_stack([[1.0, 1.5, 2.0, 1.2], np.full(4, 0.5), a])
    found = mixture.fit(POWER, drawn, losses(drawn, NOISE / 10, POWER, laws), draws=5)
    assert found.refusal == ""
    np.testing.assert_allclose(found.laws[:, 0], laws[:, 0], atol=0.1)
    share = found.laws[:, 2:] / np.diag(found.laws[:, 2:])[:, None]
    np.testing.assert_allclose(share, a / 4, atol=0.05)
    # All tasks fall alike, so their best shares are equal.
    np.testing.assert_allclose(found.best()[0], 0.25, atol=0.01)
    worse = mixture.fit(EXPONENTIAL, drawn, losses(drawn, NOISE / 10, POWER, laws), draws=5)
    assert worse.error > 2 * found.error


def test_mixtures_that_identify_nothing_are_refused(drawn):
    with pytest.raises(UserError, match="9 mixtures cannot identify a law of 4 tasks: give 10"):
        mixture.fit(EXPONENTIAL, drawn[:9], losses(drawn[:9]))
    tied = drawn.copy()
    tied[:, 0] = tied[:, 1]
    with pytest.raises(UserError, match="depend on each other"):
        mixture.fit(EXPONENTIAL, tied, losses(tied))
    noisy = mixture.fit(EXPONENTIAL, drawn, losses(drawn, noise=0.15), draws=5)
    assert "do not identify the law" in noisy.refusal
    constant = mixture.fit(EXPONENTIAL, drawn, np.full((len(drawn), 4), 2.0), draws=5)
    assert "do not identify the law" in constant.refusal


def mixed(shares):
    return ",".join(f"{task}={share:.4f}" for task, share in zip(TASKS, shares, strict=True))


def write(folder, shares, values):
    """Writes the results of a sweep as experiments.sweep does, of these shares and losses."""
    folder.mkdir(exist_ok=True)
    lines = []
    for place, (each, row) in enumerate(zip(shares, values, strict=True)):
        metrics = {f"{task}/loss": value for task, value in zip(TASKS, row, strict=True)}
        line = {"values": {"task": mixed(each)}, "seed": place, "metrics": metrics}
        lines.append(json.dumps(line) + "\n")
    lines.append(json.dumps({"values": {"task": mixed(shares[0])}, "status": "failed"}) + "\n")
    (folder / "results.jsonl").write_text("".join(lines))
    return folder


def test_a_search_is_printed_and_compared(drawn, tmp_path):
    done = write(tmp_path / "done", drawn, losses(drawn))
    unseen = np.tile(mixture.draw(np.ones(4), 1, seed=7), (3, 1))
    test = write(tmp_path / "test", unseen, losses(unseen))
    found = mixtures("fit", done, "--metric=loss", FORM, f"--against={test}")
    assert found.returncode == 0, found.stderr
    assert "24 mixtures" in found.stdout
    assert "| t of ro_full_lm" in found.stdout
    row = found.stdout.splitlines()[-1]
    assert mixed(unseen[0])[:14] in row
    assert abs(float(row.split("|")[-2])) < 2 * NOISE
    # With one target its own task is best; no share leaves its range in the runs.
    one = mixtures("fit", done, "--metric=min:loss", FORM, "--targets=en_full_lm").stdout
    assert "mean of en_full_lm:" in one
    assert f"| {drawn[:, 2].max():.4f} |" in one


def test_mistakes_are_one_line(drawn, tmp_path):
    done = write(tmp_path / "done", drawn, losses(drawn))
    refused("--number has no effect on fit", "fit", done, "--number=3")
    refused("--targets has no effect on draw", "draw", AROUND, "--targets=a")
    refused("a,b=1: give two tasks or more with their rates", "draw", "a,b=1")
    refused("nowhere is not the folder of a sweep", "fit", "nowhere")
    refused("--metric=accuracy is better when higher", "fit", done, "--metric=accuracy")
    refused("--metric=docs_full_lm/bits_per_byte: these tasks do not have", "fit", done)
    refused(
        "--metric=x_ul2/loss: these tasks", "fit", done, "--metric=loss", FORM, "--targets=x_ul2"
    )
    noisy = write(tmp_path / "noisy", drawn, losses(drawn, noise=0.15))
    refused("do not identify the law", "fit", noisy, "--metric=loss", FORM)
    text = (done / "results.jsonl").read_text()
    first, rest = text.split("\n", 1)
    other = first.replace("ro_full_lm", "x_full_lm")
    (done / "results.jsonl").write_text(f"{other}\n{rest}")
    refused("en_full_lm, ro_full_lm, not docs_full_lm, code", "fit", done, "--metric=loss", FORM)
    (done / "results.jsonl").write_text(re.sub(r'/loss": [0-9.]+', '/loss": "nan"', first))
    refused("has docs_full_lm/loss nan", "fit", done, "--metric=loss", FORM)
    (done / "results.jsonl").write_text(text.replace('"task":', '"preset":'))
    refused("must have the axis task alone", "fit", done, "--metric=loss", FORM)


def test_the_file_holds_what_the_command_draws():
    drawn = mixtures("draw", AROUND).stdout.strip().split(";")
    assert [each.label for each in definition.read("mixtures").axis("task").choices] == drawn
    assert mixtures("draw", AROUND, "--number=1", "--seed=1").stdout.strip() not in drawn


SWEEP = '''
prepare = [
  "vocab.train --corpus={words} --corpus={numbers} --vocab_size=300 --output={output}/vocabulary",
  """pipeline.build --task=full_lm --name=words --corpus={words}
    --vocabulary={output}/vocabulary --cache_dir={output}/cache""",
  """pipeline.build --task=full_lm --name=numbers --corpus={numbers}
    --vocabulary={output}/vocabulary --cache_dir={output}/cache""",
]

[parameters]
words = ""
numbers = ""

[base]
preset = "tiny_transformer_vanilla"
cache_dir = "{output}/cache"
train_steps = 60
batch_size = 4
lengths.targets = 32
model.num_decoder_layers = 1
evaluation.every_steps = 60
'''


@pytest.mark.slow
def test_a_search_from_draws_to_comparison(tmp_path):
    words = (pathlib.Path(__file__).parents[2] / "README.md").read_text().split()
    numbers = [str(each**3) for each in range(len(words))]
    for name, parts in (("words", words), ("numbers", numbers)):
        lines = [" ".join(parts[at : at + 8]) for at in range(0, len(parts), 8)]
        for split, of_split in (("validation", lines[::5]), ("train", lines)):
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            (folder / f"{split}.txt").write_text("\n".join(of_split))
    (tmp_path / "tiny.toml").write_text(SWEEP)
    drawn = mixtures("draw", "words_full_lm=1,numbers_full_lm=1", "--number=8").stdout.strip()
    corpora = [
        f"--{name}=text:{tmp_path}/{name}/*.txt?split=train" for name in ("words", "numbers")
    ]
    sweep = [sys.executable, "-m", "experiments.sweep", str(tmp_path / "tiny.toml"), *corpora]
    done = completed([*sweep, f"--output={tmp_path}/done", f"--axis=task={drawn}"])
    assert done.returncode == 0, done.stdout + done.stderr
    found = mixtures("fit", tmp_path / "done", f"--against={tmp_path}/done")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "8 mixtures" in found.stdout
    differences = [float(row.split("|")[-2]) for row in found.stdout.splitlines()[-8:]]
    assert max(map(abs, differences)) < 0.1


def test_draws_differ_or_are_refused(capsys):
    assert mixtures_command.main(["draw", "a=0.8,b=0.1,c=0.1", "--number=12"]) == 0
    drawn = capsys.readouterr().out.strip().split(";")
    assert len(set(drawn)) == len(drawn) == 12
    with pytest.raises(UserError, match="mixtures differ after rounding"):
        mixtures_command.main(["draw", "a=0.998,b=0.001,c=0.001", "--number=30"])


def test_a_damaged_table_of_results_is_named(tmp_path):
    (tmp_path / "results.jsonl").write_text('{"values": {"task"')
    with pytest.raises(UserError, match="has a line that is not JSON"):
        mixtures_command.main(["fit", str(tmp_path)])
    for line in ("[]", '{"seed": 0}'):
        (tmp_path / "results.jsonl").write_text(line)
        with pytest.raises(UserError, match="has a line without values"):
            mixtures_command.main(["fit", str(tmp_path)])
