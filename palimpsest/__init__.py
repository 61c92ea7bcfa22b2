"""The commands as functions of Python, and one command line for all of them; see `palimpsest.api`.

Its names are loaded when they are used, and JAX or Beam when a command needs them.
"""

from typing import TYPE_CHECKING, Any

import palimpsest_home

palimpsest_home.settle(__path__[0])

if TYPE_CHECKING:
    from palimpsest.api import (
        Cache,
        Model,
        UserError,
        Vocabulary,
        build,
        call,
        finetune,
        pretrain,
        train_vocabulary,
        write_corpus,
    )

__all__ = [
    "Cache",
    "Model",
    "UserError",
    "Vocabulary",
    "build",
    "call",
    "finetune",
    "pretrain",
    "train_vocabulary",
    "write_corpus",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from palimpsest import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
