"""Commands: a frozen dataclass of flags and a function that runs with them."""

import contextlib
import importlib
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from tasks.terminal import command_line, extras, help, interrupt, toml_flags
from tasks.terminal.flags import extended, given_flags, made, parse
from tasks.terminal.interruption import interruptible


class Command:
    """A command, called with the words of its command line.

    `at_once` is advice such as "run the same command again": Ctrl-C prints it and ends the process
    at once. Without it, Ctrl-C raises KeyboardInterrupt, again and again if a library swallows it.
    """

    def __init__(
        self,
        flags: Any,  # the dataclass, or "module:class", which is imported when the command runs
        run: Callable[[Any], int | None],  # takes the flags; returns the exit code, or None for 0
        *,
        at_once: str | None = None,
        terminated: bool = False,  # SIGTERM ends the process at once, too
        waits: bool = False,  # Ctrl-C waits for other processes, so it is raised only once
    ):
        self._flags, self._run = flags, run
        self._at_once, self._terminated = at_once, terminated
        self._once = waits or at_once is not None
        self.__module__ = run.__module__

    @property
    def flags(self) -> type:
        """The dataclass with all flags, those of annexes included."""
        return extended(self.own_flags)

    @property
    def own_flags(self) -> type:
        """The dataclass with the core's flags alone."""
        if isinstance(self._flags, str):
            module, _, name = self._flags.partition(":")
            return getattr(importlib.import_module(module), name)
        return self._flags

    def __call__(self, words: Sequence[str], program: str | None = None) -> int:
        """Parses the words and runs; returns the exit code."""
        for word, after in itertools.pairwise([*words, "--"]):
            if word == "--":
                break
            name, equals, topic = word.partition("=")
            if name in ("--help", "-h"):
                topic = topic if equals or after.startswith("-") else after
                print(self.help(topic, program))
                return 0
        with extras.named(), contextlib.nullcontext() if self._once else interruptible():
            return self._run(given_flags(self.own_flags, words)) or 0

    def typed(self, values: Mapping[str, Any]) -> Any:
        """Returns the flags given as Python values, as `toml_flags.words` describes them."""
        return made(self.flags, parse(self.flags, toml_flags.words(self.flags, values)))

    def call(self, flags: Any, function: Callable[[Any], Any] | None = None) -> Any:
        """Returns what `function`, or the command itself, returns for flags, in this process.

        Signals are the caller's: Ctrl-C raises KeyboardInterrupt wherever it arrives.
        """
        with extras.named(), command_line.storage_named():
            return (function or self._run)(flags)

    def help(self, topic: str = "", program: str | None = None) -> str:
        program = program or f"python -m {self.__module__}"
        text = sys.modules[self._run.__module__].__doc__ or ""
        return help.page(self.flags, program, text, topic)

    def start(self, words: Sequence[str] | None = None, program: str | None = None) -> NoReturn:
        """Runs the command as the whole process, and exits."""
        program = program or f"python -m {command_line.module_name(self)}"
        if self._at_once is not None:
            interrupt.end_at_once(program, self._at_once, self._terminated)
        command_line.run(lambda given: self(given, program), words, program)
