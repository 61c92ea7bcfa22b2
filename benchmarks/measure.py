"""Measures kernels, bits and steps on this machine's devices, and writes a section of a page.

    python -m benchmarks.measure --output=FOLDER [--page=docs/benchmarks.md] \\
        [--presets=t5_1_1_small,t5_1_1_base] [--rows=64] [--t5x=T5X_CHECKOUT:AIRIO:JESTIMATOR]

Parts, each in a process of its own; a part measured before on the same device at the same commit
is not measured again, so an interrupted command goes on:

- kernels: gradients of a bfloat16 model with fused attention and with products written out, both
  against float32; fails if the fused ones are further off.
- bits: two times ten updates from one state; fails if a bit differs.
- each preset: seconds of a step; the same step by transformers' T5, if PyTorch finds the device,
  and by T5X, if `--t5x` gives its sources.

`--rehearse` makes the same parts with one narrow layer in each stack and short rows, so that the
whole command can be tried on a CPU before a device costs money; the section says so.

A process has the device to itself: JAX keeps a GPU's memory, and a TPU serves one process alone.
Nothing on the page is changed if a part fails.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from tasks.storage import files
from tasks.terminal import child, extras
from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import at_least, field
from trainer.config import Config

# Preset -> rows a device, lengths of inputs and targets; the first is for trying on a CPU.
SIZES = {
    "t5_1_1_tiny": (8, 64, 32),
    "t5_1_1_small": (64, 512, 114),
    "t5_1_1_base": (64, 512, 114),
    "t5_1_1_large": (16, 512, 114),
    "lm_1b": (2, 0, 2048),
}
_DEVICE, _KERNELS, _BITS = "device", "kernels", "bits"
_TRANSFORMERS, _T5X = "transformers", "t5x"
# Fused attention may be this many times as far from float32 as products written out.
_FURTHER = 1.5
_VERBS = {False: "Measured", True: "Rehearsed"}
_REHEARSAL = "One narrow layer in each stack and short rows: times say nothing."
_NOT_INSTALLED = "not installed"
_SOFTWARE = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin")
_ROUNDS, _STEPS, _UPDATES = 5, 4, 10
# A rehearsal's models, and what it divides lengths by; a rehearsal has few rows.
_NARROW = (
    *("--model.vocab_size=512", "--model.emb_dim=64", "--model.num_heads=2"),
    *("--model.head_dim=32", "--model.mlp_dim=128"),
)
_SHORTER, _FEW = 8, 2
# Expected seconds on one H100: the start of a process; a compilation, and its share of each layer
# (processor seconds of XLA's compiler for GPUs, without autotuning); and each preset's step as
# planned (docs/benchmarks.md). transformers' step is taken to be three times as long.
_START, _COMPILE, _LAYER = 10, 12, 1.5
_PLANNED = {
    "t5_1_1_tiny": 0.01,
    "t5_1_1_small": 0.02,
    "t5_1_1_base": 0.06,
    "t5_1_1_large": 0.06,
    "lm_1b": 0.06,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    output: str = field("measured", "folder of the results, a file for each part")
    page: str | None = field(None, "page of Markdown whose section on this device is written")
    presets: tuple[str, ...] = field(tuple(SIZES)[1:], "presets whose steps are measured")
    rows: int | None = field(None, "rows a device, instead of each preset's", rule=at_least(1))
    rehearse: bool = field(
        False, "make every part with one narrow layer and short rows, to try the command on a CPU"
    )
    t5x: str | None = field(None, "T5X's source folders, separated by colons")
    t5x_python: str = field(sys.executable, "interpreter with T5X's dependencies")
    part: str | None = field(
        None,
        "measure one part in this process, and print it as JSON: kernels, bits, a preset, or "
        "PRESET.transformers or PRESET.t5x, which leave the device to others",
    )
    devices: int = field(1, "number of devices, for such a part")
    platform: str = field("cpu", "their platform: cpu, gpu or tpu")


def run(flags: Flags) -> None:
    """Measures what is missing; raises UserError if a part fails."""
    if unknown := [name for name in flags.presets if name not in SIZES]:
        raise UserError(f"--presets={unknown[0]}: choose among {', '.join(SIZES)}")
    if flags.part:
        print(json.dumps(_measured(flags, flags.part)))
        return
    if flags.page and not pathlib.Path(flags.page).is_file():
        raise UserError(f"--page={flags.page}: there is no such page")
    if flags.page and not os.access(flags.page, os.W_OK):
        raise UserError(f"--page={flags.page} cannot be written: copy it, and name the copy")
    folder = pathlib.Path(flags.output)
    folder.mkdir(parents=True, exist_ok=True)
    asked = {**_in_own_process(flags, _DEVICE), "commit": _commit(), "rows": flags.rows}
    asked["rehearsed"] = flags.rehearse
    asked |= {name: os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
    beside = [_TRANSFORMERS, *[_T5X] * bool(flags.t5x)]
    parts = [_KERNELS, _BITS]
    for preset in flags.presets:
        parts += [preset, *(f"{preset}.{other}" for other in beside)]
    print(
        f"on an H100 about {expected_seconds(parts) / 60:.0f} minutes", file=sys.stderr, flush=True
    )
    results = {}
    for part in parts:
        path = folder / f"{part}.json"
        of_part = asked | ({"t5x": flags.t5x} if part.endswith(f".{_T5X}") else {})
        found = _known(path, of_part)
        if found is None:
            print(f"{part}: measuring", file=sys.stderr, flush=True)
            found = of_part | _in_own_process(flags, part, asked)
        print(f"{part}: {found['text']}", flush=True)
        if found.get("failed"):
            raise UserError(f"{part}: {found['text']}")
        if found["text"] != _NOT_INSTALLED:
            files.write_json(str(path), found)
        results[part] = found
    text = section(results)
    print(text)
    if flags.page:
        page = pathlib.Path(flags.page).read_text(encoding="utf-8")
        files.write_bytes(flags.page, with_section(page, text).encode())


def section(results: dict[str, dict[str, Any]]) -> str:
    """Returns the section of a page on measured parts, by name."""
    first = next(iter(results.values()))
    lines = [
        f"## {_VERBS[first['rehearsed']]} on {first['devices']} x {first['kind']}",
        "",
        *["A rehearsal with one narrow layer in each stack: times say nothing."]
        * first["rehearsed"],
        f"At commit {first['commit']} by `make measure`, bfloat16, Adafactor, without dropout.",
        f"Kernels: {results[_KERNELS]['text']}. Bits: {results[_BITS]['text']}.",
        "",
        "| model | rows x lengths | ms a step | MFU | compiled in, s | others |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for preset, each in results.items():
        if "row" in each:
            others = [
                f"{other} {results[f'{preset}.{other}']['text']}"
                for other in (_TRANSFORMERS, _T5X)
                if f"{preset}.{other}" in results
            ]
            lines.append(f"| `{preset}` | {each['row']} | {', '.join(others)} |")
    return "\n".join(lines) + "\n"


def with_section(page: str, text: str) -> str:
    """Returns a page with a section in place of the one of the same heading, or at its end."""
    heading = text.partition("\n")[0]
    old = re.search(rf"^{re.escape(heading)}$.*?(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    if old is None:
        return f"{page.rstrip()}\n\n{text}"
    after = page[old.end() :]
    return page[: old.start()] + text + ("\n" + after if after else "")


def _known(path: pathlib.Path, asked: dict[str, Any]) -> dict[str, Any] | None:
    """Returns a part's earlier result if it was measured as `asked`."""
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):  # not measured, or damaged
        return None
    whole = isinstance(found, dict) and "text" in found
    return found if whole and asked == {name: found.get(name) for name in asked} else None


