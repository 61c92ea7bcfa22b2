"""Plans: on this machine's CPU, of runs that do not fit, and of wrong flags."""

import dataclasses
import json
import re
import types

import jax
import pytest

from tasks.terminal.command_line import UserError
from tests.support.processes import started
from tests.support.words import changed
from tests.trainer.conftest import assert_one_line
from trainer.annexes.planning import compiled, page, plan, search
from trainer.annexes.planning.compiled import TooLarge, compile_plan, local_target
from trainer.annexes.planning.devices import Calibration, Place, Rates, Topology
from trainer.annexes.planning.gpus import GPUS, Gpu
from trainer.annexes.planning.planned_run import subject
from trainer.config.from_flags import build_config

pytestmark = pytest.mark.processes

LENGTHS = ("--lengths.inputs=32", "--lengths.targets=16")
TINY = ("--preset=t5_1_1_tiny", *LENGTHS, "--batch_size=8")


@pytest.fixture(autouse=True)
def cache_of_programs_as_before():
    before = jax.config.jax_enable_compilation_cache
    yield
    jax.config.update("jax_enable_compilation_cache", before)


def tiny(*flags, preset="t5_1_1_tiny"):
    config, origins = build_config(preset, changed(*LENGTHS, "--batch_size=8", *flags))
    return subject(config, origins, devices=1)


def test_the_page_of_this_machine(capsys):
    assert plan.main([*TINY]) == 0
    page = capsys.readouterr().out
    for words in ("t5_1_1_tiny: ", "attention einsum", "cpu", "parameters", "logits and loss"):
        assert words in page
    assert "each host reads 8 rows" in page
    assert len(page.splitlines()) < 40
    assert max(map(len, page.splitlines())) <= 120


def test_the_page_says_between_which_times_a_step_is_expected(monkeypatch):
    monkeypatch.setattr(compiled, "place_of", lambda device: Place(0, (0, device.id)))
    chip = dataclasses.replace(GPUS["h100"], rates=Rates(memory=0.5))
    monkeypatch.setattr(Gpu, "calibration", Calibration(1.5, 2.0, 7))
    made = compile_plan(tiny(), dataclasses.replace(local_target(), chip=chip), evaluation=False)
    slow = made.train.optimized.timing(chip, chip.rates).step
    assert made.step < slow
    assert made.expected == pytest.approx((1.5 * slow, 2 * slow))
    low, high = (f"{seconds * 1e3:,.1f}" for seconds in made.expected)
    (line,) = (each for each in page.page(made).splitlines() if each.startswith("expected"))
    assert f"{low} to {high} ms a step" in line
    assert "by 7 steps that others measured on GPUs" in line
    assert json.loads(page.as_json(made))["expected_seconds"] == [*made.expected]
    alone = compile_plan(tiny(), local_target(), evaluation=False)
    assert alone.expected is None
    assert "expected" not in page.page(alone)


