"""Tests conversions of checkpoints without a run, and when they are refused."""

import dataclasses
import json
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file

from tasks.terminal.command_line import UserError
from tests.support import t5x_files
from tests.support.runs import command, done, run_of, start
from tests.support.small_tokenizers import without_sentinels
from tests.support.trees import assert_equal
from trainer import generate, huggingface
from trainer.annexes.conversion import convert, sources, verify
from trainer.checkpoints import layout, stored
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.config import load_config
from trainer.config.presets import model_preset
from trainer.engine.program import Program
from trainer.initialization import init_from
from trainer.model.paths import named
from trainer.setup import prepare

pytestmark = pytest.mark.processes  # whole runs

STEPS = (1000, 2000, 3000)
# The presets' name of the model in t5x_files.
PRESET = "--preset=t5_1_1_tiny"


def sound(seed):
    """Returns parameters of t5x_files with the scales of a model, on which rounding is small."""
    return {
        name: 1 + array / 10
        if name.endswith("scale")
        else array / np.float32(array.shape[0]) ** 0.5
        for name, array in t5x_files.parameters(seed).items()
    }


def run(source, target, format, *flags):
    return convert.main([f"--from={source}", f"--to={target}", f"--format={format}", *flags])


def arrays(path):
    """Returns the parameters of a checkpoint, each layer apart."""
    parts = layout.read_parts(stored.load(str(path)))
    return {name: each["value"].whole() for name, each in parts.items()}


@pytest.fixture(scope="module")
def t5x(tmp_path_factory):
    """Returns a folder of three checkpoints of T5X with moments, each of another layout."""
    folder = tmp_path_factory.mktemp("convert") / "t5x"
    with pytest.MonkeyPatch.context() as patch:
        for place, (step, kind) in enumerate(
            zip(STEPS, ("orbax", "placeholder", "legacy"), strict=True)
        ):
            patch.setattr(t5x_files, "STEP", step)
            t5x_files.write(
                folder, kind, sound(place), t5x_files.moments(sound(place), 128), step=step
            )
    return folder


@pytest.fixture(scope="module")
def transformers_folders(t5x):
    """Returns the folder with a folder of transformers for each checkpoint of `t5x`."""
    target = t5x.parent / "huggingface"
    assert run(t5x, target, "huggingface", PRESET) == 0
    return target


@pytest.mark.torch
def test_a_folder_of_t5x_becomes_folders_of_transformers_and_back(transformers_folders, tmp_path):
    from transformers import AutoModelForSeq2SeqLM

    assert sorted(path.name for path in transformers_folders.iterdir()) == [
        f"checkpoint_{step}" for step in STEPS
    ]
    assert run(transformers_folders, tmp_path / "back", "t5x") == 0
    for place, step in enumerate(STEPS):
        folder = transformers_folders / f"checkpoint_{step}"
        model = AutoModelForSeq2SeqLM.from_pretrained(folder)
        query = model.encoder.block[0].layer[0].SelfAttention.q.weight.detach().numpy()
        expected = sound(place)
        np.testing.assert_array_equal(query.T, expected["encoder/layers_0/attention/query/kernel"])
        assert "logits: largest difference" in (folder / "README.md").read_text()
        checkpoint = stored.load(str(tmp_path / "back" / f"checkpoint_{step}"))
        assert checkpoint.step == step
        assert_equal(arrays(checkpoint.path), expected)
    with ocp.CheckpointManager(
        tmp_path / "back", options=ocp.CheckpointManagerOptions(step_prefix="checkpoint")
    ) as manager:
        assert tuple(manager.all_steps()) == STEPS
        state = manager.restore(3000, args=ocp.args.Composite(state=ocp.args.PyTreeRestore()))
        assert state["state"]["state"]["step"] == 3000


def test_a_rerun_makes_what_is_missing_only(t5x, tmp_path, capsys):
    target = tmp_path / "t5x"
    assert run(t5x, target, "t5x", PRESET, "--steps=1000") == 0
    before = (target / "checkpoint_1000" / "state" / "_METADATA").stat().st_mtime_ns
    (target / ".unfinished-checkpoint_2000-abcd1234").mkdir()  # as a killed process leaves it
    capsys.readouterr()
    assert run(t5x, target, "t5x", PRESET) == 0
    printed = capsys.readouterr().out
    assert f"{target}/checkpoint_1000: is there already" in printed
    assert (target / "checkpoint_1000" / "state" / "_METADATA").stat().st_mtime_ns == before
    assert sorted(path.name for path in target.iterdir()) == [f"checkpoint_{s}" for s in STEPS]
    with pytest.raises(UserError, match="checkpoint_1000 is a conversion with dtype float3"):
        run(t5x, target, "t5x", PRESET, "--dtype=bfloat16")
    (target / "checkpoint_1000" / "conversion.json").unlink()
    with pytest.raises(UserError, match="checkpoint_1000 exists: name another folder"):
        run(t5x, target, "t5x", PRESET)


