"""The machine of a measurement, printed with its results: ratios differ between processors."""

import os
import pathlib
import re

# Instruction sets that decide which code NumPy, XLA and our compiled tokenizer use.
_SETS = ("avx", "avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")
_CPU_INFO = pathlib.Path("/proc/cpuinfo")
_CACHES = pathlib.Path("/sys/devices/system/cpu/cpu0/cache")


def machine() -> str:
    """Returns cores, and on Linux also processor, caches and instruction sets, on one line."""
    text = _CPU_INFO.read_text() if _CPU_INFO.exists() else ""
    name = _field(text, "model name") or _field(text, "CPU implementer") or "unknown processor"
    known = (_field(text, "flags") or _field(text, "Features")).split()
    affinity = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
    parts = [name, f"{len(affinity(0))} cores"]
    parts += [f"L{level} {size}" for level, size in sorted(_caches().items())]
    parts.append(" ".join(each for each in _SETS if each in known))
    return ", ".join(part for part in parts if part)


def _field(text: str, name: str) -> str:
    found = re.search(rf"^{name}\s*:\s*(.*)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


def _caches() -> dict[str, str]:
    """Returns the size of the data caches by level."""
    sizes = {}
    for folder in _CACHES.glob("index*"):
        if (folder / "type").read_text().strip() != "Instruction":
            sizes[(folder / "level").read_text().strip()] = (folder / "size").read_text().strip()
    return sizes
