"""Kernels are found in programs, and bundles counted as often as they run."""

import dataclasses
import os
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from trainer.annexes.planning import hlo
from trainer.annexes.planning.compiled import local_target, module_of
from trainer.annexes.planning.kernels import Kernel, kernel_of, kernels
from trainer.annexes.planning.schedules import Bundles, Schedule, Scheduled, Schedules


def bundles(*parts):
    """Returns the text of a dump; a part is a number of bundles, or the text of one.

    Like libtpu, it marks no loop at an empty bundle.
    """
    lines = []
    for part in parts:
        for text in [""] * part if isinstance(part, int) else [part]:
            bundle = f"> {{ {text} }}" if text else " {}"
            lines.append(f"  {hex(len(lines)) if lines else '0'}   : {bundle}")
    return "\n".join(lines)


def loop(number, body, limit):
    """Returns a loop of `body` bundles and two more; its test is at its beginning."""
    when = "(%p3), " if number == 9 else ""
    test = f"%p{number} = scmp.ge.s32.totalorder {when}%s1, {limit} /* loop exit test */"
    return (
        f"{test} /* Start region {number} */",
        body,
        f"%9 = sbr.rel (!%p{number}) target = $region{number}",
    )


def test_loops_multiply_and_conditional_parts_count_once_a_group():
    text = bundles(
        "/* Start region 1 */ /* iteration index, stage = 1 */",
        "%p4 = scmp.ne.s32.totalorder %s7, 0 ;; %s7 = sphi %s8 /* iteration index, stage = 1 */",
        "%4 = sbr.rel (%p4) target = $region60", 150, "/* Start/End empty region 60 */",
        *loop(7, 40, 4), *loop(8, 50, "%s9"), *loop(9, 300, 2),
        "%p2 = scmp.ge.s32.totalorder %s2, 98 /* loop exit test */",
        "%8 = sbr.rel (!%p2) target = $region1",
    )  # fmt: skip
    schedule = Bundles.parse(text).kernel_schedule()
    # The limit of the second loop varies: the mean of one run and those of the grid's own body.
    assert schedule.once == 150
    assert schedule.step == 4 + 4 * 42 + 1 * 52 + 2 * 302 + 2
    assert schedule.cycles(groups=3, steps=10) == 3 * (10 * schedule.step + 150)
    # A layout that visits a quarter of the tiles of a causal mask.
    assert schedule.inner == 52
    assert schedule.cycles(1, 1, visited=0.25) == schedule.step - 0.75 * 52 + 150


@pytest.mark.parametrize(
    ("register", "comparison", "negation", "once"),
    [
        ("%s7", "ne", "", 150),  # pl.when(index == 0)
        ("%s7", "eq", "!", 150),
        ("%s7", "eq", "", 0),  # pl.when(index != 0)
        ("%s7", "ne", "!", 0),
        ("%s8", "ne", "", 0),  # pl.when(index % 2 == 0)
        ("%s7", "lt", "", 0),  # pl.when(index >= 1)
    ],
)
def test_what_runs_at_one_index_of_the_grid_counts_once(register, comparison, negation, once):
    text = bundles(
        "%s7 = sphi %s5 /* iteration index, stage = 1 */ /* Start region 1 */",
        "%s8 = sand.u32 1, %s7", f"%p4 = scmp.{comparison}.s32.totalorder {register}, 0",
        f"%4 = sbr.rel ({negation}%p4) target = $region60", 150, "/* Start/End empty region 60 */",
        "%p2 = scmp.ge.s32.totalorder %s2, 98 /* loop exit test */",
        "%8 = sbr.rel (!%p2) target = $region1",
    )  # fmt: skip
    schedule = Bundles.parse(text).kernel_schedule()
    assert (schedule.once, schedule.step) == (once, 157 - once)


def test_loops_over_tiles_are_work_of_every_step():
    text = bundles(
        "/* Start region 1 */ /* iteration index, stage = 1 */",
        "%4 = sbr.rel (%p4) target = $region60", 100, *loop(8, 50, "%s9"),
        "/* Start/End empty region 60 */", 400,
        "%p2 = scmp.ge.s32.totalorder %s2, 98 /* loop exit test */",
        "%8 = sbr.rel (!%p2) target = $region1",
    )  # fmt: skip
    schedule = Bundles.parse(text).kernel_schedule()
    assert (schedule.once, schedule.inner) == (0, 52)


@pytest.mark.parametrize(
    ("other", "join", "runs"),
    [
        ("%s7", "pnand", 4),  # the work of iterations 1 to 4; the first and last only copy
        ("%s7", "por", 6),
        ("%s8", "pnand", 6),  # not the loop's index
    ],
)
def test_the_work_of_a_fusion_does_not_run_while_its_pipeline_fills_or_drains(other, join, runs):
    text = bundles(
        "%s7 = sphi %s5 /* iteration index, stage = 1 */ /* Start region 1 */",
        f"%p4 = scmp.ge.s32.totalorder %s7, 1 ;; %p5 = scmp.lt.s32.totalorder {other}, 5",
        f"%p6 = {join} %p4, %p5", "%4 = sbr.rel (%p6) target = $region60", *loop(8, 98, 3),
        "/* Start/End empty region 60 */",
        "%p2 = scmp.ge.s32.totalorder %s2, 6 /* loop exit test */",
        "%8 = sbr.rel (!%p2) target = $region1",
    )  # fmt: skip
    assert Bundles.parse(text).fusion_cycles() == 6 * 7 + runs * 3 * 100