@pytest.mark.slow
def test_a_killed_conversion_leaves_finished_folders_only(t5x, tmp_path):
    target = tmp_path / "t5x"
    flags = f"--from={t5x}", f"--to={target}", "--format=t5x", PRESET
    with start(command("trainer.annexes.conversion.convert", *flags)) as process:
        while not (target / "checkpoint_1000").exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    finished = stored.steps(str(target))
    assert 1000 in finished
    for step in finished:
        assert_equal(arrays(target / f"checkpoint_{step}"), sound(STEPS.index(step)))
    again = done(command("trainer.annexes.conversion.convert", *flags))
    assert again.stdout.count("is there already") == len(finished)
    assert sorted(path.name for path in target.iterdir()) == [f"checkpoint_{s}" for s in STEPS]


def test_moments_are_kept_as_far_as_t5x_has_them(t5x, tmp_path, capsys):
    before = layout.read_parts(stored.load(str(t5x)))
    for target, flags in (("same", []), ("scanned", ["--scan_layers"])):
        assert run(t5x, tmp_path / target, "t5x", PRESET, "--steps=latest", *flags) == 0
        assert "moments are the source's" in capsys.readouterr().out
    same = layout.read_parts(stored.load(str(tmp_path / "same")))
    for name, parts in before.items():
        assert set(same[name]) == set(parts) == {"value", "v"}
        np.testing.assert_array_equal(same[name]["v"].whole(), parts["v"].whole())
    scanned = stored.load(str(tmp_path / "scanned"))
    kernel = "encoder/layers_1/mlp/wo/kernel"
    assert "encoder/encoder/mlp/wo/kernel" in scanned.parameters
    found = layout.read_parts(scanned)[kernel]
    # T5X factors the kernels of joined layers whatever their size.
    mean = before[kernel]["v"].whole().mean(0)
    np.testing.assert_array_equal(found["over 0"].whole(), mean)
    # And does not factor small kernels of separate layers.
    assert run(tmp_path / "scanned", tmp_path / "apart", "t5x") == 0
    assert "moments start at 0: T5X factors" in capsys.readouterr().out
    assert_equal(arrays(tmp_path / "apart"), arrays(t5x))
    assert not layout.read_parts(stored.load(str(tmp_path / "apart")))[kernel]["v"].whole().any()


def test_bfloat16_is_what_rounding_gives(t5x, tmp_path):
    expected = {name: array.astype(ml_dtypes.bfloat16) for name, array in sound(2).items()}
    flags = (PRESET, "--dtype=bfloat16")
    one = t5x / "checkpoint_3000"
    assert run(one, tmp_path / "half", "huggingface", "--unverified", *flags) == 0
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    tensors = load_file(tmp_path / "half" / "model.safetensors")
    assert {array.dtype for array in tensors.values()} == {np.dtype(ml_dtypes.bfloat16)}
    np.testing.assert_array_equal(tensors["shared.weight"], expected["token_embedder/embedding"])
    assert run(one, tmp_path / "t5x", "t5x", *flags) == 0
    assert_equal(arrays(tmp_path / "t5x"), expected)


