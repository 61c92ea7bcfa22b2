"""The training command for a finished cache, sized for this machine."""

import glob
import os
import shlex

from pipeline.building.options import Options
from tasks.task import TaskSpec

# Device files of accelerator drivers.
_DEVICES = ("/dev/nvidia[0-9]*", "/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
# Architecture -> preset for an accelerator, and one that learns something on a CPU.
_PRESETS = {
    "encoder": ("bert_base", "bert_mini"),
    "encoder_decoder": ("t5_1_1_small", "t5_1_1_mini"),
    "decoder": ("lm_small", "llama_mini"),
}
# A GPU with 8 GB holds an eighth of T5's batch of 128 rows.
_ON_ACCELERATOR = ("--microbatches=8", "--model.dtype=bfloat16")
# A CPU makes about two updates with this many positions per second, in less than 4 GB.
_CPU_POSITIONS = 8192
_CPU_STEPS = 2000


def pretrain(task: TaskSpec, options: Options, held_out: bool) -> str:
    """Returns a trainer.pretrain command that fits into this machine's memory.

    `held_out`: whether the cache has a validation split with text.
    """
    on_accelerator, on_cpu = _PRESETS[task.objective.architectures[0]]
    if "prefix" in task.objective.features:
        on_cpu = "mini_primer_ez"  # Llama has no bidirectional prefixes
    wants_cpu = os.environ.get("JAX_PLATFORMS", "") == "cpu"
    if not wants_cpu and any(map(glob.glob, _DEVICES)):
        preset, size = on_accelerator, _ON_ACCELERATOR
    else:
        rows = max(1, _CPU_POSITIONS // (task.lengths.inputs + task.lengths.targets))
        rows = 1 << (rows.bit_length() - 1)
        preset, size = on_cpu, (f"--batch_size={rows}", f"--train_steps={_CPU_STEPS}")
    arguments = [
        f"--preset={preset}",
        f"--task={task.name}",
        f"--cache_dir={options.cache_dir}",
        "--model_dir=model",
        *size,
        *([] if held_out else ["--evaluation.every_steps=0"]),
        *([f"--task_module={options.task_module}"] if options.task_module else []),
    ]
    return shlex.join(["python", "-m", "trainer.pretrain", *arguments])
