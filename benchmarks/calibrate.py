"""Holds the planner's times against training steps that others measured on TPUs and GPUs.

    python -m benchmarks.calibrate --output=FOLDER [--rows=NAME,NAME]

`benchmarks/calibration.toml` has the measurements, their sources and configurations. Each step is
compiled ahead of time with 1 and 2 layers in each stack, and its parts continue in a line to all
layers; if `scanned`, it is compiled with all its layers in a scan. Every compilation is a process,
and its program is kept in FOLDER, so an interrupted command goes on, and a changed chip is timed in
seconds.

Prints a table of Markdown: milliseconds of a step as measured, as the products alone take at the
peak, as planned at the data sheet's rates (a lower bound), and as planned at the `rates` that the
chip reaches, with the ratios of measured to each; then the range of the last ratio by platform,
which is `calibration` of `Chip` and `Gpu`.
The compiled program is this project's: its kernels and recomputation differ from those measured.
"""

import dataclasses
import gzip
import math
import pathlib
import pickle
import statistics
import subprocess
import sys
import tomllib
from typing import Any

from benchmarks.tpu_step import Estimate, extrapolated
from tasks.storage import files
from tasks.terminal import child
from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import field
from trainer.annexes.planning.devices import PEAK, Rates, Topology
from trainer.annexes.planning.gpus import GpuHosts
from trainer.config import field_paths
from trainer.config.from_flags import build_config

TABLE = pathlib.Path(__file__).parent / "calibration.toml"
_DEPTHS = 1, 2
_STACKS = ("num_encoder_layers", "num_decoder_layers")
_OWN = (
    *("--model.dtype=bfloat16", "--evaluation.every_steps=0", "--deterministic=false"),
    *("--optimizer.name=adamw", "--optimizer.learning_rate=1e-4"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    output: str = field("calibrated", "folder of the compiled programs")
    rows: tuple[str, ...] = field((), "names of the rows to compile; (): all")
    part: str | None = field(None, "compile NAME.LAYERS in this process")
    retime: bool = field(False, "compile nothing: only time the programs in the folder")


@dataclasses.dataclass(frozen=True)
class Row:
    """A measurement; see calibration.toml."""

    name: str
    source: str
    differs: str
    topology: str
    preset: str
    rows: int
    lengths: tuple[int, int]
    flags: tuple[str, ...]
    measured: dict[str, Any]
    check: bool = False
    scanned: bool = False

    @property
    def layers(self) -> int:
        """The number of layers of each stack."""
        model = self.config()[0].model
        (layers,) = {getattr(model, name) for name in _STACKS} - {0}
        return layers

    @property
    def depths(self) -> tuple[int, ...]:
        """The numbers of layers to compile."""
        return (self.layers,) if self.scanned else _DEPTHS

    def config(self, layers: int | None = None) -> tuple[Any, dict[str, str]]:
        """Returns the configuration, with `layers` in each stack, and its origins."""
        sides = zip(("inputs", "targets"), self.lengths, strict=True)
        lengths = (f"--lengths.{side}={length}" for side, length in sides)
        words = [*_OWN, f"--batch_size={self.rows}", *lengths, *self.flags]
        words += ["--model.scan_layers=true"] * self.scanned
        config, origins = build_config(self.preset, words)
        if layers is not None:
            sizes = [f"model.{name}" for name in _STACKS if getattr(config.model, name)]
            config = field_paths.replace_all(config, dict.fromkeys(sizes, layers))
        return config, origins

    @property
    def place(self) -> Topology | GpuHosts:
        """The devices of the measurement."""
        return GpuHosts.named(self.topology) or Topology.named(self.topology)

    @property
    def devices(self) -> int:
        """The number of devices."""
        place = self.place
        if isinstance(place, GpuHosts):
            return place.hosts * place.per_host
        return math.prod(place.shape) * place.slices

    def products(self) -> float:
        """Returns the seconds that a step's products take at the peak, recomputed ones included."""
        from trainer.engine.cost import products_per_step
        from trainer.engine.hardware import peak_flops

        model = self.config()[0].model
        kernels, attention = products_per_step(model, self.rows, *self.lengths, halve_causal=True)
        passes = 8 if model.remat == "full" else 6
        peak = peak_flops(self.place.chip.kind)
        assert peak
        return passes * (kernels + attention) / self.devices / peak

    def seconds(self) -> float:
        """Returns the measured seconds of a step."""
        # JAX starts with the environment that a topology needs.
        from trainer.engine.cost import parameter_count, products_per_step

        if "seconds" in self.measured:
            return float(self.measured["seconds"])
        devices = self.devices
        tokens = self.rows * sum(self.lengths) / devices
        if "tokens" in self.measured:
            return tokens / self.measured["tokens"]
        model = self.config()[0].model
        half = self.measured["pairs"] == "half"
        kernels, attention = products_per_step(model, self.rows, *self.lengths, halve_causal=half)
        if self.measured["parameters"] == "all":
            kernels = parameter_count(model) * self.rows * sum(self.lengths)
        counted = kernels + attention * (self.measured["pairs"] != "none")
        return 6 * counted / devices / self.measured["tflops"] / 1e12


def run(flags: Flags) -> None:
    """Compiles what is missing, and prints the table; raises UserError if a row is unknown."""
    known = {row.name: row for row in table()}
    if unknown := [name for name in flags.rows if name not in known]:
        raise UserError(f"--rows={unknown[0]}: choose among {', '.join(known)}")
    folder = pathlib.Path(flags.output)
    folder.mkdir(parents=True, exist_ok=True)
    if flags.part:
        name, _, layers = flags.part.rpartition(".")
        _compile(known[name], int(layers), folder)
        return
    for name in () if flags.retime else flags.rows or known:
        for layers in known[name].depths:
            if not _path(folder, name, layers).exists():
                print(f"{name}: compiling {layers} layer(s)", file=sys.stderr, flush=True)
                words = [f"--part={name}.{layers}", f"--output={folder}"]
                subprocess.run(child.command("benchmarks.calibrate", words), check=True)
    print(markdown([Found(row, *_planned(row, folder)) for row in known.values()]))


@dataclasses.dataclass(frozen=True)
class Found:
    """A row and its planned steps, at the data sheet's and the chip's rates; None: not compiled."""

    row: Row
    bound: Estimate | None = None
    expected: Estimate | None = None


def table() -> list[Row]:
    """Returns the rows of calibration.toml."""
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))["rows"]
    return [
        Row(**{**row, "lengths": tuple(row["lengths"]), "flags": tuple(row["flags"])})
        for row in rows
    ]


