"""Typed configuration: overrides, origins, and what may change between resumes."""

import contextlib
import dataclasses
import itertools
import json

import pytest

from tasks.objectives import Lengths
from tasks.storage import seal
from tasks.terminal.command_line import UserError
from tests.support.processes import started
from tests.support.runs import flags_of
from tests.support.words import changed
from trainer.config import CONFIG_FILE, config_changes, field_paths, load_config, save_config
from trainer.config.batch_of_tokens import batch_of_tokens
from trainer.config.from_flags import build_config
from trainer.config.optimizer import OPTIMIZER_PRESETS, OptimizerConfig, recipe
from trainer.config.presets import MODEL_PRESETS
from trainer.config.resuming import changes_in
from trainer.config.stored import as_stored, stored_config
from trainer.config.this_machine import on_this_machine
from trainer.config.unused_fields import refuse_unread
from trainer.evaluating import whole_splits
from trainer.pretrain import main
from trainer.setup import prepare


def build(*flags, **kwargs):
    return build_config("t5_1_1_small", changed(*flags), **kwargs)


def test_flags_set_typed_fields_and_their_origin():
    config, origins = build(
        *("--train_steps=7", "--optimizer.learning_rate", "0.5", "--checkpoint.keep=None"),
        *("--metrics.tensorboard=false", "--model.mlp_activations=relu,linear"),
        "--lengths.inputs=64",
    )
    assert (
        dict(field_paths.leaves(config)).items()
        >= {
            **{"train_steps": 7, "optimizer.learning_rate": 0.5, "checkpoint.keep": None},
            **{"metrics.tensorboard": False, "model.mlp_activations": ("relu", "linear")},
            "lengths.inputs": 64,
        }.items()
    )
    assert origins["train_steps"] == "command line"
    assert origins["model.emb_dim"] == "preset t5_1_1_small"
    text = field_paths.describe(config, origins)
    assert "train_steps" in text
    assert "# command line" in text
    assert "# default" in text
    assert len(text.splitlines()) == len(list(field_paths.leaves(config)))


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--train_step=7", "did you mean --train_steps"),
        ("--optimizer.learning_rates=1", "did you mean --optimizer.learning_rate"),
        ("--lengths.inputs=many", "it must be a whole number or None"),
        ("--optimizer.learning_rate=inf", "it must be a finite number above 0"),
        ("--metrics.tensorboard=maybe", "it must be true or false"),
        ("--model=big", "unknown flag --model"),
        ("--batch_size", "needs a value"),
        ("train_steps=7", "unknown flag"),
        ("--on_nan=go", "--on_nan=go: it must be one of 'skip', 'stop'"),
        ("--spike_factor=0.5", "above 1"),
        ("--profile_steps=20", "as 10:20"),
        ("--profile_steps=20:10", "as 10:20"),
        ("--profile_steps=9:1000001", "the last of train_steps"),
        ("--checkpoint.best_metric=los", "'loss', 'perplexity'"),
        ("--train_steps=0", r"1 to 2\*\*31 - 1"),
        ("--train_steps=2147483648", r"1 to 2\*\*31 - 1"),
    ],
)
def test_wrong_flags_are_refused_by_name(flag, says):
    with pytest.raises(UserError, match=says):
        build(flag)


@pytest.mark.parametrize(("text", "scheme"), [("none", "none"), ("None", "rotary")])
def test_none_is_a_choice_where_it_is_listed(text, scheme):
    config, _ = build_config("llama_mini", [f"--model.position={text}"])
    assert config.model.position_scheme == scheme


@pytest.mark.parametrize("metric", ["min:", "mid:nodir", "a/max:"])
def test_a_watched_metric_has_a_name_and_a_known_prefix(metric):
    with pytest.raises(UserError, match="others need evaluation"):
        build("--task_module=json", f"--checkpoint.best_metric={metric}")


def test_flags_are_checked_together_in_any_order():
    flags = ["--optimizer.learning_rate=0.01", "--optimizer.name=adamw", "--optimizer.beta2=0.95"]
    for ordered in itertools.permutations(flags):
        config, _ = build(*ordered)
        assert config.optimizer == OptimizerConfig("adamw", learning_rate=0.01, beta2=0.95)
    with pytest.raises(UserError, match="beta2"):
        build("--optimizer.beta2=0.95")
    both = ["--checkpoint.best_metric=loss", "--evaluation.every_steps=0"]
    for ordered in itertools.permutations(both):
        with pytest.raises(UserError, match="unset without evaluations"):
            build(*ordered)
    assert build("--seed=1", "--seed=2")[0].seed == 2


