"""Invalid files are refused with file and line, and nothing in them is executed."""

import pathlib
import sys

import pytest

from tasks.terminal import foreign_flags
from tasks.terminal.command_line import UserError
from tests.support.processes import started
from tests.trainer.conftest import assert_one_line, ended
from trainer.annexes.gin import recipe
from trainer.pretrain import main

ROOT = pathlib.Path(__file__).parents[4]
GOOD = """\
include 't5x/examples/t5/t5_1_1/tiny.gin'
include 't5x/configs/runs/pretrain.gin'
from t5x import utils
import trap
MIXTURE_OR_TASK_NAME = 'rlm_span_corruption'
TASK_FEATURE_LENGTHS = {'inputs': 64, 'targets': 18}
TRAIN_STEPS = 5
DROPOUT_RATE = 0.0
MODEL_DIR = 'model'
"""
# What is added to a good file as its line 10, and what the one line of error has besides the place.
BROKEN = {
    "unknown argument": ("utils.SaveCheckpointConfig.perod = 5", ["no argument perod", "period?"]),
    "unknown configurable": ("utils.SaveCheckpointConfg.period = 5", ["SaveCheckpointConfig?"]),
    "another module's": (
        "from my_library import utils as mine\nmine.SaveCheckpointConfig.period = 5",
        [":11", "my_library.utils.SaveCheckpointConfig"],
    ),
    "wrong type": (
        "utils.SaveCheckpointConfig.period = 'often'",
        ["checkpoint.every_steps", "int"],
    ),
    "a float for an integer": ("TRAIN_STEPS = 1e6", ["via TRAIN_STEPS", "train_steps", "int"]),
    "a number for a text": ("MODEL_DIR = 7", ["via MODEL_DIR", "model_dir", "str"]),
    "a truth for a number": ("BATCH_SIZE = True", ["via BATCH_SIZE", "batch_size", "int"]),
    "lengths that are none": ("TASK_FEATURE_LENGTHS = 512", ["{'inputs': 512, 'targets': 114}"]),
    "a length that is none": (
        "TASK_FEATURE_LENGTHS = {'inputs': 64, 'targets': '18'}",
        ["must be lengths", "'18'"],
    ),
    "a value that makes no sense": (
        "Z_LOSS = -1.0",
        ["via Z_LOSS", "loss.z_loss is -1.0; it must be 0 or more"],
    ),
    "no steps": ("TRAIN_STEPS = 0", ["via TRAIN_STEPS", "train_steps is 0", "1 to 2**31 - 1"]),
    "no rows": ("BATCH_SIZE = -8", ["via BATCH_SIZE", "batch_size is -8"]),
    "a factor that is none": (
        "create_learning_rate_scheduler.factors = 'constnat'",
        ["optimizer.schedule", "constnat"],
    ),
    "missing include": ("include 'ro_pretrain.gin'", ["ro_pretrain.gin", "--gin_search_paths"]),
    "missing file of T5X's": (
        "include 't5x/configs/runs/pretrian.gin'",
        ["t5x/configs/runs/pretrain.gin?"],
    ),
    "a circle of files": (
        "include 'other.gin'",
        ["other.gin:1: ", "in a circle: run.gin -> other.gin -> run.gin"],
    ),
    "a circle of macros": (
        "A = %B\nB = %A\nTRAIN_STEPS = %A",
        [":11", "in a circle", "%A -> %B -> %A"],
    ),
    "unknown macro": ("train.total_steps = %TRAIN_STEP", ["%TRAIN_STEP", "TRAIN_STEPS?"]),
    "what must be set": (
        "TRAIN_STEPS = %gin.REQUIRED",
        ["TRAIN_STEPS must be set: --train_steps=VALUE, or --gin.TRAIN_STEPS=VALUE"],
    ),
    "a program": ("MODEL_DIR = @os.system()", ["@os.system()", "nothing"]),
    "a program in place of a part": (
        "train.partitioner = @os.system('touch executed')",
        ["Expected ')'"],
    ),
    "a call": ("MODEL_DIR = os.system('touch executed')", ["literal"]),
    "a product": ("TRAIN_STEPS = 2 * 3", ["Expected newline", "literal"]),
    "no syntax": ("TRAIN_STEPS =\n", ["Unable to parse"]),
    "an open bracket": ("TASK_FEATURE_LENGTHS = {'inputs': 64,", ["EOF"]),
    "another data set to evaluate": (
        "train_eval/utils.DatasetConfig.mixture_or_task_name = 'c4_span_corruption'",
        ["c4_span_corruption", "rlm_span_corruption", "must be the same"],
    ),
    "other wiring": (
        "train.partitioner = @utils.SaveCheckpointConfig()",
        ["must be @PjitPartitioner"],
    ),
    "wiring that is a literal": ("train.trainer_cls = 'Trainer'", ["must be @Trainer"]),
    "what only T5X has": ("Adafactor.factored = False", ["only True", "min_dim_size_to_factor"]),
    "a split of its own": ("train/utils.DatasetConfig.split = 'test'", ["only 'train'"]),
    "two checkpoints": (
        "RestoreCheckpointConfig.path = ['a', 'b']",
        ["RestoreCheckpointConfig.path", "one checkpoint"],
    ),
    "an activation that is none": (
        "T5Config.mlp_activations = ('gleu', 'linear')",
        ["T5Config.mlp_activations", "gelu, linear"],
    ),
    "evaluations": ("include 't5x/configs/runs/eval.gin'", ["trainer.evaluate --model_dir=DIR"]),
    "predictions": ("include 't5x/configs/runs/infer.gin'", ["python -m trainer.generate"]),
    "exports": ("from t5x import export_lib\nexport_lib.save.model_name = 'x'", ["trainer.export"]),
    "compilation": ("include 't5x/configs/runs/precompile.gin'", ["palimpsest plan"]),
    "perplexity": ("include 'perplexity_eval.gin'", ["--steps=all --split=validation"]),
    "a script's evaluation": (
        "import __main__ as s\ns.evaluate.output_dir = 'x'",
        ["python -m trainer.evaluate"],
    ),
    "a script's predictions": ("import __main__ as s\ns.infer.mode = 'x'", ["trainer.export"]),
    "umT5": (
        "include 'flaxformer/t5x/configs/umt5/base.gin'",
        ["--model.position=relative_per_layer"],
    ),
    "Flaxformer": (
        "from flax import linen\nfrom flaxformer import x\n"
        "bias/linen.initializers.normal.stddev = 1e-6\nx.Encoder.size = 3",
        ["Flaxformer's models are not read"],
    ),
    "Flaxformer's files": (
        "include '/flaxformer/flaxformer/t5x/a.gin'",
        ["Flaxformer's models are not read"],
    ),
    "a model of their own": (
        "from mine import network\nnetwork.T5Config.emb_dim = 8",
        ["scalable_t5.network.T5Config, as code that files name is not run"],
    ),
    "latin-1": ("include 'latin.gin'", ["is not UTF-8 (byte 5): save it as UTF-8"]),
    "UTF-16": ("include 'utf16.gin'", ["is not UTF-8 (byte 0)"]),
}