def test_a_run_starts_from_what_was_converted(text_cache, tmp_path, capsys):
    """The text cache has 700 ids, so the model has 768 rows."""
    folder, expected = tmp_path / "t5x", sound(0)
    random = np.random.default_rng(3)
    expected["token_embedder/embedding"] = random.normal(size=(768, 8)).astype("f4")
    expected["decoder/logits_dense/kernel"] = random.normal(size=(8, 768)).astype("f4")
    moments = t5x_files.moments(expected, 128)
    t5x_files.write(folder, "orbax", expected, moments)
    cache = json.loads((text_cache / "manifest.json").read_text())["plan"]["vocabulary"]
    model = next(Path(text_cache).glob("*.model"))
    assert run(folder, tmp_path / "ours", "palimpsest", PRESET, f"--vocabulary={model}") == 0
    point = init_from.start(run_of(text_cache, f"--init_from={tmp_path / 'ours'}"))
    assert point.step == t5x_files.STEP
    assert point.reset is None
    assert point.vocabulary_checked
    assert_equal({name: each.whole() for name, each in point.parameters.items()}, expected)
    name = "encoder/layers_0/mlp/wo/kernel"
    kept = next(value for key, value in point.optimizer_state.items() if key.endswith(f"/v/{name}"))
    np.testing.assert_array_equal(kept.whole(), moments[f"{name}/v"])
    record = stored.load(str(tmp_path / "ours")).run
    assert record["vocabulary_sha256"] == cache["sha256"]
    # It generates text without data, by the vocabulary that is kept beside it.
    ours = f"--model_dir={tmp_path / 'ours'}"
    generate.main([ours, "--prompt=a <extra_id_0> list", "--max_new_tokens=2"])
    (tmp_path / "ours" / "sentencepiece.model").rename(tmp_path / "kept.model")
    with pytest.raises(UserError, match="was converted without a vocabulary: set"):
        generate.main([ours, "--prompt=a"])
    generate.main([ours, "--prompt=a", "--max_new_tokens=1", f"--vocabulary={tmp_path}/kept.model"])
    other = tmp_path / "other.model"
    other.write_bytes(without_sentinels(model.read_bytes()))
    with pytest.raises(UserError, match="trained with a different vocabulary"):
        generate.main([ours, "--prompt=a", f"--vocabulary={other}"])
    for form in ("huggingface", "palimpsest"):
        with pytest.raises(UserError, match=r"trained with a vocabulary other than .*other\.model"):
            run(tmp_path / "ours", tmp_path / "x", form, f"--vocabulary={other}")
    flags = (PRESET, f"--vocabulary={other}", "--extra_ids=100")
    assert run(folder, tmp_path / "sentinels", "palimpsest", *flags) == 0
    ours = f"--model_dir={tmp_path / 'sentinels'}"
    generate.main([ours, "--prompt=a <extra_id_99> list", "--max_new_tokens=1"])
    with pytest.raises(UserError, match="it has <extra_id_0> to <extra_id_99>"):
        generate.main([ours, "--prompt=a <extra_id_100> list"])
    # With its data named, it is a run like any other.
    data = ("--task=python_docs_span_corruption", f"--cache_dir={text_cache}")
    assert run(folder, tmp_path / "whole", "palimpsest", PRESET, *data) == 0
    whole = prepare(*load_config(str(tmp_path / "whole")))
    checkpoints = Checkpoints(str(tmp_path / "whole"), writable=False)
    checkpoints.check_resumable(t5x_files.STEP, whole)
    state = checkpoints.restore(t5x_files.STEP, Program(whole).abstract_state())
    assert_equal({name: np.asarray(each) for name, each in named(state.params).items()}, expected)
    # And on to transformers, with the tokenizer, without naming the model.
    target = tmp_path / "hf"
    kept = (f"--vocabulary={model}", "--unverified")
    assert run(tmp_path / "ours", target, "huggingface", *kept) == 0
    inside = target / f"checkpoint_{t5x_files.STEP}"
    assert (inside / "tokenizer.json").exists()
    assert (inside / "spiece.model").exists()
    loaded = huggingface.load(str(inside), huggingface.model_config(str(inside)))
    assert_equal(named(loaded), expected)
    with pytest.raises(UserError, match=r"--preset has no effect on .*: the checkpoint describes"):
        run(tmp_path / "ours", tmp_path / "x", "huggingface", PRESET)


def test_nothing_is_left_of_what_differs(t5x, tmp_path, monkeypatch, capsys):
    def differ(*_):
        raise verify.NotEqual("transformers computes different logits")

    monkeypatch.setattr(verify, "logits", differ)
    assert run(t5x, tmp_path / "hf", "huggingface", PRESET) == 1
    assert "transformers computes different logits" in capsys.readouterr().err
    assert [*(tmp_path / "hf").iterdir()] == []


def test_a_conversion_that_is_not_compared_is_kept_only_if_a_flag_says_so(t5x, tmp_path, capsys):
    """The packages of peers are hidden from tests without a mark."""
    target, flags = tmp_path / "hf", (PRESET, "--steps=1000")
    says = "cannot be compared with transformers': the package torch is not installed; remove"
    with pytest.raises(UserError, match=says):
        run(t5x, target, "huggingface", *flags)
    assert [*target.iterdir()] == []
    assert run(t5x, target, "huggingface", *flags, "--unverified") == 0
    assert "logits were not compared" in capsys.readouterr().out
    with pytest.raises(UserError, match=says):  # nor is it taken for finished
        run(t5x, target, "huggingface", *flags)
    with pytest.raises(UserError, match=says):
        run(target, tmp_path / "back", "t5x")