@pytest.mark.parametrize("name", OPTIMIZER_PRESETS)
def test_optimizer_presets_record_their_origin(name):
    config, origins = build(optimizer_preset=name)
    assert config.optimizer == OPTIMIZER_PRESETS[name].optimizer
    assert origins["optimizer.learning_rate"] == f"optimizer preset {name}"
    longer, origins = build("--optimizer.warmup_steps=7", optimizer_preset=name)
    own = dataclasses.replace(OPTIMIZER_PRESETS[name].optimizer, warmup_steps=7)
    assert longer.optimizer == own
    assert origins["optimizer.warmup_steps"] == "command line"


def test_recipes_have_a_loss():
    config, origins = build(optimizer_preset="nanot5")
    assert config.loss.normalizer == "num_real_target_tokens"
    assert origins["loss.normalizer"] == "optimizer preset nanot5"
    own, _ = build("--loss.normalizer=sum", optimizer_preset="nanot5")
    assert own.loss.normalizer == "sum"
    assert recipe("nanot5")["loss.normalizer"] == "num_real_target_tokens"
    config = field_paths.replace_all(build()[0], recipe("mu_transformer"))
    assert config.optimizer == OPTIMIZER_PRESETS["mu_transformer"].optimizer
    assert config.loss.normalizer == "num_total_target_tokens"


def test_profile_steps_name_the_first_and_the_last_update():
    assert build("--profile_steps=10:20")[0].profiled == range(10, 21)
    assert not build()[0].profiled


def test_unknown_presets_suggest_the_nearest():
    with pytest.raises(UserError, match=r"t5_1_1_bse \(did you mean t5_1_1_base\?\)"):
        build_config("t5_1_1_bse", [])
    with pytest.raises(UserError, match="mean llama3_1b or llama3_8b"):
        build_config("LLAMA3", [])
    with pytest.raises(UserError, match="preset x: palimpsest pretrain --help=presets lists them"):
        build_config("x", [])
    with pytest.raises(UserError, match="did you mean nanot5"):
        build(optimizer_preset="nanot")


@pytest.fixture
def stored(tmp_path):
    """Returns a function: texts to replace in a stored configuration -> what is read of it."""
    config, origins = build(f"--model_dir={tmp_path}", "--model.mlp_activations=relu")

    def read(*texts):
        save_config(config, origins)
        file = tmp_path / CONFIG_FILE
        text = json.dumps(seal.opened(json.loads(file.read_text()))[0])
        for was, now in texts:
            assert was in text
            text = text.replace(was, now)
        file.write_text(text)
        return load_config(str(tmp_path))

    assert read() == (config, origins)
    return read


@pytest.mark.parametrize(("partitions", "tensor"), [("2", 2), ("null", 1)])
def test_a_stored_former_name_is_read(stored, partitions, tensor):
    former = f'"mesh": {{"num_partitions": {partitions}, '
    assert stored(('"mesh": {', former), (', "tensor": 1', ""))[0].mesh.tensor == tensor


def test_stored_fields_that_do_not_fit_are_named_by_file_and_path(stored):
    with pytest.raises(UserError, match="batch_sise"):
        stored(('"batch_size"', '"batch_sise"'))
    with pytest.raises(UserError, match=r"config\.json .*loss\.z_loss is -1; it must be 0 or more"):
        stored(('"z_loss": 0.0001', '"z_loss": -1'))


def test_only_fields_that_do_not_affect_parameters_may_change_on_resume():
    before, _ = build("--optimizer.learning_rate=0.5")
    harmless, _ = build(
        *("--optimizer.learning_rate=0.5", "--train_steps=9", "--on_nan=skip", "--spike_factor=3"),
        *("--profile_steps=1:2", "--checkpoint.best_metric=loss", "--metrics.wandb=project"),
        *("--model_dir=x", "--cache_dir=y", "--checkpoint.keep=1", "--evaluation.every_steps=3"),
        "--metrics.every_steps=3",
    )
    assert config_changes(before, harmless, 5) == []
    for path, value in {
        **{"seed": 5, "batch_size": 4, "optimizer.learning_rate": 1.5, "loss.z_loss": 0.5},
        **{"optimizer.warmup_steps": 7, "model.dropout_rate": 0.5, "data.shuffle": "block"},
        "lengths.inputs": 64,
    }.items():
        was = dict(field_paths.leaves(before))[path]
        changed = field_paths.replace(before, path, value)
        assert config_changes(before, changed, 5) == [f"{path} was {was}, is {value}"]


