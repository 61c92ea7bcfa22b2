"""The former name of `tasks.adapters`."""

from tasks.adapters import *  # noqa: F403