def _in_own_process(flags: Flags, part: str, known: dict[str, Any] | None = None) -> dict[str, Any]:
    words = [f"--part={part}"]
    if known:
        words += [f"--{name}={known[name]}" for name in ("devices", "platform")]
    words += [f"--rows={flags.rows}"] * bool(flags.rows) + ["--rehearse"] * flags.rehearse
    if flags.t5x:
        words += [f"--t5x={flags.t5x}", f"--t5x_python={flags.t5x_python}"]
    # A part that outlived this process would keep the device.
    command = child.command("benchmarks.measure", words)
    made = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if made.returncode:
        raise UserError(f"{part}: the measurement failed, see above; the same command goes on")
    return json.loads(made.stdout.splitlines()[-1])


def _measured(flags: Flags, part: str) -> dict[str, Any]:
    preset, _, other = part.partition(".")
    own: dict[str, Callable[[], dict[str, Any]]] = {
        _DEVICE: _device,
        _KERNELS: _kernels,
        _BITS: _bits,
    }
    if part in own:
        return own[part]()
    if preset not in SIZES or other not in ("", _TRANSFORMERS, _T5X):
        raise UserError(f"--part={part}: there is no such part")
    rows, *lengths = SIZES[preset]
    narrow: list[str] = []
    if flags.rehearse:
        rows, lengths = _FEW, [length // _SHORTER for length in lengths]
        narrow = [*_NARROW, *(f"--model.{name}=1" for name in _layers(preset))]
    rows = flags.rows or rows
    config = _config(preset, rows * flags.devices, *narrow)
    if not other:
        return _step(config, *lengths)
    if other == _T5X:
        return _by_t5x(flags, config, *lengths)
    return {"text": _by_transformers(flags, config, *lengths)}


def _layers(preset: str) -> dict[str, int]:
    """Returns the layers of each stack that a preset has, by field."""
    model = _config(preset, 1).model
    found = {name: getattr(model, name) for name in ("num_encoder_layers", "num_decoder_layers")}
    return {name: layers for name, layers in found.items() if layers}


def expected_seconds(parts: list[str]) -> float:
    """Returns how long parts are expected to take on one H100; T5X's are not known."""
    total = 0.0
    for part in parts:
        preset, _, other = part.partition(".")
        steps = 1 + _ROUNDS * _STEPS
        if part in (_KERNELS, _BITS):
            total += _START + (3 if part == _KERNELS else 2) * (_COMPILE + 4 * _LAYER)
        elif other == _T5X:
            continue
        elif other == _TRANSFORMERS:
            total += _START + 3 * steps * _PLANNED[preset]
        else:
            layers = sum(_layers(preset).values())
            total += _START + _COMPILE + layers * _LAYER + steps * _PLANNED[preset]
    return total


def _device() -> dict[str, Any]:
    import jax

    first = jax.devices()[0]
    return {
        "devices": jax.device_count(),
        "platform": first.platform,
        "kind": first.device_kind,
        "software": extras.versions(_SOFTWARE),
    }


def _commit() -> str:
    """Returns the commit of this code, and a hash of what differs from it."""

    def git(*words: str) -> bytes:
        root = pathlib.Path(__file__).parents[1]
        return subprocess.run(
            ["git", *words],
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=False,
        ).stdout

    head = git("rev-parse", "HEAD").decode().strip()[:8] or "unknown"
    changes = git("diff", "HEAD", "--", "benchmarks", "tasks", "trainer")
    return f"{head}-changed-{hashlib.sha256(changes).hexdigest()[:8]}" if changes else head


def _config(preset: str, rows: int, *more: str, dtype: str = "bfloat16") -> Config:
    from trainer.config.from_flags import build_config

    flags = [f"--batch_size={rows}", f"--model.dtype={dtype}", "--model.dropout_rate=0", *more]
    return build_config(preset, flags)[0]


def _small(rows: int, *more: str, dtype: str = "bfloat16") -> tuple[Config, tuple[int, int]]:
    """Returns the model of kernels and bits, and its lengths: shallow, and tiny on a CPU."""
    import jax

    layers = ("--model.num_encoder_layers=2", "--model.num_decoder_layers=2")
    if jax.devices()[0].platform != "cpu":
        return _config("t5_1_1_small", rows, *layers, *more, dtype=dtype), (512, 114)
    sizes = ("--model.vocab_size=512", "--model.emb_dim=128", "--model.num_heads=2")
    return _config("t5_1_1_small", rows, *layers, *sizes, *more, dtype=dtype), (32, 16)


def _kernels() -> dict[str, Any]:
    """Compares gradients by fused attention and by products written out with float32's."""
    import jax
    import numpy as np

    from benchmarks.step import make_batch
    from trainer.engine.step import make_gradients
    from trainer.model.spec import model_spec
    from trainer.model.transformer import build_model, init_params

    def gradients(attention: str, dtype: str = "bfloat16") -> list[np.ndarray]:
        config, lengths = _small(4, f"--model.attention={attention}", dtype=dtype)
        spec = model_spec(config.model)
        batch, key = make_batch(config, *lengths), jax.random.key(0)
        batch = {**batch, **_packed(batch)}
        of = jax.jit(make_gradients(build_model(spec), config))
        found, _ = of(init_params(spec, key), batch, key)
        return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(found)]

    exact = gradients("einsum", "float32")

    def error(found: list[np.ndarray]) -> float:
        of_leaves = zip(found, exact, strict=True)
        return max(
            float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)) for a, b in of_leaves
        )

    fused, written = (error(gradients(name)) for name in ("pallas", "einsum"))
    text = f"gradients differ from float32's by {fused:.2g} if fused, {written:.2g} if written out"
    return {"text": text, "failed": not fused <= _FURTHER * written}


