"""An operation takes the longest of schedule, bytes and products; transfers share a resource."""

import pytest

from trainer.annexes.planning import hlo, time_by_part
from trainer.annexes.planning.devices import CHIPS, Place, Rates
from trainer.annexes.planning.schedules import Scheduled
from trainer.annexes.planning.timing import timing
from trainer.annexes.planning.work import Work, Worker
from trainer.engine.hardware import peak_flops

CHIP = CHIPS["v5e"]
PEAK = peak_flops(CHIP.kind)
PLACES = [Place(0, (number % 2, number // 2)) for number in range(4)]
# A matrix of 4 MiB in HBM, and one in the chip's own memory.
MATRIX, OWN = "f32[1024,1024]{1,0:T(8,128)}", "f32[1024,1024]{1,0:T(8,128)S(1)}"
MIB = 2**20


def program(lines, computations=""):
    text = "\n".join(f"  {line}" for line in lines)
    return hlo.parse(
        f"HloModule m, is_scheduled=true\n\n{computations}\nENTRY %main (p: f32[1024,1024]) -> "
        f"f32[1024,1024] {{\n  %p = {MATRIX} parameter(0)\n{text}\n}}\n"
    )


def timed(module, **cycles):
    return timing(module, CHIP, PLACES, [], Scheduled({}, cycles))


def work(module, name):
    found = {each.name: each for each in module.computations[module.entry]}
    return Worker(module).work(module.entry, found[name])


NEGATE = (
    f"%negated (x: f32[1024,1024]) -> f32[1024,1024] {{\n  %x = {MATRIX} parameter(0)\n"
    f"  ROOT %n = {MATRIX} negate(%x)\n}}\n"
)
GATHER = "%a = f32[4096,1024]{1,0:T(8,128)} all-gather(%p), replica_groups={}, dimensions={0}"
FUSION = f"%f = {MATRIX} fusion(%p), kind=kLoop, calls=%negated"


def test_the_longest_of_schedule_bytes_and_products_counts():
    moved = program([FUSION], NEGATE)
    bytes_take = 8 * MIB / CHIP.memory_bandwidth
    assert timed(moved).step == pytest.approx(bytes_take)
    assert timed(moved, f=100).step == pytest.approx(bytes_take)
    assert timed(moved, f=10**6).step == pytest.approx(10**6 / CHIP.clock)
    dot = f"%d = {MATRIX} dot(%p, %p), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
    product = program([dot.replace(MATRIX, OWN)])
    assert timed(product).step == pytest.approx(max(2 * 1024**3 / PEAK, bytes_take))
    assert timed(product).unread == 1
    assert timed(product, d=1).unread == 0


def test_rates_stretch_what_they_are_of():
    moved, gathered = program([FUSION], NEGATE), program([GATHER])
    products = program([f"%d = {OWN} dot(%p, %p), lhs_contracting_dims={{1}}"])

    def stretched(module, cycles=None, **rates):
        """Returns how many times as long the program takes at these rates."""
        at = {"scheduled": Scheduled({}, cycles or {})}
        slow = timing(module, CHIP, PLACES, [], **at, rates=Rates(**rates)).step
        return slow / timing(module, CHIP, PLACES, [], **at).step

    assert stretched(moved, memory=0.5) == pytest.approx(2)
    assert stretched(moved, products=0.5, links=0.5) == pytest.approx(1)
    assert stretched(moved, {"f": 10**6}, products=0.5) == pytest.approx(2)
    assert stretched(products, products=0.5) == pytest.approx(2)
    assert stretched(gathered, links=0.5) == pytest.approx(2)
    assert stretched(gathered, products=0.5) == pytest.approx(1)


@pytest.mark.parametrize("number", [1, 2, 8])
def test_gathers_under_way_at_once_share_the_links(number):
    """Eight of them cannot hide behind the work that hides one."""
    whole = "f32[4096,1024]{1,0:T(8,128)}"
    module = program(
        [
            *(
                f"%s{i} = ({MATRIX}, {whole}) all-gather-start(%p), channel_id={i + 1}, "
                "replica_groups={{0,1,2,3}}, dimensions={0}"
                for i in range(number)
            ),
            FUSION,
            *(f"%d{i} = {whole} all-gather-done(%s{i})" for i in range(number)),
        ],
        NEGATE,
    )
    one = 12 * MIB / (2 * CHIP.link)
    busy = 1.5 * one
    found = timed(module, f=round(busy * CHIP.clock))
    assert found.step == pytest.approx(max(busy, number * one), rel=1e-4)
    gathers = found.traffic()["all-gather"]
    assert gathers["seconds"] == pytest.approx(number * one)
    assert gathers["exposed"] == pytest.approx(max(number * one - busy, 0), rel=1e-3)


def test_a_gather_that_several_fusions_carry_counts_once():
    """Fusions begin, carry and end one gather of one channel, as the TPU's compiler writes it."""
    whole = "f32[4096,1024]{1,0:T(8,128)}"
    group = "replica_groups={{0,1,2,3}}, dimensions={0}"
    gather = f"%g = {whole} all-gather(%x), channel_id=7, {group}"

    def piece(name, target):
        last = f"ROOT %e = {whole} custom-call(%g), custom_call_target={target}"
        return (
            f"%{name} (x: f32[1024,1024]) -> f32[4096,1024] {{\n"
            f"  %x = {MATRIX} parameter(0)\n  {gather}\n  {last}\n}}\n"
        )

    pieces = (
        piece("first", '"AsyncCollectiveStart"'),
        piece("async_collective_fusion.2", '"other"'),
        piece("last", '"AsyncCollectiveDone"'),
    )
    module = program(
        [
            f"%start = {whole} fusion(%p), kind=kCustom, calls=%first",
            f"%carries = {whole} fusion(%p), kind=kOutput, calls=%async_collective_fusion.2",
            f"%done = {whole} fusion(%p), kind=kCustom, calls=%last",
        ],
        "".join(pieces),
    )
    one = 12 * MIB / (2 * CHIP.link)
    found = timed(module, carries=round(0.25 * one * CHIP.clock))
    assert [each.sent for each in found.collectives] == [12 * MIB]
    assert found.traffic()["all-gather"]["seconds"] == pytest.approx(one)
    assert found.step >= one
    # The links move its bytes: the fusions read and write nothing of their own.
    assert {work(module, name).bytes for name in ("start", "done")} == {0}


def test_an_asynchronous_sum_into_shares_sends_three_quarters_of_the_whole():
    share, group = "f32[256,1024]{1,0:T(8,128)}", "replica_groups={{0,1,2,3}}, dimensions={0}"
    module = program(
        [
            f"%s = ({MATRIX}, {share}) reduce-scatter-start(%p), channel_id=1, {group}",
            f"%d = {share} reduce-scatter-done(%s)",
        ]
    )
    (found,) = timed(module).collectives
    assert found.sent == 3 * MIB


@pytest.mark.parametrize(("kind", "sent"), [("reduce-scatter", 3 * MIB), ("negate", 0)])
def test_a_sparse_core_sums_beside_the_program(kind, sent):
    """The program is written as by libtpu 0.0.52 for v5p; other offloaded work is no collective."""
    share, state = "f32[256,1024]{1,0:T(8,128)}", "(s32[8]{0:T(128)})"
    body = (
        "%called_computation.1 (x: f32[1024,1024]) -> f32[256,1024] {\n"
        f"  %x = {MATRIX} parameter(0)\n"
        f"  ROOT %r = {share} {kind}(%x), channel_id=7, replica_groups={{{{0,1,2,3}}}}, "
        "dimensions={0}\n}\n"
    )
    begins = f"%u = (({MATRIX}), {share}, {state}) custom-call-update(%s, %p)"
    module = program(
        [
            f'%s = ((), (), {state}) custom-call-start(), async_execution_thread="sparsecore", '
            "called_computations={%called_computation.1}",
            f"%before = {MATRIX} fusion(%p), kind=kLoop, calls=%negated",
            begins,
            FUSION,
            f"%d = {share} custom-call-done(%u)",
        ],
        body + NEGATE,
    )
    one = 3 * MIB / (2 * CHIP.link)
    found = timed(module, before=10**6, f=round(0.5 * one * CHIP.clock))
    assert [each.sent for each in found.collectives] == [sent] * bool(sent)
    if sent:
        exposed = found.traffic()["reduce-scatter"]["exposed"]
        assert exposed == pytest.approx(0.5 * one, rel=1e-3)  # what ran before hides nothing


def test_a_fusion_that_carries_a_gather_moves_its_own_operands_alone():
    whole = "f32[4096,1024]{1,0:T(8,128)}"
    both = f"({MATRIX}, {MATRIX}, {whole})"
    body = (
        "%async_collective_fusion.1 (x: f32[1024,1024], y: f32[1024,1024]) -> "
        "(f32[1024,1024], f32[1024,1024], f32[4096,1024]) {\n"
        f"  %x = {MATRIX} parameter(0)\n  %y = {MATRIX} parameter(1)\n"
        f"  %n = {MATRIX} negate(%y)\n"
        f"  %g = {whole} all-gather(%x), channel_id=7, dimensions={{0}}\n"
        f"  ROOT %t = {both} tuple(%n, %x, %g)\n}}\n"
    )
    negated = f"%q = {MATRIX} negate(%p)"
    called = f"%f = {both} fusion(%p, %q), kind=kOutput, calls=%async_collective_fusion.1"
    assert work(program([negated, called], body), "f").bytes == 8 * MIB


def test_copies_take_the_bandwidth_that_work_leaves():
    own = f"({OWN}, {MATRIX}, u32[]{{:S(2)}})"
    module = program([f"%s = {own} copy-start(%p)", FUSION, f"%d = {OWN} copy-done(%s)"], NEGATE)
    copy, fusion = (size * MIB / CHIP.memory_bandwidth for size in (4, 8))
    # The fusion uses all of the bandwidth.
    found = timed(module)
    assert found.seconds[time_by_part.COPIES] == pytest.approx(copy)
    # Its schedule leaves half of a copy's time.
    found = timed(module, f=round((fusion + copy / 2) * CHIP.clock))
    assert found.seconds[time_by_part.COPIES] == pytest.approx(copy / 2, rel=1e-2)
    assert timed(module, f=10**6).seconds[time_by_part.COPIES] == 0


def test_a_transfer_is_hidden_by_a_loop_and_must_end_in_its_computation():
    body = (
        f"%body (x: f32[1024,1024]) -> f32[1024,1024] {{\n  %x = {MATRIX} parameter(0)\n"
        f"  ROOT %f = {MATRIX} fusion(%x), kind=kLoop, calls=%negated\n}}\n"
        f"%test (y: f32[1024,1024]) -> pred[] {{\n  %y = {MATRIX} parameter(0)\n"
        "  ROOT %c = pred[] constant(true)\n}\n"
    )
    whole = "f32[4096,1024]{1,0:T(8,128)}"
    loop = f"%w = {MATRIX} while(%p), condition=%test, body=%body"
    trips = ', backend_config={"known_trip_count":{"n":"5"}}'
    start = f"%s = ({MATRIX}, {whole}) all-gather-start(%p), replica_groups={{{{0,1,2,3}}}}"
    module = program([start, loop + trips], NEGATE + body)
    one = 12 * MIB / (2 * CHIP.link)
    assert timed(module, f=10**5).step == pytest.approx(5e5 / CHIP.clock)
    assert timed(module, f=20_000).step == pytest.approx(one)


def test_a_fusion_reads_what_it_slices_and_writes_what_it_updates():
    row = "f32[8,1024]{1,0:T(8,128)}"
    sliced = (
        f"%sliced (x: f32[1024,1024], i: s32[]) -> f32[8,1024] {{\n  %x = {MATRIX} parameter(0)\n"
        "  %i = s32[] parameter(1)\n  %z = s32[] constant(0)\n"
        f"  ROOT %r = {row} dynamic-slice(%x, %i, %z), dynamic_slice_sizes={{8,1024}}\n}}\n"
    )
    updated = (
        f"%updated (x: f32[1024,1024], u: f32[8,1024]) -> f32[1024,1024] {{\n"
        f"  %x = {MATRIX} parameter(0)\n  %u = {row} parameter(1)\n  %z = s32[] constant(0)\n"
        f"  %n = {row} negate(%u)\n"
        f"  ROOT %r = {MATRIX} dynamic-update-slice(%x, %n, %z, %z)\n}}\n"
    )
    module = program(
        [
            "%z = s32[] constant(0)",
            f"%part = {row} fusion(%p, %z), kind=kLoop, calls=%sliced",
            f"%whole = {MATRIX} fusion(%p, %part), kind=kLoop, calls=%updated",
        ],
        sliced + updated,
    )
    small = 8 * 1024 * 4
    assert work(module, "part").bytes == pytest.approx(2 * small, abs=8)
    assert work(module, "whole").bytes == 2 * small


@pytest.mark.parametrize(
    ("left", "right", "result", "attributes", "products"),
    [
        ("64,32", "32,16", "64,16", "dim_labels=bf_io->bf", 64 * 32 * 16),
        ("16,64,32", "32,8,1", "16,64,8", "window={size=1}, dim_labels=0bf_io0->0bf",
         16 * 64 * 256),
        # A gradient of a kernel: a sum over 16 rows.
        ("16,64,32", "16,64,8", "32,8,1", "window={size=16}, dim_labels=0fb_0io->bf0",
         16 * 64 * 32 * 8),
        # Attention's products are one per row of the batch: a dilated window meets one of them.
        ("4,64,32", "4,32,16", "4,64,16",
         "window={size=4 stride=3 pad=0_0 lhs_dilate=4}, dim_labels=0bf_0io->0bf",
         4 * 64 * 32 * 16),
        # Five outputs of three inputs each, without the two that meet padding.
        ("1,5,8", "3,8,8", "1,5,8", "window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f", 13 * 64),
    ],
)  # fmt: skip
def test_products_of_a_convolution(left, right, result, attributes, products):
    module = hlo.parse(
        f"ENTRY %main (a: f32[{left}], b: f32[{right}]) -> f32[{result}] {{\n"
        f"  %a = f32[{left}]{{0:S(1)}} parameter(0)\n  %b = f32[{right}]{{0:S(1)}} parameter(1)\n"
        f"  ROOT %c = f32[{result}]{{0:S(1)}} convolution(%a, %b), {attributes}\n}}\n"
    )
    assert work(module, "c") == Work(0, 2 * products)