@pytest.mark.parametrize("watch", ["plateau", "stopping"])
def test_what_a_watch_compares_may_not_change_on_resume(watch):
    every = ("--evaluation.every_steps=2", "--evaluation.metrics=bleu")
    before, longer, more = (
        build(*every, f"--{watch}.metric={metric}", *own)[0]
        for metric, own in (
            ("min:python_docs/loss", ()),
            ("min:python_docs/loss", ("--evaluation.batches=1", "--evaluation.examples=3")),
            ("max:bleu", ("--evaluation.examples=3",)),
        )
    )
    (found,) = config_changes(before, longer, 5)
    assert found == f"evaluation.batches was None, is 1, and {watch}.metric compares evaluations"
    assert changes_in("evaluation.examples", before) == ("nothing", "")
    assert changes_in("evaluation.examples", more)[0] == "results"
    assert changes_in("evaluation.batch_size", more)[0] == "nothing"


def test_a_run_that_has_ended_early_may_get_more_patience():
    def of(watch, patience):
        words = "--evaluation.every_steps=2", f"--{watch}.metric=loss"
        return build(*words, f"--{watch}.patience={patience}")[0]

    assert config_changes(of("stopping", 3), of("stopping", 9), 5) == []
    assert config_changes(of("plateau", 3), of("plateau", 9), 5) == ["plateau.patience was 3, is 9"]


def test_only_the_rest_of_the_mixing_schedule_may_change_on_resume():
    before, _ = build("--mixing.schedule=20: a=1,b=2; 40: b=1")
    longer, _ = build("--mixing.schedule=20:a=1,b=2; 41: a=1; 60: a=1,c=2")
    assert config_changes(before, longer, 40) == []
    assert "before update 41" in config_changes(before, longer, 41)[0]
    with pytest.raises(UserError, match="must ascend"):
        config_changes(before, build("--mixing.schedule=20:a;20:b")[0], 5)


def test_a_given_vocabulary_size_is_kept_for_evaluation(text_cache, tmp_path):
    flags = flags_of(text_cache, tmp_path, "--model.vocab_size=1000")
    config, origins = build_config("t5_1_1_small", flags)
    save_config(prepare(config, origins).config, origins)
    assert prepare(*load_config(str(tmp_path))).config.model.vocab_size == 1000


@pytest.mark.parametrize(
    ("flags", "rows", "microbatches"),
    [
        # Of one replica; 16 rows of 512 in 8192 tokens, 4 in Mesh TensorFlow's default of 2048.
        (["--tokens_per_batch=65536"], 128, 1),
        (["--tokens_per_batch=8192", "--tokens_per_microbatch_per_replica=8192"], 16, 1),
        (["--tokens_per_batch=8192", "--tokens_per_microbatch_per_replica=2048"], 16, 4),
        # The most rows that divide those of the batch; never less than one.
        (["--batch_size=12", "--tokens_per_microbatch_per_replica=2600"], 12, 3),
        (["--batch_size=12", "--tokens_per_microbatch_per_replica=5"], 12, 12),
    ],
)
def test_batches_in_tokens(flags, rows, microbatches):
    config, origins = build(*flags)
    config = batch_of_tokens(config, origins, Lengths(1, 512))
    assert (config.batch_size, config.microbatches) == (rows, microbatches)
    # As when a run's own configuration is read again.
    assert batch_of_tokens(config, origins, Lengths(1, 512)) == config


def test_a_run_is_opened_elsewhere_without_what_only_updates_need():
    config, origins = build("--batch_size=32", "--microbatches=8", "--data.segment_documents=true")
    config = field_paths.replace(config, "data.take", "c4_ul2: 0.1")
    opened = on_this_machine(config)
    assert (opened.batch_size, opened.microbatches) == (32, 1)
    other = whole_splits._on_another_task(opened, origins, "wikipedia_span_corruption")
    assert (other.data.take, other.data.segment_documents) == (None, True)


