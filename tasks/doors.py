"""The former name of `tasks.adapters`, kept as an alias."""

from tasks.adapters import *  # noqa: F403
