"""Reads gin files into bindings with their places, using gin-config's parser.

Nothing is imported or executed: values are literals, `@references` and `%MACROS`.
"""

import dataclasses
import io
import os
import tokenize
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from tasks.terminal.command_line import UserError, nearest

# Placeholder for a value that another file or a flag must set.
REQUIRED = "gin.REQUIRED"
_MAIN = "__main__."
FLAXFORMER = (
    "Flaxformer's models are not read: leave their files out and name the model with "
    "--preset=t5_1_1_base (--help=presets), umT5 with --model.position=relative_per_layer"
)
_EVALUATE = "evaluate a run with python -m trainer.evaluate"
_EXPORT = "export a run with python -m trainer.export"
_INFER = f"generate text with python -m trainer.generate --model_dir=DIR, or {_EXPORT}"
_PRECOMPILE = "compile a run ahead of time with palimpsest plan --topology=NAME"
# T5X's commands other than training, and base names of their files -> our commands.
COMMANDS = {
    "evaluate": f"{_EVALUATE} --model_dir=DIR --split=SPLIT",
    "eval.gin": f"{_EVALUATE} --model_dir=DIR --split=SPLIT",
    "perplexity_eval.gin": f"{_EVALUATE} --model_dir=DIR --steps=all --split=validation",
    "infer": _INFER,
    "infer.gin": _INFER,
    "save": f"{_EXPORT}, or palimpsest export_t5x for T5X",
    "export.gin": _EXPORT,
    "export_seqio.gin": _EXPORT,
    "precompile": _PRECOMPILE,
    "precompile.gin": _PRECOMPILE,
}
_LIBRARY = "t5x/"


class Reference(NamedTuple):
    """`@scope/name`, followed by `()` if `called`; imports in the file have expanded the name."""

    scope: str
    name: str
    called: bool

    def __repr__(self) -> str:
        scope = f"{self.scope}/" if self.scope else ""
        return f"@{scope}{self.name}{'()' if self.called else ''}"


class Macro(NamedTuple):
    """`%NAME`."""

    name: str

    def __repr__(self) -> str:
        return f"%{self.name}"


class Binding(NamedTuple):
    """`scope/selector.argument = value`; a macro has no argument.

    `place` is FILE:LINE, the flag, or a built-in include. Bindings of T5X's own files (`library`)
    may go unused without a warning.
    """

    scope: str
    selector: str
    argument: str
    value: Any
    place: str
    library: bool = False

    @property
    def name(self) -> str:
        """The left side of the binding."""
        scope = f"{self.scope}/" if self.scope else ""
        argument = f".{self.argument}" if self.argument else ""
        return f"{scope}{self.selector}{argument}"


@dataclasses.dataclass
class Statements:
    """The files' bindings, in order, and (module, place) of the files' imports."""

    bindings: list[Binding] = dataclasses.field(default_factory=list)
    imports: list[tuple[str, str]] = dataclasses.field(default_factory=list)


class Value(NamedTuple):
    """A value with resolved macros, and an origin such as "ro.gin:12 via BATCH_SIZE"."""

    value: Any
    origin: str

    def must_be(self, name: str, rule: str) -> UserError:
        """Returns the error for an argument `name` with this value, which breaks `rule`."""
        return UserError(f"{self.origin}: {name} = {self.value!r} must be {rule}")


def read(
    files: Iterable[str],
    search_paths: Iterable[str],
    flags: Iterable[str],
    built_in: Mapping[str, list[Binding]],
) -> Statements:
    """Reads files in order, then flags of the form `NAME=VALUE`.

    Files are looked up in the working folder, then in `search_paths`; includes also beside the
    including file. `built_in` maps an include to its bindings, used if no such file exists. A
    UserError names the file and line that cannot be read.
    """
    reader = _Reader(["", *search_paths], built_in)
    for path in files:
        reader.file(path, f"--gin_file={path}", ())
    for flag in flags:
        reader.flag(flag)
    return reader.found


