"""Lists the recipes that come with this project, or copies one.

    palimpsest recipes
    palimpsest recipes --copy=demo     # writes ./demo.toml, to be edited

`palimpsest run NAME` runs one as it is, with its results in the current folder.
"""

import dataclasses

from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import field


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    copy: str | None = field(
        None,
        "write this recipe to NAME.toml in the current folder, which must not have such a file",
        metavar="NAME",
        often="recipe to write to the current folder",
    )


def run(flags: Flags) -> None:
    """Prints the names and titles of all recipes, or copies one."""
    from palimpsest.annexes.recipes import recipe, shipped

    if flags.copy == "":
        raise UserError("--copy= names no recipe; palimpsest recipes lists them")
    if flags.copy is not None:
        text = shipped.text(flags.copy)
        name = f"{flags.copy}{shipped.SUFFIX}"
        try:
            with open(name, "x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError as error:
            raise UserError(f"--copy={flags.copy}: {name} is here already: move it") from error
        print(f"wrote {name}; palimpsest run {name} runs it")
        return
    width = max(map(len, shipped.files()))
    for name, path in shipped.files().items():
        head, _ = recipe.tables_of(path, shipped.text(name))
        print(f"{name:<{width}}  {head['title']}")
    print(
        "\npalimpsest run NAME runs one, and palimpsest recipes --copy=NAME writes it to NAME.toml"
    )


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
