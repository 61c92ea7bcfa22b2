"""Reading the text of an optimised program: loops, times, bytes, kernels."""

import pathlib

import pytest

from trainer.annexes.planning import hlo
from trainer.annexes.planning import time_by_part as parts
from trainer.annexes.planning.devices import CHIPS, Place, sent_bytes
from trainer.annexes.planning.kernels import Kernel
from trainer.annexes.planning.memory import Liveness
from trainer.annexes.planning.schedules import Schedule, Scheduled
from trainer.annexes.planning.timing import timing

HERE = pathlib.Path(__file__).parent
CHIP = CHIPS["v5e"]
PLACES = [Place(0, (x, y, 0)) for x in range(4) for y in range(4)]
# Bundles of the stored program's fusions, each more than its bytes take.
BUNDLES = {
    "fusion.1": 2000, "fusion.2": 30_000, "embedded.1": 9000, "logits.1": 12_000, "loss.1": 9000,
    "back.1": 9100, "updated.1": 9200, "nameless.1": 20,
}  # fmt: skip
# Its loop has six layers, and its kernel is given 5,000 cycles.
CYCLES = {
    parts.ATTENTION: 6 * (2000 + 5000), parts.SCAN: 6 * 30_000, parts.EMBEDDING: 9000,
    parts.LOGITS: 12_000 + 9000, parts.FEED_FORWARD: 9100, parts.OPTIMIZER: 9200, parts.COPIES: 0,
    parts.REST: 20,
}  # fmt: skip
ESTIMATES = {
    parts.ATTENTION: 6 * (1000 + 5000), parts.SCAN: 6 * 50, parts.EMBEDDING: 200,
    parts.LOGITS: 400 + 70, parts.FEED_FORWARD: 300, parts.OPTIMIZER: 130, parts.COPIES: 0,
    parts.REST: 20,
}  # fmt: skip
ACTIVATIONS = 16 * 64 * 256 * 2
# Its two groups of heads take two steps of 1,000 bundles and 500 once: 5,000 cycles.
KERNEL = Kernel("kernel", (2, 2), 6, ((16, 64, 256), (16, 64, 256)), 2 * ACTIVATIONS)


@pytest.fixture(scope="module")
def module():
    return hlo.parse((HERE / "step.hlo").read_text())


@pytest.fixture(scope="module")
def estimate(module):
    scheduled = Scheduled({"kernel.1": Schedule(step=1000, once=500)}, BUNDLES)
    return timing(module, CHIP, PLACES, [KERNEL], scheduled)


@pytest.mark.parametrize(("name", "cycles"), [("seconds", CYCLES), ("estimated", ESTIMATES)])
def test_cycles_are_booked_by_part_and_parts_add_up_to_the_step(estimate, name, cycles):
    seconds = dict(getattr(estimate, name))
    seconds.pop(parts.COLLECTIVES)
    assert seconds.pop(parts.LAUNCHES) == 0  # of GPUs only
    assert seconds == pytest.approx({part: n / CHIP.clock for part, n in cycles.items()})
    exposed = sum(kind["exposed"] for kind in estimate.traffic().values())
    steps = {"seconds": estimate.step, "estimated": estimate.estimated_step}
    assert steps[name] == pytest.approx(sum(cycles.values()) / CHIP.clock + exposed)


def test_collectives_send_bytes_and_work_beside_them_hides_them(estimate):
    traffic = estimate.traffic()
    # An all-reduce of two devices sends each byte once, in each of six layers.
    assert traffic["all-reduce"]["bytes"] == 6 * ACTIVATIONS
    assert traffic["all-gather"]["bytes"] == 1024 * 256 * 4 * 15 // 16
    # A fusion of an all-reduce and a slice is a reduce-scatter; its groups are rows of four chips.
    assert traffic["reduce-scatter"]["bytes"] == 1024 * 256 * 2 * 3 // 4
    assert {*traffic} == {"all-reduce", "all-gather", "reduce-scatter"}
    gather = traffic["all-gather"]
    assert gather["seconds"] - gather["exposed"] == pytest.approx(12_000 / CHIP.clock)
    assert traffic["all-reduce"]["exposed"] == traffic["all-reduce"]["seconds"] > 0


def test_a_kernel_without_schedule_is_named(module):
    (kernel,) = timing(module, CHIP, PLACES, [KERNEL], Scheduled()).kernels
    assert (kernel.name, kernel.cycles, kernel.times) == ("kernel", None, 6)


def test_a_kernel_that_was_not_traced_has_the_grid_of_its_schedule(module):
    scheduled = Scheduled({"kernel.1": Schedule(100, 50, steps=8)})
    (unknown,) = timing(module, CHIP, PLACES, [], scheduled).kernels
    assert (unknown.name, unknown.cycles, unknown.times) == ("kernel.1", 850, 6)
    assert unknown.size == 2 * ACTIVATIONS


def test_the_fullest_moment_by_part(module):
    peak = Liveness(module, {1024}).peak(module.entry)
    # Six layers' stack, which begins as nameless memory, is the attention's.
    assert peak["activations, attention"] >= 6 * ACTIVATIONS
    assert peak["logits and loss"] == 16 * 64 * 1024 * 4
    # The updated table lies in the memory of the argument.
    assert sum(peak.values()) < 8 * ACTIVATIONS + 16 * 64 * 1024 * 4 + 2 * 1024 * 256 * 4


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[]", 4), ("f32[10,20]{1,0}", 800), ("f32[10,20]{1,0:T(8,128)}", 16 * 128 * 4),
        ("bf16[3,20,10]{1,2,0:T(8,128)(2,1)}", 3 * 16 * 128 * 2), ("pred[7]{0}", 7),
        ("s4[6]{0}", 3),
    ],
)  # fmt: skip
def test_bytes_of_a_shape(shape, size):
    (array,) = hlo.arrays(shape)
    assert array.size == size