def _packed(batch: dict[str, Any]) -> dict[str, Any]:
    """Returns segments and positions of rows with two examples each."""
    import numpy as np

    found = {}
    for side, tokens in (("encoder", "encoder_input_tokens"), ("decoder", "decoder_input_tokens")):
        rows, length = batch[tokens].shape
        at = np.arange(length)
        second = at >= length // 3
        segments = np.broadcast_to(1 + second, (rows, length)).astype(np.int32)
        positions = np.broadcast_to(at - second * (length // 3), (rows, length)).astype(np.int32)
        found |= {f"{side}_segment_ids": segments, f"{side}_positions": positions}
    return found


def _bits() -> dict[str, Any]:
    """Compares the states after the same updates, made twice."""
    import jax
    import numpy as np

    from benchmarks.step import Ours
    from trainer.engine import determinism

    def updated() -> list[bytes]:
        config, lengths = _small(8 * jax.device_count())
        ours = Ours(config, *lengths)
        ours.seconds(_UPDATES)
        leaves = jax.tree.leaves(ours.state.params)
        return [np.asarray(leaf).tobytes() for leaf in leaves]

    determinism.set_flags(True)
    same = updated() == updated()
    text = f"two runs of {_UPDATES} updates are {'equal' if same else 'not equal'} to the bit"
    return {"text": text, "failed": not same}


def _step(config: Config, *lengths: int) -> dict[str, Any]:
    import jax

    from benchmarks.step import Ours
    from trainer.engine import determinism
    from trainer.engine.cost import flops_per_step
    from trainer.engine.hardware import peak_flops

    determinism.set_flags(True)
    jax.config.update("jax_enable_compilation_cache", False)
    rows = config.batch_size
    ours = Ours(config, *lengths)
    seconds = min(ours.seconds(_STEPS)[0] / _STEPS for _ in range(_ROUNDS))
    peak = peak_flops(jax.devices()[0].device_kind)
    flops = flops_per_step(config.model, rows, *lengths) / jax.device_count()
    mfu = f"{flops / seconds / peak:.1%}" if peak else "unknown"
    size = f"{rows} x ({', '.join(map(str, lengths))})"
    row = f"{size} | {seconds * 1e3:,.1f} | {mfu} | {ours.compile_seconds:.0f}"
    return {"text": _time(seconds), "row": row}


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms a step"


def _by_t5x(flags: Flags, config: Config, *lengths: int) -> dict[str, Any]:
    from benchmarks.step import T5X

    theirs = T5X(config, *lengths, flags.t5x or "", flags.t5x_python)
    least = min(theirs.seconds(_STEPS)[0] / _STEPS for _ in range(_ROUNDS))
    theirs.close()
    return {"text": _time(least)}


def _by_transformers(flags: Flags, config: Config, inputs: int, targets: int) -> str:
    """Returns the time of the same step by transformers' T5, or why there is none."""
    try:
        import torch
        from transformers import T5Config, T5ForConditionalGeneration
    except ImportError:
        return _NOT_INSTALLED
    on_gpu = flags.platform == "gpu"
    if on_gpu and not torch.cuda.is_available():
        return "finds no GPU"
    if flags.devices > 1 or flags.platform == "tpu" or not config.model.has_both_stacks:
        return "not compared"
    sizes, device = config.model, "cuda" if on_gpu else "cpu"
    network = T5Config(
        vocab_size=sizes.vocab_size,
        d_model=sizes.emb_dim,
        d_kv=sizes.head_dim,
        d_ff=sizes.mlp_dim,
        num_layers=sizes.num_encoder_layers,
        num_decoder_layers=sizes.num_decoder_layers,
        num_heads=sizes.num_heads,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        dropout_rate=0.0,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(network).to(device)
    optimizer = torch.optim.Adafactor(model.parameters())
    shape = config.batch_size, inputs
    ids = torch.randint(1, sizes.vocab_size, shape, device=device)
    labels = torch.randint(1, sizes.vocab_size, (shape[0], targets), device=device)

    def updates(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            with torch.autocast(device, torch.bfloat16):
                loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - started) / count

    updates(1)
    return _time(min(updates(_STEPS) for _ in range(_ROUNDS)))


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
