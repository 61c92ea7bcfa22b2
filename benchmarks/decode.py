"""Compares the speed of decoding with that of transformers, on the same weights and prompts.

python -m benchmarks.decode [--models=t5_1_1,llama] [--batch=8] [--new=128] [--cores=1]

Greedy, float32, with a cache of keys and values. No text ends before `--new` tokens. The runs
alternate, and the median counts; the first run of each, which compiles, does not. A speed is tokens
a second, and in parentheses tokens a second of the processor, which other work on the machine
hardly changes; with several cores it counts their waiting for one another.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tasks.storage import files
from tasks.terminal import command_line
from tasks.terminal.command_line import Parser, positive
from tasks.terminal.table import table

PRESETS = {"t5_1_1": "t5_1_1_small", "llama": "llama_mini"}
# No token has this id, so no text ends.
_NO_END = 10**6


def compare(name: str, batch: int, prompt: int, new: int, repeats: int) -> list[str]:
    """Returns a row of the table: the model, both speeds in tokens a second, and their ratio."""
    import jax

    from trainer.config.presets import model_preset
    from trainer.decoding.decoder import Decoder, Decoding
    from trainer.huggingface import configs, names, parity, weights
    from trainer.model.spec import model_spec
    from trainer.model.transformer import init_params

    config = replace(model_preset(PRESETS[name]), dropout_rate=0.0)
    params = init_params(model_spec(config), jax.random.key(0))
    random = np.random.default_rng(0)
    prompts = [random.integers(3, config.vocab_size, prompt) for _ in range(batch)]
    with tempfile.TemporaryDirectory() as folder:
        written = configs.to_config(config, prompt + new)
        files.write_json(os.path.join(folder, "config.json"), written)
        arrays = jax.tree.map(np.asarray, params)
        weights.write(folder, names.to_tensors(arrays, config, written["model_type"]), 5 * 10**9)
        theirs = _theirs(parity.their_model(folder, written), prompts, new)
    decoder = Decoder(config, Decoding(max_new_tokens=new, eos_id=_NO_END))
    params = jax.device_put(params)

    def ours() -> np.ndarray:
        return np.stack([each.ids for each in decoder(params, prompts)])

    same = float(np.mean(ours() == theirs()))
    seconds: dict[str, list[tuple[float, float]]] = {"ours": [], "theirs": []}
    for _ in range(repeats):
        for who, run in (("ours", ours), ("theirs", theirs)):
            begin, busy = time.perf_counter(), time.process_time()
            run()
            seconds[who].append((time.perf_counter() - begin, time.process_time() - busy))
    speeds = {
        who: [batch * new / statistics.median(kind) for kind in zip(*each, strict=True)]
        for who, each in seconds.items()
    }
    ratios = [ours / theirs for ours, theirs in zip(speeds["ours"], speeds["theirs"], strict=True)]
    return [
        PRESETS[name],
        *(f"{wall:,.0f} ({busy:,.0f})" for wall, busy in speeds.values()),
        f"{ratios[0]:.2f} ({ratios[1]:.2f})",
        f"{same:.1%}",
    ]


def _theirs(model: Any, prompts: list[np.ndarray], new: int) -> Callable[[], np.ndarray]:
    """Returns the generation by transformers, which returns the new ids."""
    import torch

    encodes = model.config.is_encoder_decoder
    rows = prompts if encodes else [np.concatenate([[0], each]) for each in prompts]
    ids = torch.from_numpy(np.stack(rows).astype(np.int64))

    def generate() -> np.ndarray:
        with torch.no_grad():
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                num_beams=1,
                use_cache=True,
                max_new_tokens=new,
                min_new_tokens=new,
                eos_token_id=None,
                pad_token_id=0,
            )
        return found[:, 1 if encodes else ids.shape[1] :].numpy()

    return generate


def main(argv: list[str]) -> None:
    parser = Parser(prog="python -m benchmarks.decode", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", default="t5_1_1,llama", help=f"some of {', '.join(PRESETS)}")
    add("--batch", type=positive, default=8, help="prompts decoded together")
    add("--prompt", type=positive, default=64, help="tokens of a prompt")
    add("--new", type=positive, default=128, help="tokens generated after each")
    add("--repeats", type=positive, default=3, help="timed runs of each, after one that compiles")
    add("--cores", type=positive, help="cores that both may use; all if left out")
    flags = parser.parse_args(argv)
    if flags.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: flags.cores])
    header = ["model", "ours, tokens/s", "transformers", "ratio", "same ids"]
    found = [
        compare(name, flags.batch, flags.prompt, flags.new, flags.repeats)
        for name in flags.models.split(",")
    ]
    print(table(header, found))


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
