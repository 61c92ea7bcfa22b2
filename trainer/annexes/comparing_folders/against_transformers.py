"""Compares the logits of the folder in `--init_from=hf:` with transformers', in another process.

torch must not be loaded beside TensorFlow, which a run may have, nor take a run's memory.
"""

import math
import os
import subprocess
import sys

from tasks.storage import files
from tasks.terminal import child
from tasks.terminal.command_line import UserError
from trainer import huggingface
from trainer.config import from_transformers
from trainer.huggingface import folder_parity
from trainer.model.paths import named
from trainer.model.spec import model_spec
from trainer.model.transformer import parameter_facts

# Arrays of both models in float32, and what loading and float64 take beside them.
_COPIES = 3
_DIFFERENT = 3


def compared(init_from: str) -> str:
    """Returns what a comparison of logits found, or why there was none.

    The model is the folder's own, before its vocabulary or architecture is changed. Raises
    UserError if the logits differ.
    """
    folder = files.local_path(init_from.removeprefix(from_transformers.PREFIX))
    if why := folder_parity.obstacle(folder) or _too_large(folder):
        return folder_parity.NOT_COMPARED + why
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        child.command(f"{__name__}:main", [folder]),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    said = [line for line in (done.stdout or done.stderr).splitlines() if line.strip()]
    last = said[-1] if said else f"a process ended with code {done.returncode}"
    if done.returncode == _DIFFERENT:
        raise UserError(
            f"--init_from={init_from}: {last.removesuffix('; nothing was written')}: the folder "
            "would be read as another model; report this with its config.json"
        )
    if done.returncode:
        return folder_parity.NOT_COMPARED + last
    if last.startswith(folder_parity.NOT_COMPARED):
        return last
    return f"logits are those of transformers: {last}"


def main() -> None:
    """Prints the comparison of the folder in the first argument; ends with 3 if logits differ."""
    folder = sys.argv[1]
    model = huggingface.model_config(folder)
    arrays = named(huggingface.load(folder, model))
    try:
        print(folder_parity.logits(folder, model, arrays))
    except folder_parity.NotEqual as error:
        print(error)
        sys.exit(_DIFFERENT)


def _too_large(folder: str) -> str | None:
    facts = parameter_facts(model_spec(huggingface.model_config(folder)))
    size = 4 * sum(math.prod(fact.shape) for fact in facts.values())
    free = _free_bytes()
    if _COPIES * size <= free:
        return None
    return (
        f"its parameters take {size / 1e9:.1f} GB in float32, more than a third of the "
        f"{free / 1e9:.1f} GB of free memory"
    )


def _free_bytes() -> float:
    """Returns the memory that new processes can take; infinity if the system does not tell."""
    try:
        with open("/proc/meminfo") as lines:
            found = next(line for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return math.inf
    return 1024 * int(found.split()[1])