@pytest.mark.parametrize(
    "flags", [("--batch_size=12",), ("--batch_size=8", "--batch_schedule=100: 12; 200: 16")]
)
def test_a_run_is_opened_on_more_devices_than_it_had_rows(flags, monkeypatch):
    monkeypatch.setattr("jax.device_count", lambda: 8)
    opened = on_this_machine(build(*flags, "--mesh.data=-1")[0])
    assert opened.batch_size == 8 * (1 + (flags[0] == "--batch_size=12"))
    assert opened.phases.sizes == [opened.batch_size]


def test_a_branch_may_give_rows_where_its_run_gave_tokens():
    config, origins = build("--tokens_per_batch=8192", "--batch_size=4")
    origins["tokens_per_batch"] = "the run model"
    assert batch_of_tokens(config, origins, Lengths(1, 512)).batch_size == 4
    assert "tokens_per_batch" not in origins


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--tokens_per_batch=1000"], "is not a multiple of the row length 512: use 512"),
        (["--tokens_per_batch=512", "--batch_size=1"], "--tokens_per_batch and --batch_size"),
        (
            ["--tokens_per_microbatch_per_replica=512", "--microbatches=2"],
            "--tokens_per_microbatch_per_replica and --microbatches",
        ),
    ],
)
def test_invalid_batches_in_tokens_are_refused(flags, says):
    config, origins = build(*flags)
    with pytest.raises(UserError, match=says):
        batch_of_tokens(config, origins, Lengths(0, 512))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--loss.z_loss=-1.0"], "--loss.z_loss=-1.0: it must be 0 or more"),
        (["--checkpoint.keep=-1"], "--checkpoint.keep=-1: it must be 1 or more"),
        (["--tokens_per_batch=0"], "--tokens_per_batch=0: it must be 1 or more"),
        (["--mesh.num_partitions=0"], "--mesh.num_partitions=0: it must be above 0, or -1"),
        (["--optimizer.beta1", "1"], "--optimizer.beta1=1: it must be in [0, 1)"),
        (["--init_from_state=false"], "--init_from_state has no effect without --init_from"),
        (["--loss.normalizer=num_real_target_tokens", "--loss.normalizing_constant=2"],
         "--loss.normalizing_constant has no effect with normalizer 'num_real_target_tokens'"),
        (["--checkpoint.keep_every_steps=7", "--checkpoint.keep=None"],
         "--checkpoint.keep_every_steps has no effect with --checkpoint.keep=None, which keeps "
         "every checkpoint"),
        (["--processes.timeout_seconds=7"],
         "--processes.timeout_seconds has no effect without --processes.coordinator"),
    ],
)  # fmt: skip
def test_a_rejected_value_is_named_as_it_was_typed(flags, says):
    with pytest.raises(UserError) as error:
        build(*flags)
    assert str(error.value) == says


def test_a_rejected_value_that_was_not_typed_is_named_by_its_path():
    with pytest.raises(field_paths.RejectedField) as error:
        build("--optimizer.name=lion")
    assert error.value.path == "optimizer.learning_rate"
    config, _ = build()
    with pytest.raises(field_paths.RejectedField) as error:
        field_paths.replace(config, "metrics.every_steps", 0)
    assert error.value.path == "metrics.every_steps"
    assert (error.value.rejected.value, error.value.rejected.rule) == (0, "1 or more")


def test_a_former_name_sets_the_renamed_field():
    config, origins = build("--mesh.num_partitions=2")
    assert config.mesh.tensor == 2
    assert origins["mesh.tensor"] == "command line"
    assert build("--mesh.num_partitions=None")[0].mesh.tensor == 1
    with pytest.raises(UserError, match=r"--mesh\.tensor and --mesh\.num_part.* are the same"):
        build("--mesh.tensor=2", "--mesh.num_partitions=2")