class _Reader:
    def __init__(self, folders: list[str], built_in: Mapping[str, list[Binding]]):
        self._folders, self._built_in = folders, built_in
        self._modules: dict[str, str] = {}
        self.found = Statements()

    def file(self, name: str, named_at: str, above: tuple[tuple[str, str], ...]) -> None:
        """Reads a file; `above` has (name, real path) of each including file."""
        beside = [os.path.dirname(path) for _, path in above[-1:]]
        candidates = [os.path.join(folder, name) for folder in [*self._folders, *beside]]
        path = next((candidate for candidate in candidates if os.path.isfile(candidate)), None)
        if path is None:
            self.found.bindings += self._described(name, named_at)
            return
        real = os.path.realpath(path)
        if real in [each for _, each in above]:
            circle = " -> ".join([*(each for each, _ in above), name])
            raise UserError(f"{named_at}: files include one another in a circle: {circle}")
        try:
            # Some editors write a byte order mark.
            with open(path, encoding="utf-8-sig") as lines:
                text = lines.read()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{named_at}: {path} is not UTF-8 (byte {error.start}): save it as UTF-8"
            ) from error
        self._statements(io.StringIO(text), name, (*above, (name, real)))

    def _described(self, name: str, named_at: str) -> list[Binding]:
        """Returns the bindings of a built-in file; a clone of T5X has it in t5x/t5x."""
        known = name.removeprefix(_LIBRARY) if name.startswith(2 * _LIBRARY) else name
        if known in self._built_in:
            return self._built_in[known]
        hint = COMMANDS.get(os.path.basename(name))
        hint = FLAXFORMER if "/flaxformer/" in f"/{name}" else hint
        if hint:
            raise UserError(f"{named_at}: there is no {name}; {hint}")
        sought = ", ".join(dict.fromkeys(folder or "." for folder in self._folders))
        raise UserError(
            f"{named_at}: there is no {name} in {sought}{nearest(name, self._built_in)}: "
            "add the folder that contains it to --gin_search_paths"
        )

    def flag(self, flag: str) -> None:
        name, equals, text = flag.partition("=")
        name, place = name.strip(), f"--gin.{name.strip()}"
        if not equals:
            raise UserError(f"{place} needs a value: {place}=VALUE, strings as \"'text'\"")
        self._statements(f"{name} = {text.strip()}", place, ())

    def _statements(self, source: Any, name: str, above: tuple[tuple[str, str], ...]) -> None:
        """Reads the text of a file or, if `above` is empty, of a flag."""
        from gin import config_parser

        # A file's own imports take precedence over earlier files' imports. As in gin, a file also
        # sees the imports of files that it includes; T5X's size files rely on this.
        modules: dict[str, str] = {} if above else self._modules
        seen = ChainMap(modules, self._modules)
        library = len(above) > 1 and name.startswith(_LIBRARY)
        try:
            for statement in config_parser.ConfigParser(source, _delegate()):
                place = f"{name}:{statement.location.line_num}" if above else name
                if isinstance(statement, config_parser.IncludeStatement):
                    self.file(statement.filename, place, above)
                elif isinstance(statement, config_parser.ImportStatement):
                    modules[statement.bound_name()] = statement.partial_path()
                    if statement.alias or statement.is_from:
                        modules[statement.bound_name()] = statement.module
                    self._modules |= modules
                    self.found.imports.append((statement.module, place))
                elif isinstance(statement, config_parser.BindingStatement):
                    scope, selector, argument, value, _ = statement
                    selector = _spelled_out(selector, seen) if argument else selector
                    value = _each(
                        value,
                        lambda each: (
                            each._replace(name=_spelled_out(each.name, seen))
                            if isinstance(each, Reference)
                            else each
                        ),
                    )
                    made = Binding(scope, selector, argument, value, place, library)
                    self.found.bindings.append(made)
        except (SyntaxError, tokenize.TokenError) as error:
            line, what = _failure(error)
            place = f"{name}:{line}" if above else name
            quoted = "" if above else f"; quote a string twice: {name}=\"'text'\""
            raise UserError(
                f"{place}: {what}: a value is a literal, an @reference or a %MACRO{quoted}"
            ) from error


# Macros of T5X's and Mesh T5's files -> equivalent flags.
OURS = {
    "MODEL_DIR": "model_dir",
    "MIXTURE_OR_TASK_NAME": "task",
    "MIXTURE_NAME": "task",
    "TRAIN_STEPS": "train_steps",
    "INITIAL_CHECKPOINT_PATH": "init_from",
    "init_checkpoint": "init_from",
}


