"""A GPU's kernel takes the longer of bytes and products, and a launch; links join hosts of 8."""

import pytest

from tasks.terminal.command_line import UserError
from trainer.annexes.planning import hlo, time_by_part
from trainer.annexes.planning.devices import Place, Rates
from trainer.annexes.planning.gpus import GPUS, GpuHosts
from trainer.annexes.planning.kernels import Kernel
from trainer.annexes.planning.schedules import Scheduled
from trainer.annexes.planning.timing import timing
from trainer.engine.hardware import peak_flops

H100 = GPUS["h100"]
PEAK = peak_flops(H100.kind)
PLACES = [Place(0, (host, host * 8 + number)) for host in range(2) for number in range(8)]
MIB = 2**20
MATRIX = "bf16[4096,4096]{1,0}"
CUBLAS = (
    f"%g = ({MATRIX}, s8[33554432]{{0}}) custom-call(%p, %p), "
    'custom_call_target="__cublas$lt$matmul", '
    'metadata={op_name="jit(train_step)/jvp(Transformer)/encoder/layers_0/mlp/wi/dot_general"}, '
    'backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
    '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}'
)
TRITON = (
    f"%pallas_call.1 = {MATRIX} custom-call(%p), "
    'custom_call_target="__gpu$xla.gpu.triton", '
    f"operand_layout_constraints={{{MATRIX}}}, metadata={{op_name="
    '"jit(train_step)/jvp(Transformer)/encoder/layers_0/attention/attention_query/pallas_call"}'
)
FREE = "%c = s32[4]{0} constant({...})"
REDUCE = f"%r = {MATRIX} all-reduce(%p), replica_groups={{}}, to_apply=%add"


def timed(*lines, traced=()):
    text = "\n".join(f"  {line}" for line in lines)
    module = hlo.parse(
        f"HloModule m, is_scheduled=true\n\nENTRY %main (p: bf16[4096,4096]) -> "
        f"bf16[4096,4096] {{\n  %p = {MATRIX} parameter(0)\n{text}\n}}\n"
    )
    return timing(module, H100, PLACES, list(traced), Scheduled())


def test_a_product_of_cublas_is_read_without_its_scratch():
    found = timed(CUBLAS, FREE)
    assert found.seconds[time_by_part.FEED_FORWARD] == pytest.approx(2 * 4096**3 / PEAK)
    assert found.seconds[time_by_part.LAUNCHES] == H100.launch
    assert not found.unread
    narrow = timed(CUBLAS.replace(f"({MATRIX}", "(bf16[4096,8]{1,0}"))
    bytes_of = 2 * 32 * MIB + 4096 * 8 * 2
    assert narrow.seconds[time_by_part.FEED_FORWARD] == pytest.approx(
        bytes_of / H100.memory_bandwidth
    )


def test_a_kernel_takes_the_products_that_it_says():
    shapes = ((4096, 4096), (4096, 4096))
    kernel = Kernel("attention_query", (8,), 1, shapes, 32 * MIB, flops=10**12)
    found = timed(TRITON, traced=[kernel])
    assert found.seconds[time_by_part.ATTENTION] == pytest.approx(10**12 / PEAK)
    assert [(each.name, each.times) for each in found.kernels] == [("attention_query", 1)]
    text = f"HloModule m\n\nENTRY %main (p: f32[1]) -> f32[1] {{\n  %p = {MATRIX} parameter(0)\n"
    module = hlo.parse(f"{text}  {TRITON}\n}}\n")
    slow = timing(module, H100, PLACES, [kernel], Scheduled(), rates=Rates(0.8, kernels=0.4))
    assert slow.seconds[time_by_part.ATTENTION] == pytest.approx(10**12 / PEAK / 0.4)
    plain = timed(TRITON, traced=[kernel._replace(flops=0)])
    assert plain.seconds[time_by_part.ATTENTION] == pytest.approx(32 * MIB / H100.memory_bandwidth)


def test_rings_between_hosts_use_the_adapters_of_their_gpus():
    def seconds(group):
        return H100.seconds_of_collective(10**9, group, (2, 8))

    assert seconds(PLACES[:8]) == pytest.approx(1e9 / H100.link)
    assert seconds(PLACES) == pytest.approx(max(1e9 / H100.link, 1e9 / (8 * H100.network)))
    assert seconds([*PLACES[:2], *PLACES[8:10]]) == pytest.approx(1e9 / (2 * H100.network))
    assert seconds(PLACES[::8]) == pytest.approx(1e9 / H100.network)
    sent = 2 * 32 * MIB * 15 // 16
    taken = timed(REDUCE)
    assert taken.step == pytest.approx(H100.seconds_of_collective(sent, PLACES, (2, 8)))
    assert taken.traffic()["all-reduce"]["bytes"] == sent


@pytest.mark.parametrize(
    ("name", "hosts", "gpus"), [("h100:8", 1, 8), ("a100:4x8", 4, 8), ("h100:1", 1, 1)]
)
def test_hosts_by_name(name, hosts, gpus):
    found = GpuHosts.named(name)
    assert (found.hosts, found.per_host, found.chip) == (hosts, gpus, GPUS[name[:4]])


@pytest.mark.parametrize("name", ["h100:16", "h100:2x4", "h100:0", "a100:0x8"])
def test_there_are_hosts_of_eight(name):
    with pytest.raises(UserError, match="one host has 1 to 8 GPUs"):
        GpuHosts.named(name)


def test_other_names_are_no_gpus():
    assert GpuHosts.named("v5e:4x4") is GpuHosts.named("b200:8") is None
