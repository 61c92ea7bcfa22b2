"""Plans a run: compiles its programs ahead of time for a TPU slice and prints what they need.

    python -m trainer.plan --topology=v5e:4x4 --preset=t5_1_1_base --lengths.inputs=512 \\
        --lengths.targets=114 --batch_size=256 --model.dtype=bfloat16
    python -m trainer.plan --topology=v5p:4x4x4 … --search

Nothing is run, and no TPU, cache or task is needed. Without --topology the plan is for the devices
of this machine.
"""

import argparse
import contextlib
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

from tasks.terminal import command_line
from tasks.terminal.command_line import Parser, RawHelp, UserError, positive
from trainer import pretrain

if TYPE_CHECKING:
    from trainer.planning.compiled import Target
    from trainer.planning.kernels import Schedules

_COMPILATIONS = 10


def main(argv: list[str]) -> int:
    """Runs the command.

    Raises:
      UserError: a flag is wrong, or the run does not fit; names what would.
    """
    arguments, others = _parser().parse_known_args(pretrain.with_values(argv))
    config, origins = pretrain.configured(arguments, others)

    target = target_of(arguments.topology)
    if target.schedules:
        _stop_at_once(target.schedules)

    import jax

    # A program from the cache would come without the schedules of its kernels.
    jax.config.update("jax_enable_compilation_cache", False)

    from trainer.planning import page, search
    from trainer.planning.compiled import Plan, TooLarge, compile_plan
    from trainer.planning.planned_run import subject

    run = subject(config, origins, len(target.devices))
    if arguments.search:
        if target.chip is None:
            raise UserError("--search compares estimated times: it needs a --topology")
        found = search.search(run, target, arguments.search)
        print(page.as_json(found, arguments.price) if arguments.json else page.ranking(found, run))
        if not any(each.plan and not each.plan.missing for each in found):
            raise UserError(
                f"none of the {len(found)} configurations tried fits {target.name}: use a larger "
                "slice, a smaller batch, or --search=N to try more"
            )
        return 0
    outcome: Plan | TooLarge
    try:
        outcome = compile_plan(run, target)
    except TooLarge as error:
        outcome, missing = error, str(error)
        if arguments.json:
            print(page.as_json(error))
    else:
        show = page.as_json if arguments.json else page.page
        print(show(outcome, arguments.price))
        if not outcome.missing:
            return 0
        missing = f"{outcome.missing / 1e9:,.1f} GB a device too much"
    print(f"it does not fit, {missing}: looking for what does", file=sys.stderr, flush=True)
    remedy, tried = search.first_that_fits(run, target, outcome, _COMPILATIONS)
    if remedy is None or remedy.missing:
        raise UserError(
            f"the run does not fit {target.name} ({missing}), and nothing else of {tried} "
            "configurations tried does: use a larger slice, or a smaller batch"
        )
    raise UserError(
        f"the run does not fit {target.name} ({missing}); what fits, with "
        f"{remedy.needed / 1e9:,.1f} GB a device: {search.flags(remedy, run)}"
    )


def target_of(name: str | None) -> "Target":
    """Returns the devices of a plan: of the topology with this name, or of this machine.

    JAX is imported here, not before.

    Raises:
      UserError: there is no such topology, or the TPU's compiler is not installed.
    """
    if name is None:
        from trainer.planning.compiled import local_target

        return local_target()
    from trainer.planning import devices
    from trainer.planning.kernels import Schedules

    topology = devices.Topology.named(name)
    devices.prepare_compiler()
    schedules = Schedules()

    from trainer.planning.compiled import Target

    return Target(
        topology.name,
        topology.devices(),
        topology.hosts,
        topology.chip,
        topology.chip.memory,
        schedules,
    )


def _stop_at_once(schedules: "Schedules") -> None:
    """Makes Ctrl-C and SIGTERM end the process also while it compiles, which takes minutes.

    Python would handle them afterwards, and libtpu prints the stack of a terminated process.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    # Python writes the number of a signal there at once.
    signal.set_wakeup_fd(writing)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)

    def wait() -> None:
        received = os.read(reading, 1)[0]
        schedules.remove()
        print("stopped", file=sys.stderr, flush=True)
        os._exit(128 + received)

    threading.Thread(target=wait, name="signals", daemon=True).start()


def _parser() -> Parser:
    parser = Parser(
        prog="python -m trainer.plan",
        usage="%(prog)s [--topology=v5e:4x4] --preset=NAME [--FIELD=VALUE ...]",
        description="Compiles the programs of a run ahead of time and prints whether they fit, how "
        "long a step takes by the compiler's estimate, and what the run costs. No TPU is needed.",
        epilog="All flags of trainer.pretrain are understood, and may be copied from here to "
        "there. Without a --task, --lengths.inputs and --lengths.targets are needed.",
        formatter_class=RawHelp,
    )
    parser.add_argument(
        "--topology",
        metavar="NAME",
        help="a TPU slice as GENERATION:SHAPE in chips: v5e:4x4, v6e:16x16, v4:2x2x4, v5p:4x4x4; "
        "2xv5e:16x16 are two slices; needs the extra tpu (default: the devices of this machine)",
    )
    parser.add_argument(
        "--search",
        nargs="?",
        type=positive,
        const=_COMPILATIONS,
        metavar="N",
        help="compile up to N meshes, microbatches and ways to keep activations "
        f"({_COMPILATIONS} if N is left out), and print the best that fit as flags",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--price", type=_dollars, metavar="DOLLARS", help="price of a chip and hour, for the cost"
    )
    pretrain.add_sources(parser)
    return parser


def _dollars(text: str) -> float:
    with contextlib.suppress(ValueError):
        value = float(text)
        if 0 <= value < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"{text} is not a price")


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