@pytest.fixture
def folder(tmp_path):
    """A folder with a good file, one that includes it, and modules that leave a trace."""
    (tmp_path / "run.gin").write_text(GOOD)
    (tmp_path / "other.gin").write_text("include 'run.gin'\n")
    (tmp_path / "latin.gin").write_bytes("# caf\xe9\n".encode("latin-1"))
    (tmp_path / "utf16.gin").write_bytes("TRAIN_STEPS = 5\n".encode("utf-16"))
    for module in ("trap", "my_library"):
        (tmp_path / f"{module}.py").write_text("open('executed', 'w').close()")
    return tmp_path


def read(folder):
    return recipe.load(["run.gin"], [str(folder)], [], None, [])


def test_a_good_file_is_read_and_a_name_set_twice_reported(folder):
    assert read(folder).config.train_steps == 5
    (folder / "run.gin").write_text(GOOD + "TRAIN_STEPS = 6\n")
    found = read(folder)
    assert found.config.train_steps == 6
    assert (
        "warning",
        "TRAIN_STEPS is set twice in run.gin, to 5 (run.gin:7) and 6 (run.gin:10): the last wins",
    ) in found.notes


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_by_file_and_line(case, folder, monkeypatch):
    text, says = BROKEN[case]
    (folder / "run.gin").write_text(GOOD + text + "\n")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    modules = set(sys.modules)
    with pytest.raises(UserError) as error:
        read(folder)
    message = str(error.value)
    assert "\n" not in message
    places = [f"run.gin:{line}" for line in range(10, 14)] + ["other.gin:1"]
    assert message.startswith(tuple(places))
    for part in says:
        assert part in message
    assert not (folder / "executed").exists()
    assert {"trap", "my_library"}.isdisjoint(set(sys.modules) - modules)