@pytest.mark.torch
def test_another_function_is_noticed(transformers_folders, tmp_path):
    """The exact GELU for its approximation is the smallest mistake of those that occur."""
    folder = transformers_folders / "checkpoint_1000"
    wrong = dataclasses.replace(
        model_preset("t5_1_1_tiny"), vocab_size=128, mlp_activations=("gelu_erf", "linear")
    )
    with pytest.raises(verify.NotEqual, match="transformers computes different logits"):
        verify.logits(str(folder), wrong, sound(0))
    other = {**sound(0), "token_embedder/embedding": sound(1)["token_embedder/embedding"]}
    path = t5x_files.write(tmp_path / "one", "orbax", sound(0))
    with pytest.raises(verify.NotEqual, match="token_embedder/embedding differs from its source"):
        verify.checkpoint_arrays(str(path), other)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "does not say which model it has .*name the model with --preset"),
        (["--preset=t5_1_0_tiny"], "lacks decoder/layers_0/mlp/wi/kernel .*did you mean"),
        (["--preset=t5_1_1_mini"], "has shape .*, but .* in the model"),
        ([PRESET, "--gin_file=x.gin"], "--preset and --gin_file both name the model"),
        ([PRESET, "--scan_layers"], "--scan_layers has no effect on --format=huggingface"),
        ([PRESET, "--steps=7"], "has no checkpoint of step 7; it has 1000, 2000, 3000"),
        ([PRESET, "--extra_ids=100"], "--extra_ids has no effect without --vocabulary"),
        ([PRESET, "--other=1"], "unknown flag --other"),
        ([PRESET, "--model.mixer=synthesizer"], "mixer"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_written(t5x, tmp_path, flags, message):
    with pytest.raises(UserError, match=message) as error:
        run(t5x, tmp_path / "hf", "huggingface", *flags)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "hf").exists()


def test_other_mistakes(t5x, tmp_path):
    for source in (tmp_path, f"{t5x}/checkpoint_9"):
        with pytest.raises(UserError, match="holds no checkpoint"):
            run(source, tmp_path / "x", "t5x", PRESET)
    (tmp_path / "folders" / "checkpoint_2").mkdir(parents=True)
    (tmp_path / "folders" / "checkpoint_2" / "model.safetensors").touch()
    with pytest.raises(UserError, match=r"checkpoint_2 has model.safetensors but no config.json"):
        run(tmp_path / "folders", tmp_path / "x", "t5x", PRESET)
    with pytest.raises(UserError, match="--to=gs://a/b: give a local folder"):
        run(t5x, "gs://a/b", "t5x", PRESET)
    with pytest.raises(UserError, match="keeps its parameters in float32"):
        run(t5x, tmp_path / "x", "palimpsest", PRESET, "--dtype=bfloat16")
    broken = sound(0)
    broken["encoder/encoder_norm/scale"] = np.full(8, np.nan, "f4")
    t5x_files.write(tmp_path / "broken", "orbax", broken)
    with pytest.raises(UserError, match="encoder/encoder_norm/scale holds NaN or infinity"):
        run(tmp_path / "broken", tmp_path / "x", "t5x", PRESET)


def test_the_model_is_read_from_gin_files(t5x, tmp_path):
    """A file of the model alone, given, or beside the checkpoints as T5X's config.gin."""
    gin = """
from __gin__ import dynamic_registration
from t5x.examples.t5 import network
include 't5x/examples/t5/t5_1_1/tiny.gin'
"""
    (tmp_path / "model.gin").write_text(gin)
    one = t5x / "checkpoint_1000"
    assert run(one, tmp_path / "a", "t5x", f"--gin_file={tmp_path / 'model.gin'}") == 0
    assert_equal(arrays(tmp_path / "a"), sound(0))
    (t5x / "config.gin").write_text(gin)
    try:
        assert run(one, tmp_path / "b", "t5x") == 0
    finally:
        (t5x / "config.gin").unlink()
    record = json.loads((tmp_path / "b" / "checkpoint_1000" / "conversion.json").read_text())
    assert record["name"] == "config.gin"
    assert record["model"]["vocab_size"] == 128


def test_an_export_keeps_its_step_whatever_its_name(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    assert sources.find(str(tmp_path))[0] == [sources.Source(str(tmp_path), 0, True)]
    (tmp_path / "conversion.json").write_text('{"step": 2200}')
    assert sources.find(str(tmp_path))[0] == [sources.Source(str(tmp_path), 2200, True)]


@pytest.mark.parametrize(
    ("name", "step"),
    [("checkpoint_1000", 1000), ("checkpoint-500", 500), ("step-20", 20), ("ro_7", 7), ("12", 12),
     ("mt5", None), ("gpt2", None), ("bert-2", None), ("mt5_ro", None)],
)  # fmt: skip
def test_digits_of_a_models_name_are_no_step(name, step):
    assert sources._step_in(f"folder_3/{name}") == step