def test_json_adds_up_and_lengths_are_the_tasks(capsys):
    assert plan.main([*TINY, "--evaluation.every_steps=0", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    parts = values["train"]["bytes"]
    assert sum(parts.values()) == values["needed_bytes"] >= parts["parameters"] > 0
    assert parts["parameters"] == values["parameters"] * 4
    assert values["fits"] is None
    assert values["host_rows"] == 8
    config, origins = build_config("t5_1_1_tiny", ["--task=rlm_span_corruption"])
    assert subject(config, origins, devices=1).lengths == (512, 114)


@pytest.mark.parametrize(
    ("preset", "flags"),
    [
        ("lm_tiny", ("--lengths.inputs=0",)),
        ("lm_tiny", ("--lengths.inputs=0", "--task=rlm_decoder_prefix_lm")),
        ("llama_tiny", ()),
        ("bert_tiny", ()),
        ("tiny_switch_primer", ("--lengths.inputs=0",)),
    ],
)
def test_batches_of_every_architecture_can_be_traced(preset, flags):
    run = tiny(*flags, preset=preset)
    program = compiled.make_program(run, local_target())
    batch = {
        name: jax.ShapeDtypeStruct((8, *array.shape[1:]), array.dtype)
        for name, array in run.row().items()
    }
    program.train_step.lower(program.abstract_state(), batch)
    assert ("decoder_causal_attention" in batch) == (
        "--task=rlm_decoder_prefix_lm" in flags or preset == "llama_tiny"
    )


@pytest.mark.slow
def test_a_run_that_does_not_fit_gets_a_remedy(capsys):
    whole = tiny("--evaluation.every_steps=0", "--batch_size=64")
    unlimited = compile_plan(whole, local_target())
    target = dataclasses.replace(local_target(), memory=int(unlimited.needed * 0.7))
    tight = compile_plan(whole, target)
    assert tight.missing > 0
    assert re.search(r"^fits +NO: .* GB too much$", page.page(tight), re.MULTILINE)
    remedy, tried = search.first_that_fits(whole, target, tight, most=6)
    assert remedy is not None
    assert 0 < tried <= 6
    assert remedy.missing == 0
    assert "--microbatches=" in search.flags(remedy, whole)
    assert "GB too much" in capsys.readouterr().err


class Refusing:
    """Stands in for a step that the TPU's compiler refuses; its words were libtpu 0.0.42.1's."""

    def trace(self, *arguments):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (61.88G) exceeds available HBM (15.75G).\nmore"
        )


def test_a_run_that_the_compiler_refuses_gets_a_remedy(monkeypatch):
    run = tiny("--evaluation.every_steps=0", "--model.scan_layers=true")
    with monkeypatch.context() as patch:
        patch.setattr("trainer.engine.step.make_train_step", lambda *_: Refusing())
        with pytest.raises(TooLarge, match=r"66\.4 GB a device") as raised:
            compile_plan(run, local_target())
    target = dataclasses.replace(local_target(), memory=4 << 30)
    assert json.loads(page.as_json(raised.value))["fits"] is False
    remedy, _ = search.first_that_fits(run, target, raised.value, most=3)
    assert remedy is not None
    assert search.flags(remedy, run).startswith("--model.remat=")


@pytest.mark.slow
def test_an_evaluation_that_does_not_fit_gets_fewer_rows():
    whole = tiny("--batch_size=2", "--evaluation.batch_size=256", "--evaluation.every_steps=1")
    training = compile_plan(whole, local_target(), evaluation=False)
    target = dataclasses.replace(local_target(), memory=2 * training.needed)
    tight = compile_plan(whole, target)
    assert tight.missing > 0
    assert tight.trains
    remedy, _ = search.first_that_fits(whole, target, tight, most=1)
    assert remedy is not None
    assert remedy.evaluation is not None
    assert remedy.missing == 0
    flags = search.flags(remedy, whole)
    assert flags.startswith("--evaluation.batch_size=")
    assert int(flags.rpartition("=")[2]) < 256
    best = search.search(whole, target, most=1)[0]
    assert best.plan is not None
    assert best.plan.missing == 0
    assert best.values["evaluation.batch_size"] < 256


def test_a_search_tries_options_of_the_compiler_on_the_best(monkeypatch):
    option = "xla_disable_hlo_passes=fusion"
    monkeypatch.setattr(search, "_OPTIONS", {"cpu": ((option,),)})
    run = tiny("--model.scan_layers=true", "--model.remat=full", "--evaluation.every_steps=0")
    tried = search.search(run, local_target(), most=9)
    (fused,) = (each.plan for each in tried if not each.values)
    (other,) = (each.plan for each in tried if "compiler_options" in each.values)
    assert search.flags(other, run) == f"--compiler_options={option}"
    assert other.needed != fused.needed  # the option reached the compiler
    monkeypatch.setattr(search, "_OPTIONS", {"cpu": (("xla_speed=9",),)})
    (refused,) = (each for each in search.search(run, local_target(), most=9) if not each.plan)
    assert "the compiler for cpu refuses it" in str(refused.refused)


@pytest.mark.parametrize(
    ("most", "divided", "varied"), [(10, 8, 2), (40, 27, 2), (3, 2, 1), (1, 1, 0)]
)
def test_a_search_keeps_attempts_for_variants_of_the_best(monkeypatch, most, divided, varied):
    """On eight devices there are more meshes than attempts."""
    run, target = tiny("--batch_size=64", "--model.scan_layers=true"), local_target()
    target = dataclasses.replace(target, devices=target.devices * 8)
    monkeypatch.setattr(search, "_OPTIONS", {"cpu": (("xla_a=1",),)})
    monkeypatch.setattr(search, "_state_bytes", lambda *_: 0)
    monkeypatch.setattr(search, "evaluated", lambda plan: plan)
    monkeypatch.setattr(search, "_report", lambda _: None)

    compiled_ones = []

    def attempt(asked, target, values, known=None):
        compiled_ones.append(values)
        subject = asked.with_values(values)
        plan = types.SimpleNamespace(missing=0, step=1.0, subject=subject)
        return search.Attempt(values, plan)

    monkeypatch.setattr(search, "_attempt", attempt)
    found = [each.values for each in search.search(run, target, most)]
    variants = [
        each for each in found if "compiler_options" in each or not each.get("model.scan_layers", 1)
    ]
    assert (len(found) - len(variants), len(variants)) == (divided, varied)
    assert len(compiled_ones) == len(found)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--preset=t5_1_1_tiny"], "--lengths.inputs is missing"),
        ([*TINY, "--compiler_options=fast"], "options as NAME=VALUE"),
        ([*TINY, "--compiler_options=xla_a=1,xla_a=2"], "each name once"),
        ([*TINY, "--compiler_options=xla_tpu_a=1"], "xla_tpu_a=1: it is not for cpu"),
        (
            [*TINY, "--trainable=scale", "--mesh.divide_update=true"],
            "no effect with --trainable or",
        ),
        (["--preset=t5_1_1_tiny", *LENGTHS, "--batch_size=80000000"], "2,560,000,000 tokens"),
        ([*TINY, "--compiler_options=xla_speed=9"], "xla_speed=9: the compiler for cpu refuses it"),
        (["--preset=t5_1_1_tiny", "--lengths.inputs=0"], "--lengths.inputs=0 is for decoder-only"),
        ([*TINY, "--topology=v9:4x4"], "v4, v5e, v5p, v6e"),
        ([*TINY, "--topology=v5e:4x4x4"], "2 axes"),
        ([*TINY, "--topology=v5e:3x4"], "must be even"),
        ([*TINY, "--topology=v5e:0x4"], "above 0"),
        ([*TINY, "--topology=v5e:6x6"], "there is no such slice"),
        ([*TINY, "--topology=v6e:32x16"], "the largest slice is v6e:16x16"),
        ([*TINY, "--topology=v4:6x4x4"], "multiples of 4"),
        ([*TINY, "--topology="], "--topology= is unknown"),
        ([*TINY, "--topology=a100x8"], "h100:8 and a100:8 for a host of GPUs"),
        ([*TINY, "--topology=a100:2x4"], "several hosts 8 each (a100:4x8 for four)"),
        ([*TINY, "--search"], "it needs a --topology"),
        ([*TINY, "--task=c5"], "c5"),
        ([*TINY, "--cache_dir=nowhere"], "--cache_dir needs a --task"),
        ([*TINY, "--mesh.tensor=3"], "--mesh.data=-1"),
        *(([*TINY, f"--price={each}"], f"price={each}: it must be a ") for each in ("much", "-1")),
        ([*TINY, "--price=nan"], "--price=nan: it must be a "),
    ],
)
def test_mistakes_are_named(flags, message):
    with pytest.raises(UserError) as error:
        plan.main(flags)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("module", "topology", "words"),
    [
        ("libtpu", "v5e:4x4", ("libtpu", ".[tpu]")),
        ("jax_plugins.xla_cuda13", "h100:8", ("jax-cuda13-plugin", ".[gpu-plan]")),
    ],
)
def test_without_the_compiler_one_line_says_so(module, topology, words, tmp_path):
    script = tmp_path / "without.py"
    script.write_text(
        "import importlib.util\n"
        "found = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, *rest: None if name == {module!r} "
        "else found(name, *rest)\n"
        "from tasks.terminal import command_line\n"
        "from trainer.annexes.planning import plan\n"
        "command_line.run(plan.main)\n"
    )
    result = started(script, *TINY, f"--topology={topology}")
    assert len(result.stderr.splitlines()) == 1
    assert_one_line(result.returncode, result.stderr, *words)


@pytest.mark.parametrize(
    ("name", "hosts", "chips"),
    [("v5e:4x4", 4, 16), ("v5p:4x4x4", 16, 64), ("2xv6e:8x8", 32, 64), ("v5e:1x1", 1, 1)],
)
def test_topologies(name, hosts, chips):
    topology = Topology.named(name)
    assert topology.hosts == hosts
    assert topology.shape[0] ** len(topology.shape) == chips