def test_memory_spaces_and_tuples():
    arrays = hlo.arrays("(bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/u32[]{:S(2)}, f32[4]{0})")
    assert [array.in_hbm for array in arrays] == [False, False, True]


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,2},{1,3}}, x", [[0, 2], [1, 3]]),
        ("replica_groups=[2,3]<=[6], x", [[0, 1, 2], [3, 4, 5]]),
        ("replica_groups=[3,2]<=[2,3]T(1,0), x", [[0, 3], [1, 4], [2, 5]]),
        ("replica_groups=mesh['a'=2,'b'=1,'c'=2] {'a'}, x", [[0, 2], [1, 3]]),
        ("to_apply=%add", []),
    ],
)
def test_groups_of_devices(text, groups):
    assert hlo.replica_groups(text) == groups


def test_bytes_are_sent_over_two_links_to_an_axis():
    assert sent_bytes("all-reduce", 1600, 16) == 3000
    assert sent_bytes("all-gather", 1600, 16) == 1500
    assert sent_bytes("collective-permute", 1600, 2) == 1600
    assert sent_bytes("all-reduce", 1600, 1) == 0
    shape = (4, 4, 1)
    # On v5e, rows of four chips are open; on v5p they are closed to rings.
    assert CHIP.seconds_of_collective(10**9, PLACES, shape) == pytest.approx(1e9 / (2 * CHIP.link))
    row, other = PLACES[:4], CHIPS["v5p"]
    assert other.seconds_of_collective(10**9, row, shape) == pytest.approx(1e9 / (2 * other.link))


def test_the_fullest_link_decides_how_long_a_permutation_takes():
    number = {place.coordinates: at for at, place in enumerate(PLACES)}

    def links(chip, along, distance):
        """Returns how many messages cross the fullest link if all chips send so far."""
        pairs = []
        for place in PLACES:
            to = [*place.coordinates]
            to[along] = (to[along] + distance) % 4
            pairs.append((place, PLACES[number[tuple(to)]]))
        return chip.seconds_of_permutation(10**9, pairs, (4, 4, 1)) * chip.link / 1e9

    # In an open row, the last chip's message crosses all links backwards, each once.
    found = [links(CHIP, 0, distance) for distance in (1, 2, 3)]
    assert found == pytest.approx([1, 2, 1])
    # In a ring of four, it takes the closing link.
    assert links(CHIPS["v5p"], 1, 3) == pytest.approx(1)
    one = CHIPS["v5p"].seconds_of_permutation(10**9, [(PLACES[0], PLACES[12])], (4, 4, 1))
    assert one == pytest.approx(1e9 / CHIPS["v5p"].link)
    assert CHIP.seconds_of_permutation(10**9, [], (4, 4, 1)) == 0


def test_between_slices_the_network_is_used():
    send = (
        "HloModule two, is_scheduled=true\n\nENTRY %main (p: f32[256,1024]) -> f32[256,1024] {\n"
        "  %p = f32[256,1024]{1,0} parameter(0)\n"
        "  %send = (f32[256,1024]{1,0}, u32[], token[]) send(%p), channel_id=1, "
        'frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}\n'
        '  %busy = f32[8,128]{1,0} copy(%p), backend_config={"estimated_cycles":"1500"}\n'
        "  ROOT %done = token[] send-done(%send), channel_id=1\n}\n"
    )
    both = [Place(number, place.coordinates) for number in (0, 1) for place in PLACES]
    found = timing(hlo.parse(send), CHIP, both, [], Scheduled({}, {"busy": 3000}))
    total = found.traffic()["between slices: all-reduce"]
    assert total["bytes"] == 2**20
    assert total["seconds"] == pytest.approx(2**20 / CHIP.network)
    assert total["seconds"] - total["exposed"] == pytest.approx(2e-6)


def test_a_text_without_entry_is_no_program():
    with pytest.raises(ValueError, match="entry"):
        hlo.parse("HloModule empty\n")


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("jit(train_step)/jvp(Transformer)/decoder/layers_0/self_attention/query/dot", "attention"),
        ("jit(train_step)/transpose(jvp(Encoder))/encoder/layers_0/mlp/wi_0/dot", "feed-forward"),
        ("jit(train_step)/jvp(Transformer)/encoder/relpos_bias/gather", "attention"),
        ("jit(train_step)/jvp(Transformer)/encoder/layers_0/pre_mlp_layer_norm/mul", "embedding"),
        ("jit(train_step)/jvp()/reduce_sum", "logits"),
        ("jit(train_step)/jvp(logit_statistics)/pallas_call", "logits"),
        ("jit(train_step)/mul", "optimizer"),
        ("jit(evaluation_step)/Transformer/decoder/layers_1/mlp/wo/dot", "feed-forward"),
        ("jit(evaluation_step)/reduce_max", "logits"),
        ("broadcast.7", "rest"),
        ("", "rest"),
    ],
)
def test_part_of_an_operation(path, part):
    assert parts.part_of(path).startswith(part)