def _path(folder: pathlib.Path, name: str, layers: int) -> pathlib.Path:
    return folder / f"{name}.{layers}.pickle.gz"


def _compile(row: Row, layers: int, folder: pathlib.Path) -> None:
    """Compiles a row's step with a number of layers, and keeps the program."""
    from trainer.annexes.planning.plan import target_of

    config, origins = row.config(layers)
    target = target_of(row.topology, deterministic=False)
    assert target.chip

    import jax

    from trainer.annexes.planning.compiled import compile_plan
    from trainer.annexes.planning.planned_run import subject

    jax.config.update("jax_enable_compilation_cache", False)
    plan = compile_plan(subject(config, origins, len(target.devices)), target, evaluation=False)
    kept = gzip.compress(pickle.dumps(plan.train.optimized), compresslevel=1)
    files.write_bytes(str(_path(folder, row.name, layers)), kept)


def _planned(row: Row, folder: pathlib.Path) -> tuple[Estimate, Estimate] | tuple[()]:
    """Returns a step at the data sheet's and at the chip's rates; () if it was not compiled."""
    paths = [_path(folder, row.name, layers) for layers in row.depths]
    if not all(path.exists() for path in paths):
        return ()
    chip, layers = row.place.chip, row.layers
    # They are this command's own.
    programs = [pickle.loads(gzip.decompress(path.read_bytes())) for path in paths]

    def continued(rates: Rates) -> Estimate:
        found = [Estimate(each.timing(chip, rates).seconds, {}) for each in programs]
        return found[0] if row.scanned else extrapolated(*found, _DEPTHS, layers)

    return continued(PEAK), continued(chip.rates)


_HEADER = (
    *("row", "devices", "measured, ms", "products alone", "ratio"),
    *("at least", "ratio", "at reached rates", "ratio"),
)


def markdown(found: list[Found]) -> str:
    """Returns the table, and the range of the last ratio by platform."""
    lines = [_HEADER, ("---", "---", *["---:"] * (len(_HEADER) - 2))]
    ratios: dict[str, list[float]] = {}
    for each in found:
        row, measured = each.row, each.row.seconds()
        steps = (each.bound, each.expected)
        planned = [row.products(), *(step.step if step else None for step in steps)]
        cells = [f"`{row.name}`" + (", kept out" if row.check else ""), row.topology]
        cells.append(f"{measured * 1e3:,.0f}")
        for step in planned:
            cells += [f"{step * 1e3:,.0f}", f"{measured / step:.2f}"] if step else ["-", "-"]
        lines.append(tuple(cells))
        if each.expected:
            ratios.setdefault(row.place.chip.unit, []).append(measured / each.expected.step)
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    for unit, values in ratios.items():
        text += (
            f"\n\n{unit}: {len(values)} rows, measured over planned at reached rates "
            f"{min(values):.2f} to {max(values):.2f}, median {statistics.median(values):.2f}"
        )
    return text


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
