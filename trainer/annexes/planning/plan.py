"""Compiles a run ahead of time and prints what it needs.

    palimpsest plan --topology=v5e:4x4 --preset=t5_1_1_base --lengths.inputs=512 \\
        --lengths.targets=114 --batch_size=256 --model.dtype=bfloat16
    palimpsest plan --topology=v5p:4x4x4 … --search
    palimpsest plan --topology=h100:8 …

It prints whether the programs fit in memory, an estimate of the step time, and what the run
costs. Nothing is run, and no TPU, GPU, cache or task is needed; without --task, set
--lengths. Without --topology, the plan is for the devices of this machine. It takes
the flags of trainer.pretrain, so they can be copied between the two command lines.
"""

import dataclasses
import math
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import Rule, at_least, field
from trainer.config import field_paths, from_flags
from trainer.config.from_flags import OpenRunFlags

if TYPE_CHECKING:
    from trainer.annexes.planning.compiled import Target
    from trainer.annexes.planning.schedules import Schedules

_COMPILATIONS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(OpenRunFlags):
    """Flags of trainer.pretrain and of the plan."""

    topology: str | None = field(
        None,
        "TPU slice as GENERATION:SHAPE in chips, such as v5e:4x4, v4:2x2x4 or, for two slices, "
        "2xv5e:16x16 (needs the extra tpu), or hosts of GPUs, such as h100:8 or, for four hosts, "
        "a100:4x8 (needs the extra gpu-plan); None: the devices of this machine",
        metavar="NAME",
        often="TPU slice, such as v5e:4x4, or GPUs, such as h100:8",
    )
    search: int | None = field(
        None,
        "compile up to N combinations of mesh, microbatches and rematerialisation "
        f"({_COMPILATIONS} if N is left out), and print them ranked, as flags",
        rule=at_least(1),
        alone=str(_COMPILATIONS),
        often="compile N variants and rank them",
    )
    json: bool = field(False, "print JSON", often="print JSON")
    price: float | None = field(
        None,
        "price per chip-hour, for the cost",
        rule=Rule("a price", lambda price: 0 <= price < math.inf),
        metavar="DOLLARS",
        often="dollars per chip-hour",
    )


def run(flags: Flags) -> int:
    """Prints the plan; raises UserError if the run does not fit, and names one that does."""
    config, origins = from_flags.configured(flags)
    if flags.print_config:
        print(field_paths.describe(config, origins, words=flags.print_config == "words"))
        return 0
    target = target_of(flags.topology, config.deterministic)
    if target.schedules:
        _stop_at_once(target.schedules)

    import jax

    # Programs from the cache lack the schedules of their kernels.
    jax.config.update("jax_enable_compilation_cache", False)

    from trainer.annexes.planning import page, search
    from trainer.annexes.planning.compiled import Plan, TooLarge, compile_plan
    from trainer.annexes.planning.planned_run import subject

    planned = subject(config, origins, len(target.devices))
    if flags.search:
        if target.chip is None:
            raise UserError("--search compares estimated times, so it needs a --topology")
        found = search.search(planned, target, flags.search)
        print(page.as_json(found, flags.price) if flags.json else page.ranking(found, planned))
        if not any(each.plan and not each.plan.missing for each in found):
            raise UserError(
                f"none of the {len(found)} configurations tried fits {target.name}: use a larger "
                "slice, a smaller batch, or --search=N to try more"
            )
        return 0
    outcome: Plan | TooLarge
    try:
        outcome = compile_plan(planned, target)
    except TooLarge as error:
        outcome, missing = error, str(error)
        if flags.json:
            print(page.as_json(error))
    else:
        show = page.as_json if flags.json else page.page
        print(show(outcome, flags.price))
        if not outcome.missing:
            return 0
        missing = f"{outcome.missing / 1e9:,.1f} GB a device too much"
    print(f"it does not fit, {missing}; looking for what does", file=sys.stderr, flush=True)
    remedy, tried = search.first_that_fits(planned, target, outcome, _COMPILATIONS)
    if remedy is None or remedy.missing:
        raise UserError(
            f"the run does not fit {target.name} ({missing}), and none of the {tried} "
            "configurations tried does: use a larger slice, or a smaller batch"
        )
    raise UserError(
        f"the run does not fit {target.name} ({missing}); what fits, with "
        f"{remedy.needed / 1e9:,.1f} GB a device: {search.flags(remedy, planned)}"
    )


def target_of(name: str | None, deterministic: bool = True) -> "Target":
    """Returns the devices of the named topology, or of this machine; imports JAX.

    `deterministic` is what a run on GPUs asks of XLA.
    """
    if name is None:
        from trainer.annexes.planning.compiled import local_target

        return local_target()
    from trainer.annexes.planning import devices, gpus
    from trainer.annexes.planning.schedules import Schedules

    if hosts := gpus.GpuHosts.named(name):
        hosts.prepare_compiler(deterministic)

        from trainer.annexes.planning.compiled import Target

        return Target(name, hosts.devices(), hosts.hosts, hosts.chip, hosts.chip.memory)
    topology = devices.Topology.named(name)
    devices.prepare_compiler()
    schedules = Schedules()

    from trainer.annexes.planning.compiled import Target

    chip = topology.chip
    return Target(name, topology.devices(), topology.hosts, chip, chip.memory, schedules)


def _stop_at_once(schedules: "Schedules") -> None:
    """Makes Ctrl-C and SIGTERM end the process at once; Python would wait for the compiler."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    # Python immediately writes a signal's number to this pipe.
    signal.set_wakeup_fd(writing)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)

    def wait() -> None:
        received = os.read(reading, 1)[0]
        schedules.remove()
        print("stopped", file=sys.stderr, flush=True)
        os._exit(128 + received)

    threading.Thread(target=wait, name="signals", daemon=True).start()


main = Command(Flags, run, at_once="run the same command again")

if __name__ == "__main__":
    main.start()
