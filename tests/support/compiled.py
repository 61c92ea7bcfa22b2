"""Functions that are compiled as for users, for tests with the fixture compiled_as_users_do."""

from functools import partial

import jax

# XLA's older code generator, which tests/conftest.py chooses, takes two to three times as long as
# the newer one where programs are optimised.
_OPTIONS = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 12) else {}
compiled = partial(jax.jit, compiler_options=_OPTIONS)
