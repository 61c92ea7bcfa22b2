"""Compiling a run's programs: options, and the cache that lets a resumed run train in seconds."""

import importlib.util
import math
import os
import pathlib
import shutil
import time
import zlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tasks.storage import user_cache
from tasks.terminal.command_line import UserError
from trainer.engine import determinism
from trainer.engine.sharding import replicated
from trainer.monitoring import activity

# Without it, the TPU's compiler divides a product whose operand is gathered or whose result is
# scattered into windows, at half of its speed (docs/benchmarks.md). MaxText sets it, too.
_TPU_OPTIONS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
# Platforms whose compilers alone know the options that begin like this.
_OF_PLATFORM = {"xla_tpu_": "tpu", "xla_jf_": "tpu", "xla_gpu_": "gpu", "xla_cpu_": "cpu"}
_ZSTD = b"\x28\xb5\x2f\xfd"  # the first bytes of a zstandard frame (RFC 8878, 3.1.1)
_CHECKED = ".checked"
# Programs for accelerators have up to 100 MB, the demo's all together 1 MB.
_MOST_BYTES = 2 << 30
_LEAST_FREE = 256 << 20


def options(mesh: Mesh, given: Iterable[str] = ()) -> dict[str, str]:
    """Returns the compiler's options for programs on `mesh`, by name.

    `given` (NAME=VALUE) take precedence over LIBTPU_INIT_ARGS, and these over our own. Those of
    another platform, on which the run was trained, are left out.
    """
    platform = mesh.devices.flat[0].platform
    found = {}
    if platform == "tpu":
        set_already = os.environ.get("LIBTPU_INIT_ARGS", "")
        found = {name: value for name, value in _TPU_OPTIONS.items() if name not in set_already}
    for name, _, value in (each.partition("=") for each in given):
        if _platform_of(name) in (None, platform):
            # XLA reads True and False only, libtpu true and false as well.
            found[name] = value.title() if value in ("true", "false") else value
    return found


def options_of_initial_arrays(mesh: Mesh) -> dict[str, Any]:
    """Returns the compiler's options for programs that draw an array each, and run once.

    On CPUs, they compile in half of the time and run as fast, with the same bits (dev/LOG.md).
    """
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    if not on_cpu or jax.config.read("jax_disable_most_optimizations"):
        return {}
    # JAX 0.12's XLA has no other emitters, and refuses the option.
    emitters = {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 12) else {}
    return {"xla_backend_optimization_level": 1, **emitters}


def _platform_of(name: str) -> str | None:
    return next((of for start, of in _OF_PLATFORM.items() if name.startswith(start)), None)


def check_options(mesh: Mesh, given: Iterable[str]) -> None:
    """Raises UserError for an option that the compiler for `mesh` refuses."""
    for each in given:
        platform = mesh.devices.flat[0].platform
        if _platform_of(each) not in (None, platform):
            raise UserError(f"--compiler_options={each}: it is not for {platform}: leave it out")
        nothing = jax.ShapeDtypeStruct((), jnp.float32, sharding=replicated(mesh))
        compiled = jax.jit(lambda x: x, compiler_options=options(mesh, [each])).lower(nothing)
        try:
            compiled.compile()
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
            raise UserError(
                f"--compiler_options={each}: the compiler for {platform} refuses it: {reason}"
            ) from error


def enable() -> None:
    """Caches compiled programs in JAX_COMPILATION_CACHE_DIR or in the user's cache.

    The time of compiling counts as such from now on. Where nothing can be written, programs are
    read, or only compiled.
    """
    activity.count_compilations()
    config: Any = jax.config
    if not config.jax_enable_compilation_cache:
        return
    if not config.jax_compilation_cache_dir:
        within = user_cache.folder("xla")
        if config.jax_compilation_cache_max_size == -1:  # otherwise, JAX keeps to the user's limit
            user_cache.remove_oldest(within, "*-cache", _MOST_BYTES)
        config.update("jax_compilation_cache_dir", str(within / _machine()))
    folder = pathlib.Path(config.jax_compilation_cache_dir)
    if "://" in str(folder):
        return
    if not _writable(folder):
        # JAX would warn of every program that it cannot write.
        config.update("jax_persistent_cache_min_compile_time_secs", math.inf)
    elif "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        # JAX's own limit leaves out all but a few programs, which together take seconds.
        config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if folder.is_dir():
        remove_damaged(folder)
    else:
        config.update("jax_compilation_cache_dir", None)


def _machine() -> str:
    """Returns a name for machines that compile to the same code; homes are shared by others.

    JAX's keys of programs for CPUs leave out the cores among which XLA divides its work.
    """
    found = determinism.hardware()
    if found["platform"] != "cpu":
        return found["platform"]
    text = f"{found['cpu']}, {found['cores']} cores"
    return f"cpu_{zlib.crc32(text.encode()):08x}"


def _writable(folder: pathlib.Path) -> bool:
    """Makes the folder; returns whether files can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError:
        return False
    return os.access(folder, os.W_OK) and free >= _LEAST_FREE


def remove_damaged(folder: pathlib.Path) -> None:
    """Removes partly written programs (killed process, full disk).

    JAX warns about them at every start. Only files written since the last check are read.
    """
    marker, now = folder / _CHECKED, time.time()
    try:
        since = marker.stat().st_mtime if marker.exists() else 0.0
        for path in folder.glob("*-cache"):
            if path.stat().st_mtime >= since and not _whole(path.read_bytes()):
                path.unlink(missing_ok=True)
        marker.touch()
        os.utime(marker, (now, now))
    except OSError:
        return  # another process removed a file, or the folder is read-only: JAX warns as before


def _whole(data: bytes) -> bool:
    """Returns True if a file decompresses, or if no decompressor is available."""
    if data.startswith(_ZSTD):
        if not importlib.util.find_spec("zstandard"):
            return True
        import zstandard

        try:
            zstandard.ZstdDecompressor().decompress(data)
        except zstandard.ZstdError:
            return False
        return True
    try:
        zlib.decompress(data)
    except zlib.error:
        return False
    return True