def _flags(macro: str) -> str:
    if macro == "MODEL":
        return "--preset, or include a model such as 't5x/examples/t5/t5_1_1/base.gin'"
    theirs = f"--gin.{macro}=VALUE, strings as \"'text'\""
    return f"--{OURS[macro]}=VALUE, or {theirs}" if macro in OURS else theirs


def _failure(error: SyntaxError | tokenize.TokenError) -> tuple[Any, str]:
    if isinstance(error, SyntaxError):
        return error.lineno, str(error.msg).splitlines()[-1].strip().rstrip(".")
    message, (line, _) = error.args
    return line, message


def _delegate() -> Any:
    from gin import config_parser

    class Delegate(config_parser.ParserDelegate):
        def configurable_reference(self, name: str, evaluate: bool) -> Reference:
            scope, _, selector = name.rpartition("/")
            return Reference(scope, selector, evaluate)

        def macro(self, name: str) -> Macro:
            return Macro(name)

    return Delegate()


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """Applies `change` to a value, or to every element in a copy of a container."""
    if isinstance(value, dict):
        return {_each(key, change): _each(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple) and not isinstance(value, Reference | Macro):
        return type(value)(_each(item, change) for item in value)
    return change(value)


def _spelled_out(selector: str, modules: Mapping[str, str]) -> str:
    """Expands `utils.X` to `t5x.utils.X` after `from t5x import utils`."""
    first, dot, rest = selector.partition(".")
    full = f"{modules[first]}.{rest}" if dot and first in modules else selector
    return full.removeprefix(_MAIN)


def references(value: Any) -> list[Reference]:
    """Returns every reference in a value, including nested ones."""
    found: list[Reference] = []
    _each(value, lambda each: found.append(each) if isinstance(each, Reference) else None)
    return found


class Macros:
    """The values of macros; records which ones are read."""

    def __init__(self, bindings: Iterable[Binding]):
        bindings = list(bindings)
        # gin's rule: the last binding wins.
        self._bound = {binding.name: binding for binding in bindings if not binding.argument}
        self._values = [binding.value for binding in bindings]
        self._read: set[str] = set()

    def named(self) -> set[str]:
        """Returns the macros that bindings refer to, read or not."""
        found: set[str] = set()
        for value in self._values:
            _each(value, lambda each: found.add(each.name) if isinstance(each, Macro) else None)
        return found

    def unread(self) -> list[Binding]:
        """Returns the bindings of macros that were never read."""
        return [each for name, each in self._bound.items() if name not in self._read]

    def unset(self, binding: Binding) -> bool:
        """Returns whether a binding's value is an undefined macro."""
        return isinstance(binding.value, Macro) and binding.value.name not in self._bound

    def resolve(self, binding: Binding) -> Value:
        """Resolves a binding's macros; raises UserError if one is unknown, circular or unset."""
        return self._resolve(binding.value, binding.place, ())

    def _resolve(self, value: Any, place: str, through: tuple[str, ...]) -> Value:
        if isinstance(value, Macro):
            name = value.name
            if name == REQUIRED:
                what = f"{through[-1]} must be set" if through else "it must be set"
                hint = f": {_flags(through[-1])}" if through else ""
                raise UserError(f"{place}: {what}{hint}")
            if name in through:
                circle = " -> ".join(f"%{each}" for each in (*through, name))
                raise UserError(f"{place}: macros refer to one another in a circle: {circle}")
            if name not in self._bound:
                raise UserError(
                    f"{place}: nothing sets the macro %{name}{nearest(name, self._bound)}: set "
                    f"{_flags(name)}"
                )
            self._read.add(name)
            bound = self._bound[name]
            return self._resolve(bound.value, bound.place, (*through, name))

        # A container's origin is its own place, regardless of macros inside.
        def resolved(each: Any) -> Any:
            return self._resolve(each, place, through).value if isinstance(each, Macro) else each

        whole = _each(value, resolved)
        return Value(whole, f"{place} via {', '.join(through)}" if through else place)
