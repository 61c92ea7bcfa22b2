"""Completion of commands, flags and choices in bash, zsh and fish."""

from collections.abc import Iterator, Sequence

from palimpsest.commands import COMMANDS, command
from tasks import annexes
from tasks.terminal.command_line import UserError
from tasks.terminal.flags import flags_of

_SCRIPTS = {
    "bash": """_palimpsest() {
  local IFS=$'\\n'
  COMPREPLY=($(palimpsest complete bash "${COMP_LINE:0:COMP_POINT}" 2> /dev/null))
}
complete -o default -o nospace -F _palimpsest palimpsest""",
    "zsh": """#compdef palimpsest
_palimpsest() {
  local -a found
  found=("${(@f)$(palimpsest complete zsh "$LBUFFER" 2> /dev/null)}")
  compadd -S '' -- $found || _files
}
compdef _palimpsest palimpsest""",
    "fish": "complete -c palimpsest -a '(palimpsest complete fish (commandline -cp) 2>/dev/null)'",
}


def script(shell: str) -> str:
    """Returns the script that a shell reads to complete command lines."""
    if shell not in _SCRIPTS:
        raise UserError(f"completion {shell}: the shell must be one of {', '.join(_SCRIPTS)}")
    return _SCRIPTS[shell]


def print_script(words: Sequence[str]) -> None:
    """Answers `palimpsest completion SHELL`."""
    print(script(words[0] if words else ""))


def print_candidates(words: Sequence[str]) -> None:
    """Answers `palimpsest complete SHELL LINE`, which the scripts call."""
    if len(words) != 2:
        raise UserError("palimpsest complete SHELL LINE is for the scripts of completion")
    print("\n".join(candidates(*words)))


def candidates(shell: str, line: str) -> list[str]:
    """Returns the possible completions of a command line's last word.

    bash expects a value without its flag, because it splits words at "=".
    """
    *before, last = line.split(" ")
    words = [word.replace("-", "_") for word in before[1:] if word]
    name, equals, value = last.partition("=")
    dashes = name[: len(name) - len(name.lstrip("-"))]
    last = dashes + name[len(dashes) :].replace("-", "_") + equals + value
    found = sorted({*_values(words, last)})
    if shell == "bash" and "=" in last:
        found = [each.partition("=")[2] for each in found]
    return [each if each.endswith("=") else f"{each} " for each in found]


def _values(words: list[str], last: str) -> Iterator[str]:
    name = next((name for name in COMMANDS if name.split() == words[: len(name.split())]), None)
    if name is None:
        for each in (*COMMANDS, *annexes.entries("words_help")):
            parts = each.split()
            begin, after = parts[: len(words)], parts[len(words) :]
            if begin == words and after and after[0].startswith(last):
                yield after[0]
        return
    if last and "--help".startswith(last):
        yield "--help"
    for flag in flags_of(command(COMMANDS[name]).flags):
        if flag.field.metadata["positional"] or flag.field.metadata["rest"]:
            continue
        if "=" not in last:
            spelled = f"--{flag.name}" + ("=" if flag.declared is not bool else "")
            if spelled.startswith(last):
                yield spelled
        elif last.startswith(f"--{flag.name}="):
            text = last.partition("=")[2]
            is_bool = flag.declared is bool
            choices = ("true", "false") if is_bool else map(str, flag.field.metadata["choices"])
            yield from (f"--{flag.name}={choice}" for choice in choices if choice.startswith(text))
