"""Files of sweeps: every one of experiments/files makes cells, and mistakes are named."""

import dataclasses

import pytest

from experiments import sweep as sweep_command
from experiments.sweeps import cells, definition
from experiments.sweeps.definition import FILES, Sweep
from tasks.terminal.command_line import UserError
from tests.support import parents

NAMES = sorted(path.stem for path in FILES.glob("*.toml"))


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_makes_cells_that_differ(name):
    sweep = definition.read(name)
    for parameter, make in (("parent", parents.decoder), ("model", parents.run)):
        if parameter in sweep.parameters:
            parameters = {**sweep.parameters, parameter: make()}
            sweep = dataclasses.replace(sweep, parameters=parameters)
    planned = cells.plan(sweep, "/somewhere")
    assert len(planned) == len(sweep.seeds) * sum(1 for _ in sweep.combinations())
    assert sweep.title
    assert len(sweep.seeds) >= 3 or not sweep.baseline  # differences need a spread
    folder = "/somewhere/cell"
    commands = {
        str(sorted(set(each.commands(folder)[0]) - {f"--seed={each.seed}"})).replace(
            f"_{each.seed}/cache", "/cache"
        )
        for each in planned
    }
    assert len(commands) == len(planned) / len(sweep.seeds)
    modules = {command[0] for cell in planned for command in cell.prepare}
    own = {"experiments.pairs", "experiments.few_pairs"}
    assert modules <= {"vocab.train", "pipeline.build", *own}
    page = FILES.parents[1] / "docs/experiments.md"
    assert f"experiments.sweep {name} " in page.read_text()


def write(tmp_path, text):
    (tmp_path / "mine.toml").write_text(text)
    return definition.read(str(tmp_path / "mine.toml"))


BASE = '[base]\npreset = "llama_tiny"\ntask = "mine_autoregressive_lm"\n'


def test_axes_parameters_and_choices_make_the_flags(tmp_path):
    sweep = write(
        tmp_path,
        'seeds = [3]\nprepare = ["{train}", "pipeline.build --x={folder}/{kind}"]\n'
        '[parameters]\nkind = "k"\nfolder = "{output}/made"\ntrain = ""\n'
        f'{BASE}train_steps = 100\ncache_dir = "{{folder}}"\nmodel.mlp_activations = ["relu"]\n'
        "[axes]\noptimizer.learning_rate = [0.5, 1]\n"
        '[choices.shape.wide]\nmodel = { emb_dim = 32 }\nkind = "w"\n'
        "[choices.shape.deep]\nmodel.num_decoder_layers = 3\n",
    )
    planned = cells.plan(sweep, "/o")
    assert [each.label for each in planned] == [
        "optimizer.learning_rate=0.5, shape=wide, seed 3",
        "optimizer.learning_rate=0.5, shape=deep, seed 3",
        "optimizer.learning_rate=1, shape=wide, seed 3",
        "optimizer.learning_rate=1, shape=deep, seed 3",
    ]
    wide, deep = planned[:2]
    assert (wide.config.model.emb_dim, deep.config.model.num_decoder_layers) == (32, 3)
    assert wide.config.optimizer.learning_rate == 0.5
    assert wide.config.model.mlp_activations == ("relu",)
    assert wide.config.cache_dir == "/o/made"
    assert wide.config.evaluation.every_steps == 10
    assert [each.prepare for each in planned[:2]] == [
        (("pipeline.build", "--x=/o/made/w"),),
        (("pipeline.build", "--x=/o/made/k"),),
    ]
    (command,) = wide.commands("/o/cells/one")
    assert command[0] == "trainer.pretrain"
    assert {"--seed=3", "--model_dir=/o/cells/one/run", "--model.emb_dim=32"} <= set(command)


@pytest.mark.parametrize(
    "length", ["train_steps = '1e3'", "train_steps = '1_000'", "train_tokens = '0.512M'"]
)
def test_a_run_is_evaluated_ten_times_however_its_length_is_written(tmp_path, length):
    lengths = "batch_size = 4\nlengths.targets = 128\n"
    lengths += 'optimizer.schedule = "constant * linear_decay"\n'
    (cell,) = cells.plan(write(tmp_path, f"{BASE}{length}\n{lengths}"), "/o")
    assert cell.config.evaluation.every_steps == 100
    assert cell.config.checkpoint.every_steps == 200
    assert "at update 1,000" in cells.rate(cell.config)


