"""Runs a test module as a program on eight devices of this CPU."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]


def run(module: str, *arguments: str, timeout: float = 600) -> Any:
    """Returns what the program `module`, a path, prints as JSON in its last line."""
    made = subprocess.run(
        [sys.executable, module, *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8",
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert made.returncode == 0, made.stderr[-3000:]
    return json.loads(made.stdout.splitlines()[-1])