@pytest.mark.parametrize(
    ("flag", "others", "why"),
    [
        ("--data.block_bytes=7", [], "without --data.shuffle=block"),
        ("--data.example_inputs=7", [], "without --data.pack_examples=true"),
        ("--data.pack=false", ["--task=ul2"], "on --task=ul2"),
        ("--mixing.maximum=3", ["--task=seqio:a"], "on --task=seqio:a"),
        ("--evaluation.decoding.prefix=true", [], "on prompts"),
        ("--data.local_dir=x", ["--cache_dir=/caches"], "local --cache_dir"),
        ("--data.local_bytes=7", ["--cache_dir=/caches"], "local --cache_dir"),
        ("--model.max_positions=600", [], "without --model.position=absolute or a Synth"),
    ],
)  # fmt: skip
def test_a_flag_without_effect_is_refused(flag, others, why):
    config, origins = build(flag, *others)
    with pytest.raises(UserError) as error:
        refuse_unread(config, origins)
    name = flag.partition("=")[0]
    assert str(error.value).startswith(f"{name} has no effect ")
    assert why in str(error.value)
    # A value that nobody typed, as of a stored configuration or a gin file, is left alone.
    refuse_unread(config, {})
    path = name.removeprefix("--")
    default = dict(field_paths.leaves(build()[0]))[path]
    if default is not None:
        refuse_unread(*build(f"{name}={default}", *others))


@pytest.mark.parametrize(
    ("flag", "others"),
    [
        ("--data.block_bytes=7", ["--data.shuffle=block"]),
        ("--model.max_positions=600", ["--model.position=absolute"]),
    ],
)
def test_only_a_field_with_an_effect_must_stay_on_resume(flag, others):
    assert config_changes(build()[0], build(flag)[0], 1) == []
    assert len(config_changes(build(*others)[0], build(flag, *others)[0], 1)) == 1


@pytest.mark.parametrize(
    "flags",
    [
        ["--data.block_bytes=7", "--data.shuffle=block"],
        ["--data.local_dir=x", "--cache_dir=gs://bucket/caches"],
        ["--checkpoint.keep_every_steps=7"],
        ["--evaluation.batch_size=7"],
        # trainer.evaluate reads it.
        ["--evaluation.batches=7", "--evaluation.every_steps=0"],
        ["--model.max_positions=600", "--model.position=absolute"],
        ["--processes.timeout_seconds=7", "--processes.coordinator=auto"],
    ],
)
def test_a_flag_with_an_effect_is_accepted(flags):
    refuse_unread(*build(*flags))


def test_presets_set_nothing_idle():
    for name in MODEL_PRESETS:
        refuse_unread(*build_config(name, []))


@pytest.mark.parametrize(
    "flag", ["--task-module=no_such_module", "--task_module=", "--task_module"]
)
def test_a_task_module_that_cannot_be_imported_is_one_line(flag):
    with pytest.raises(UserError, match="--task_module"):
        build(flag)


def test_a_preset_alone_visits_no_other_format():
    code = (
        "import sys; from trainer.pretrain import main\n"
        "main(['--preset=t5_1_1_tiny', '--print_config'])\n"
        "print(*(name for name in sys.modules if name[:8] == 'trainer.'))"
    )
    loaded = started("-c", code).stdout.splitlines()[-1].split()
    assert not {name.split(".")[1] for name in loaded} & {"huggingface", "engine", "conversion"}
    # Of annexes, only the dataclasses of their flags.
    of_annexes = [name for name in loaded if name.startswith("trainer.annexes.")]
    assert {name.split(".", 3)[3] for name in of_annexes if name.count(".") > 2} <= {"options"}


@pytest.mark.parametrize("flag", ["--print_config", "--help"])
def test_a_flag_with_a_space_is_not_the_value_of_the_one_before(flag, capsys):
    schedule = "--optimizer.schedule=constant * linear_warmup"
    with contextlib.suppress(SystemExit):
        main(["--preset=t5_1_1_small", flag, schedule])
    assert "optimizer.schedule" in capsys.readouterr().out


def test_an_unknown_group_is_read_only_if_nothing_of_it_is_set():
    """Earlier versions stored the groups of all annexes, also of those that are deleted here."""
    config, _ = build()
    stored = json.loads(json.dumps(as_stored(config)))
    assert stored_config({**stored, "gone": {"rank": None, "on": False}}, "run") == config
    for group in ({"rank": 2, "on": False}, {"alpha": 0.5}):
        with pytest.raises(UserError, match="of an annex that is not installed: gone"):
            stored_config({**stored, "gone": group}, "run")
    with pytest.raises(UserError, match="not installed: gone"):
        stored_config({**stored, "gone": None}, "run")