def test_files_without_a_model_are_refused():
    bindings = ["MODEL_DIR='x'", "MIXTURE_OR_TASK_NAME='a'", "TRAIN_STEPS=1", "MODEL=None"]
    bindings.append("TASK_FEATURE_LENGTHS={'targets': 8}")
    with pytest.raises(UserError, match="these files do not name a model"):
        recipe.load(["t5x/configs/runs/pretrain.gin"], [], bindings, None, [])


def test_imported_modules_of_users_are_reported(folder, monkeypatch):
    """All but the task module."""

    def told(*flags):
        notes = recipe.load(["run.gin"], [str(folder)], [], None, list(flags)).notes
        return [text.split()[0] for subject, text in notes if subject == "not imported"]

    (folder / "run.gin").write_text(GOOD + "import t5x_tasks\n")
    assert told() == ["trap", "t5x_tasks"]
    monkeypatch.syspath_prepend(folder)
    (folder / "trap.py").write_text("TASKS = ()\n")
    assert told("--task_module=trap") == ["t5x_tasks"]
    sys.modules.pop("trap")


COMMANDS = {
    "a file that is refused": (["--gin_file=broken.gin"], "broken.gin:10"),
    "no model at all": ([], "--preset or --gin_file"),
    "a binding without a file": (["--gin.TRAIN_STEPS=5"], "needs a --gin_file"),
    "a file that is not there": (["--gin_file=no.gin"], "no.gin"),
    "a recipe of an optimizer": (
        ["--gin_file=run.gin", "--optimizer_preset=nanot5"],
        "--optimizer_preset",
    ),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_the_command_refuses_in_one_line(case, folder, monkeypatch, capsys):
    flags, says = COMMANDS[case]
    (folder / "broken.gin").write_text(GOOD + "MODEL_DIR = @os.system()\n")
    monkeypatch.chdir(folder)
    assert_one_line(*ended("trainer.pretrain", flags, capsys), says)
    assert not (folder / "executed").exists()


def test_a_binding_with_two_values_is_refused():
    twice = ["--gin.TRAIN_STEPS=5", "--gin.TRAIN_STEPS=6"]
    with pytest.raises(UserError, match=r"^--gin.TRAIN_STEPS=5 and --gin.TRAIN_STEPS=6: give one"):
        main(["--gin_file=t5x/configs/runs/pretrain.gin", *twice])


def test_a_file_of_settings_is_a_gin_file():
    assert "--gin_file" in foreign_flags.hint("--config", ["preset"])


def test_without_the_files_nothing_of_the_annex_is_imported():
    code = (
        "import sys; from trainer.pretrain import main; from tasks.terminal import command_line\n"
        "try: main([*sys.argv[1:], '--print_config'])\n"
        "except command_line.UserError: pass\n"
        "of_annexes = [name[16:] for name in sys.modules if name[:16] == 'trainer.annexes.']\n"
        "names = [name.split('.') for name in of_annexes if '.' in name]\n"
        "print(*{name for name, *module in names if module != ['options']})"
    )
    for flag, loaded in (
        ("--preset=t5_1_1_tiny", []),
        ("--gin_file=t5x/configs/runs/pretrain.gin", ["gin", "mesh_gin"]),
    ):
        assert sorted(started("-c", code, flag).stdout.splitlines()[-1].split()) == loaded
