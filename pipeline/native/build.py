"""Compiles this folder's C code into shared libraries while the package is installed.

`make native` compiles it in a checkout.

Zig's C compiler, a wheel that pip fetches for the build alone, needs nothing of the system and
links against an old glibc, so that a wheel built here runs on any worker. Where there is no such
wheel, `cc` compiles. A processor without the instructions of x86-64-v3 loads the library for v2.
"""

import hashlib
import importlib.util
import pathlib
import platform
import subprocess
import sys
import tempfile
from typing import Any

FOLDER = pathlib.Path(__file__).parent
ROOT = FOLDER.parents[1]
# Rounding must not depend on the compiler: no fused multiply-add.
_FLAGS = (
    *("-std=gnu11", "-O3", "-shared", "-fPIC", "-fvisibility=hidden", "-s"),
    *("-ffp-contract=off", "-fno-math-errno"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-psabi"),
)
# Operating system of Python -> of Zig.
_SYSTEMS = {"linux": "linux-gnu.2.17", "darwin": "macos"}
_MACHINES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
# Levels of instructions; a library is compiled for each.
ANY = "any"
LEVELS = {"x86_64": ("v3", "v2"), "aarch64": ("v8",)}
_ZIG_CPUS = {"v3": "x86_64_v3", "v2": "x86_64_v2", "v8": "generic"}
_ZIG = "ziglang>=0.15,<0.18"


def machine() -> tuple[str, str]:
    """Returns (operating system, processor) of this machine, in Python's and Zig's words."""
    return sys.platform, _MACHINES.get(platform.machine().lower(), platform.machine().lower())


def sources() -> list[pathlib.Path]:
    """Returns the files of C code, in order."""
    return sorted([*FOLDER.glob("*.c"), *FOLDER.glob("*.h")])


def file_name(system: str, processor: str, level: str) -> str:
    """Returns the name of a library; it changes with the sources."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources())).hexdigest()[:12]
    return f"core.{system}.{processor}.{level}.{digest}.so"


def compile_all() -> list[pathlib.Path]:
    """Compiles what is missing for this machine and for Dataflow's; returns all paths."""
    here = machine()
    targets = dict.fromkeys([here, ("linux", "x86_64")]) if _has_zig() else {here: None}
    found = []
    for system, processor in targets:
        for level in LEVELS.get(processor, (ANY,)):
            path = FOLDER / file_name(system, processor, level)
            found.append(path)
            if not path.exists():
                _compile(system, processor, level, path)
    for path in FOLDER.glob("core.*.so"):
        if path not in found:
            path.unlink()
    return found


def _has_zig() -> bool:
    return importlib.util.find_spec("ziglang") is not None


def _compile(system: str, processor: str, level: str, path: pathlib.Path) -> None:
    command = ["cc", *_FLAGS]
    if _has_zig() and processor in LEVELS:
        target = f"{processor}-{_SYSTEMS[system]}"
        command = [
            *(sys.executable, "-m", "ziglang", "cc", *_FLAGS, "-fno-sanitize=undefined"),
            *("-target", target, f"-mcpu={_ZIG_CPUS[level]}"),
        ]
    elif processor == "x86_64":
        command.append(f"-march=x86-64-{level}")
    files = [str(source) for source in sources() if source.suffix == ".c"]
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        made = pathlib.Path(folder) / path.name
        subprocess.run([*command, *files, "-o", str(made), "-lm"], check=True)
        made.replace(path)


if "hatchling" in sys.modules:  # it loads this file as a hook; commands need not import it
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
else:
    BuildHookInterface = object  # type: ignore[assignment,misc]


class CompileHook(BuildHookInterface):
    """Hatchling's hook: the wheel holds the libraries and names its platform."""

    def dependencies(self) -> list[str]:
        system, processor = machine()
        return [_ZIG] if system in _SYSTEMS and processor in LEVELS else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        paths = compile_all()
        system, processor = machine()
        if system == "linux":
            build_data["tag"] = f"py3-none-manylinux_2_17_{processor}"
        else:
            build_data["infer_tag"] = True
        build_data["pure_python"] = False
        build_data["artifacts"] += [str(path.relative_to(ROOT)) for path in paths]