def test_a_second_run_begins_from_the_first(tmp_path):
    sweep = write(tmp_path, f'{BASE}[then]\ntask = "mine_supervised"\ntrain_steps = 40\n')
    (cell,) = cells.plan(sweep, "/o")
    first, second = cell.commands("/c")
    assert second[0] == "trainer.finetune"
    assert {"--init_from=/c/run", "--model_dir=/c/then", "--train_steps=40"} <= set(second)
    assert "--model_dir=/c/run" in first


def test_values_of_a_tuned_axis_that_go_with_one_choice(tmp_path):
    sweep = write(
        tmp_path,
        f'tune = "optimizer.learning_rate"\n{BASE}'
        "[choices.o.adamw.optimizer]\nname = 'adamw'\nlearning_rate = [0.01, 0.1]\n"
        "[choices.o.adafactor.optimizer]\nname = 'adafactor'\nlearning_rate = [0.1, 1]\n",
    )
    labels = [[each.label for each in choices] for choices in sweep.combinations()]
    assert labels == [["adamw", "0.01"], ["adamw", "0.1"], ["adafactor", "0.1"], ["adafactor", "1"]]
    wider = definition.with_axis(sweep, "optimizer.learning_rate=3,4")
    assert len(list(wider.combinations())) == 4
    assert cells.plan(wider, "/o")[0].config.optimizer.learning_rate == 3


def test_flags_change_parameters_and_fields_but_no_axis(tmp_path):
    sweep = write(
        tmp_path, f'[parameters]\nsize = "1"\n{BASE}[axes]\nmodel.position = ["none", "rotary"]\n'
    )
    changed = definition.with_flags(sweep, ["--size=2", "--batch_size=4", "--then.task=x"])
    assert changed.parameters == {"size": "2"}
    assert changed.base["batch_size"] == "4"
    assert changed.then == {"task": "x"}
    with pytest.raises(UserError, match=r"varies --model\.position: set --axis=model\.position=A"):
        definition.with_flags(sweep, ["--model.position=alibi"])
    fewer = definition.with_axis(sweep, "model.position=alibi")
    assert [each.label for each in fewer.axes[0].choices] == ["alibi"]
    listed = definition.with_axis(Sweep("s"), "model.mlp_activations=relu;gelu,linear")
    assert [each.label for each in listed.axes[0].choices] == ["relu", "gelu,linear"]