def test_kernels_of_scans_count_as_often_as_they_run():
    x = jax.ShapeDtypeStruct((16, 128), jnp.float32)

    def double(in_ref, out_ref):
        out_ref[...] = in_ref[...] * 2

    def kernel(x):
        block = pl.BlockSpec((8, 128), lambda i, j: (i, j))
        call = pl.pallas_call(
            double, grid=(2, 1), in_specs=[block], out_specs=block, out_shape=x, name="double"
        )
        return call(x)

    def program(x):
        return jax.jit(kernel)(jax.lax.scan(lambda x, _: (kernel(x), None), x, length=5)[0])

    (found,) = kernels(jax.make_jaxpr(program)(x).jaxpr)
    assert (found.name, found.grid, found.runs, found.bytes) == ("double", (2, 1), 6, 2 * 8192)


def test_a_custom_call_is_matched_by_name_and_shapes():
    short, long = (
        Kernel("attend", (2, rows), 1, ((rows, 128), (4,), (rows, 128)), 0) for rows in (16, 64)
    )
    (call,) = hlo.parse(
        "ENTRY %main (p: f32[64,128]) -> f32[64,128] {\n"
        "  ROOT %jvp_attend_.7 = f32[64,128]{1,0:T(8,128)} custom-call(%p, %ids), "
        'custom_call_target="tpu_custom_call", '
        "operand_layout_constraints={f32[64,128]{1,0}, s32[4]{0}}, metadata={}\n}\n"
    ).computations["main"]
    assert kernel_of(call, [short, long]) is long
    assert kernel_of(call, [short]) is None
    assert kernel_of(call, [long._replace(name="other")]) is None


def test_equal_kernels_share_a_schedule(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")  # Schedules adds to it
    module = hlo.parse(
        "ENTRY %main (p: f32[8]) -> f32[8] {\n"
        + "".join(
            f"  %attend.{number} = f32[8]{{0}} custom-call(%p), "
            'custom_call_target="tpu_custom_call", '
            f'backend_config={{"custom_call_config":{{"body":"{body}"}}}}\n'
            for number, body in enumerate(("layer", "layer", "other", "unknown"), 1)
        )
        + "}\n"
    )
    schedules = Schedules()
    folder = pathlib.Path(re.search(r"dump_to=(\S+)", os.environ["LIBTPU_INIT_ARGS"])[1])
    for name, length in (("attend.2", 5), ("attend.3", 9), ("attend.12", 7)):
        (folder / f"17-{name}-01-final_bundles.txt").write_text(bundles(length))
        (folder / f"17-{name}-00-schedule-analysis_final_bundles.txt").write_text("")
    found = schedules.read(module)
    assert {name: schedule.step for name, schedule in found.kernels.items()} == {
        "attend.1": 5,
        "attend.2": 5,
        "attend.3": 9,
    }
    schedules.clear()
    assert schedules.read(module) == found
    assert Schedules().read(module) == Scheduled()


class Newer:
    """A program of a newer libtpu: so does jaxlib 0.10.2 read libtpu 0.0.52's for v5p and v6e."""

    def as_text(self):
        raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure async-update instruction")


def test_a_program_that_jaxlib_cannot_read_is_read_as_libtpu_wrote_it(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    schedules = Schedules()
    target = dataclasses.replace(local_target(), schedules=schedules)
    with pytest.raises(jax.errors.JaxRuntimeError):
        module_of(Newer(), target)
    folder = pathlib.Path(re.search(r"dump_to=(\S+)", os.environ["LIBTPU_INIT_ARGS"])[1])
    (folder / "17-TLP-hlo.txt").write_text(
        "ENTRY %main (p: f32[8]) -> f32[8] {\n"
        "  ROOT %add = f32[8]{0} add(%p, %p), "
        'backend_config={"window_config":{"estimated_cycles":"99"}}\n}\n'
    )
    (added,) = module_of(Newer(), target).computations["main"]
    assert (added.opcode, added.cycles) == ("add", 0)


def test_cores_share_the_groups_of_a_kernel():
    kernel = Kernel("attend", (3, 4), 1, (), 0)
    schedule = Schedule(step=100, once=10)
    assert kernel.cycles(schedule) == 3 * 410
    assert kernel.cycles(schedule, cores=2) == 2 * 410
    # A grid of one axis is one group.
    assert kernel._replace(grid=(4,)).cycles(schedule) == 410
