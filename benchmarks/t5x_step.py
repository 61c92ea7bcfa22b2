"""Times T5X's training step; benchmarks.step runs this program.

The argument is the model's sizes as JSON. Prints "seconds WALL CORE", by the clock and of the
processor: first for compiling, then, for each number read from stdin, for that many steps.
"""

import json
import sys
import time

import jax
import numpy as np
from t5x import partitioning

from benchmarks.t5x_program import batch_shapes, make_trainer


def main() -> None:
    sizes = json.loads(sys.argv[1])
    partitioner = partitioning.PjitPartitioner(
        num_partitions=1, logical_axis_rules=partitioning.standard_logical_axis_rules()
    )
    run = make_trainer(sizes, partitioner)
    state, batch = run.train_state, jax.device_put(_batch(sizes))
    started, core = time.perf_counter(), time.process_time()
    step = partitioner.compile(run._partitioned_train_step, state, batch)
    print("seconds", time.perf_counter() - started, time.process_time() - core, flush=True)
    state, _ = step(state, batch)
    for line in sys.stdin:
        jax.block_until_ready(state)
        started, core = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        print("seconds", time.perf_counter() - started, time.process_time() - core, flush=True)


def _batch(sizes: dict) -> dict[str, np.ndarray]:
    random, vocab_size = np.random.default_rng(0), sizes["network"]["vocab_size"]
    batch = {
        name: random.integers(1, vocab_size, shape.shape, np.int32)
        for name, shape in batch_shapes(sizes).items()
    }
    shifted = np.roll(batch["decoder_target_tokens"], 1, axis=1)
    shifted[:, 0] = 0
    weights = np.ones_like(shifted)
    return {**batch, "decoder_input_tokens": shifted, "decoder_loss_weights": weights}


if __name__ == "__main__":
    main()
