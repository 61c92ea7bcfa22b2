"""Options of programs; damaged files among compiled ones are removed and written again."""

import os
import time
import types

import numpy as np
import pytest

from tests.support.processes import started
from trainer.engine import compiled_programs

pytestmark = pytest.mark.processes

PROGRAM = """
import jax
from trainer.engine import compiled_programs
compiled_programs.enable()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
print(jax.jit(lambda x: x * 3)(2))
"""


def run(folder):
    return started("-c", PROGRAM, env={**os.environ, "JAX_COMPILATION_CACHE_DIR": str(folder)})


def test_a_file_cut_short_is_written_again(tmp_path):
    assert run(tmp_path).returncode == 0
    files = {path: path.read_bytes() for path in tmp_path.glob("*-cache")}
    assert files
    for path, data in files.items():
        path.write_bytes(data[: len(data) // 2])
    again = run(tmp_path)
    assert again.stdout == "6\n"
    assert "Error reading" not in again.stderr
    assert {path: len(path.read_bytes()) for path in files} == {
        path: len(data) for path, data in files.items()
    }


def test_only_new_files_are_read(tmp_path):
    path = tmp_path / "jit_x-cache"
    path.write_bytes(b"damaged")
    os.utime(path, (time.time() - 60,) * 2)
    (tmp_path / ".checked").touch()
    compiled_programs.remove_damaged(tmp_path)
    assert path.exists()
    path.touch()
    compiled_programs.remove_damaged(tmp_path)
    assert not path.exists()


@pytest.mark.parametrize(
    ("platform", "flags", "given"),
    [("tpu", "", True), ("tpu", "--xla_a=1", True), ("cpu", "", False), ("gpu", "", False)],
)
def test_only_tpus_are_told_not_to_divide_products(platform, flags, given, monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", flags)
    devices = np.array([types.SimpleNamespace(platform=platform)], dtype=object)
    mesh = types.SimpleNamespace(devices=devices)
    name = "xla_jf_spmd_threshold_for_windowed_einsum_mib"
    assert (name in compiled_programs.options(mesh)) == given
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--{name}=5")
    assert compiled_programs.options(mesh) == {}
    of_tpus = {name: "6"} if platform == "tpu" else {}
    assert compiled_programs.options(mesh, [f"{name}=6"]) == of_tpus
    # libtpu reads both spellings, XLA only the second.
    found = compiled_programs.options(mesh, ["xla_a=true", "xla_b=False", "xla_c=trueish"])
    assert found == {"xla_a": "True", "xla_b": "False", "xla_c": "trueish"}