def test_a_baseline_may_be_rates_of_a_mixture():
    axis = "--axis=task=a_ul2=0.5,b_ul2=0.5;a_ul2=1"
    made = sweep_command.defined(
        [axis, "--output=o", "--baseline=a_ul2=0.5,b_ul2=0.5", "--preset=t5_1_1_tiny"]
    )
    assert made.baseline == {"task": "a_ul2=0.5,b_ul2=0.5"}
    # With several axes, their name comes first.
    axes = ("--axis=model.mlp_activations=relu;gelu,linear", "--axis=batch_size=8,16", "--output=o")
    for baseline in ("model.mlp_activations=gelu,linear", "model.mlp_activations=gelu,linear;"):
        made = sweep_command.defined([*axes, f"--baseline={baseline}", "--preset=t5_1_1_tiny"])
        assert made.baseline == {"model.mlp_activations": "gelu,linear"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("bsae = 1", r"unknown key bsae \(did you mean base\?\)"),
        ("a = ", "is not TOML"),
        ("seeds = []", "no cells: seeds is empty"),
        ("seeds = [1, 1]", "a seed occurs twice"),
        ("[axes]\nbatch_size = []", "no cells: the axis batch_size has no values"),
        ("[axes]\nbatch_size = [1, 1]", "a value of the axis batch_size occurs twice"),
        ("[axes]\nbatch_size = 3", "axes.batch_size must be a list"),
        ("baseline = 'x'\n[axes]\nbatch_size = [1]", "axis batch_size has no value x; it has 1"),
        ("baseline = { bach_size = 1 }\n[axes]\nbatch_size = [1]", "there is no axis bach_size"),
        ("tune = 'x'\n[axes]\nbatch_size = [1]", "tune: there is no axis x"),
        ("tune_seeds = 1\n[axes]\nbatch_size = [1]", "tune_seeds=1: there is no axis to tune"),
        ("tune = 'a'\ntune_seeds = 0\n[axes]\na = [1]", "tune_seeds=0: give the number of seeds"),
        ("[axes]\nbatch_size = [1, 1.0]", "batch_size occurs twice, written differently"),
        ("baseline = 'x'", "baseline is a value of an axis, but there is no axis"),
        ("[choices]\nx = 1", "choices.x must have a table of fields for each label"),
        (
            "[choices.x.a]\nbatch_size = 1\n[choices.y.a]\nbatch_size = 2",
            "axes x and y both set batch_size",
        ),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path, text, says):
    with pytest.raises(UserError, match=rf"mine\.toml(:| is).*{says}|{says}"):
        write(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("optimizer.learnin_rate = 1", r"unknown flag --optimizer\.learnin_rate \(did you mean"),
        ("batch_size = 'many'", "--batch_size=many: it must be"),
        ("cache_dir = '{fodler}'", "there is no parameter fodler"),
        ("cache_dir = '{'", "write a literal brace twice"),
        ("cache_dir = '{output:d}'", "braces may contain only a parameter name"),
        ("cache_dir = '{}'", "braces may contain only a parameter name"),
        ("evaluation.every_steps = 0", r"evaluation\.every_steps must be above 0"),
        ("seed = 3", "seed is set by the sweep"),
        ("model_dir = 'x'", "model_dir is set by the sweep"),
    ],
)
def test_a_field_that_no_cell_can_have_is_named(tmp_path, text, says):
    with pytest.raises(UserError, match=says):
        cells.plan(write(tmp_path, BASE + text), "/o")


def test_commands_before_the_cells_keep_spaces_and_quotes(tmp_path):
    sweep = write(
        tmp_path,
        f'prepare = ["{{train}}", "pipeline.build --corpus={{corpus}} --x=\'a b\'"]\n{BASE}'
        '[parameters]\ncorpus = ""\ntrain = "vocab.train --corpus={corpus}"\n',
    )
    corpus = "parquet:it's here/*.parquet"
    (cell,) = cells.plan(definition.with_flags(sweep, [f"--corpus={corpus}"]), "/o")
    assert cell.prepare == (
        ("vocab.train", f"--corpus={corpus}"),
        ("pipeline.build", f"--corpus={corpus}", "--x=a b"),
    )
    unclosed = write(tmp_path, f'prepare = ["vocab.train --x=\'a"]\n{BASE}')
    with pytest.raises(UserError, match="No closing quotation"):
        cells.plan(unclosed, "/o")


def test_an_unknown_experiment_is_named():
    with pytest.raises(UserError, match=r"no experiment primr \(did you mean primer\?\)"):
        definition.read("primr")


def test_a_flag_in_tokens_replaces_the_files_rows_and_both_are_refused(tmp_path):
    text = f"{BASE}train_steps = 10\nbatch_size = 4\nlengths.targets = 128\n"
    sweep = definition.with_flags(write(tmp_path, text), ["--tokens_per_batch=1024"])
    assert "batch_size" not in sweep.base
    (cell,) = cells.plan(sweep, "/o")
    assert cell.config.tokens_per_batch == 1024
    varied = definition.with_axis(write(tmp_path, text), "tokens_per_batch=1024,2048")
    sizes = [each.config.tokens_per_batch for each in cells.plan(varied, "/o")]
    assert sizes == [1024, 2048]
    both = write(tmp_path, f"{text}tokens_per_batch = 1024\n")
    with pytest.raises(UserError, match="batch_size and tokens_per_batch are alternatives"):
        cells.plan(both, "/o")
