"""Commands made from dataclasses: flags, their values, help and mistakes."""

import dataclasses
import itertools

import pytest

from tasks.terminal import flags, help
from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import REQUIRED, ReadIf, at_least, check, field


@dataclasses.dataclass(frozen=True)
class Inner:
    size: int = field(1, "words of size", aliases=("width", "--short"))
    pack: bool = field(True, "words of pack")

    def __post_init__(self):
        check(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    name: str = field(REQUIRED, "words of name", metavar="NAME")
    price: float | None = field(None, "words of price")
    workers: int = field(1, "words of workers", aliases=("jobs",), rule=at_least(1))
    kind: str = field("a", "words of kind", choices=("a", "b"))
    loud: bool = field(False, "words of loud")
    corpus: tuple[str, ...] = field((), "words of corpus", repeated=True)
    ids: tuple[int, ...] = field((), "words of ids")
    sides: tuple[str, ...] | None = field(None, "words of sides")
    lists: str | None = field(None, "words of lists", joined=";")
    search: int | None = field(None, "words of search", alone="10")
    extra: tuple[str, ...] = field((), "words of extra", repeated=True, aliases=("x.*",))
    of_b: int | None = field(
        None, "words of of_b", read_if=ReadIf(lambda each: each.kind == "b", "without --kind=b")
    )
    inner: Inner = field(Inner, "words of inner")
    flat: Inner = field(Inner, "words of flat", flat=True)


def made(*words):
    return flags.made(Options, flags.parse(Options, words))


def refused(*words):
    with pytest.raises(UserError) as error:
        made(*words)
    return str(error.value)


def test_values_and_defaults():
    assert made("--name=x") == Options(name="x")
    words = ["--name=x", "--price=1.5", "--jobs", "3", "--kind=b", "--loud", "--of-b=2"]
    assert made(*words) == Options(name="x", price=1.5, workers=3, kind="b", loud=True, of_b=2)
    several = made("--name=x", "--corpus=a", "--ids=1,2", "--ids=3,4", "--corpus", "b,c")
    assert (several.corpus, several.ids) == (("a", "b,c"), (1, 2, 3, 4))
    joint = made("--name=x", "--lists=a", "--sides=a,b", "--lists", "b;c", "--sides=c")
    assert (joint.lists, joint.sides) == ("a;b;c", ("a", "b", "c"))
    assert made("--name=x", "--workers=2", "--workers=2").workers == 2
    assert made("--name=x", "--search").search == 10
    assert made("--name=x", "--search", "5", "--price=None").search == 5
    assert made("--name=x", "--x.a.B=1", "--extra=c").extra == ("a.B=1", "c")


def test_nested_dataclasses_have_a_prefix_unless_they_are_flat():
    options = made(
        "--name=x", "--inner.width=2", "--size=3", "--inner.pack=false", "--pack", "true"
    )
    assert made("--name=x", "--workers=4e9").workers == 4 * 10**9
    assert (options.inner, options.flat) == (Inner(2, False), Inner(3, True))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "required: --name"),
        (["--nam=x"], "unknown flag --nam (did you mean --name?)"),
        (["word"], "unknown flag word"),
        (["--price=1", "--workers=2", "--workers=3"], "--workers=2 and --workers=3: give one of"),
        (["--price=1", "--price=None"], "--price=1 and --price=None: give one of them"),
        (["--sides=None", "--sides=a"], "--sides=None and --sides=a: give one of them"),
        (["--loud", "--loud=false"], "--loud=true and --loud=false: give one of them"),
        (["--inner.siz=1"], "did you mean --inner.size?"),
        (["--workers=0"], "--workers=0: it must be 1 or more"),
        (["--jobs=0"], "--jobs=0: it must be 1 or more"),
        (["--no-loud"], "unknown flag --no-loud (did you mean --loud=false?)"),
        (["--workers=1.5e0"], "--workers=1.5e0: it must be a whole number"),
        (["--workers=many"], "--workers=many: it must be a whole number"),
        (["--kind=c"], "--kind=c: it must be one of 'a', 'b'"),
        (["--price=much"], "--price=much: it must be a number or None"),
        (["--loud=maybe"], "--loud=maybe: it must be true or false"),
        (["--price"], "--price needs a value"),
        (["--price", "--loud"], "--price needs a value"),
        (["--workers=1", "--jobs=1"], "--workers and --jobs are the same: set one of them"),
        (["--of_b=1"], "--of_b has no effect without --kind=b"),
    ],
)
def test_mistakes_name_the_flag(words, message):
    known = [] if words in ([], ["--nam=x"]) else ["--name=x"]
    assert message in refused(*known, *words)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placed:
    first: str = field(REQUIRED, "words of first", positional=True)
    others: tuple[int, ...] = field((), "words of others", positional=True)
    json: bool = field(False, "print JSON")


def test_values_without_a_name():
    parsed = flags.parse(Placed, ["a", "--json", "1", "--", "2"])
    assert flags.made(Placed, parsed) == Placed(first="a", others=(1, 2), json=True)
    with pytest.raises(UserError, match=r"unknown flag x \(did you mean --name=x\?\)"):
        flags.parse(WithRest, ["x"])
    with pytest.raises(UserError, match="required: FIRST"):
        flags.parse(Placed, ["--json"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bare:
    cache: str = field(REQUIRED, "words of cache", bare=True)
    lists: str | None = field(None, "words of lists", joined=",", bare=True)


@pytest.mark.parametrize(
    "words", [["a", "b", "c"], ["--cache=a", "--lists=b", "--lists", "c"], ["--lists=b", "a", "c"]]
)
def test_a_name_may_be_left_out(words):
    assert flags.made(Bare, flags.parse(Bare, words)) == Bare(cache="a", lists="b,c")
    assert "usage: x --cache=TEXT [" in help.page(Bare, "x", "")
    with pytest.raises(UserError, match="required: --cache"):
        flags.parse(Bare, ["--lists=b"])
    with pytest.raises(UserError, match="--cache=a and --cache=b: give one of them"):
        flags.parse(Bare, ["--cache=a", "b"])


def refuse(words, known):
    flags.refuse_unknown([word for word in words if word != "--beam"], known)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithRest:
    name: str = field(REQUIRED, "words of name")
    rest: tuple[str, ...] = field((), "words of rest", rest=refuse)


def test_other_flags_are_passed_on():
    assert flags.parse(WithRest, ["--name=a", "--beam", "b"]).values["rest"] == ("--beam", "b")
    # A flag that is missing may only be misspelled.
    with pytest.raises(UserError, match=r"--nam \(did you mean --name\?\)"):
        flags.parse(WithRest, ["--beam", "--nam=a"])
    with pytest.raises(UserError, match="required: --name"):
        flags.parse(WithRest, ["--beam"])


def test_a_partial_dataclass_is_not_made():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Partial:
        run: flags.Given = field(REQUIRED, "the run", flat=True, partial=Options)

    options = flags.made(Partial, flags.parse(Partial, ["--workers=0", "--inner.size=2"]))
    assert options.run.values == {"workers": 0, "inner.size": 2}
    assert options.run.typed["workers"] == "--workers=0"


def run(options):
    return len(options.name)


def test_a_command_runs_with_its_flags(capsys):
    command = Command(Options, run)
    assert command(["--name=abc"]) == 3
    assert command(["--help"]) == 0
    assert "usage: python -m " in capsys.readouterr().out


def test_help_has_the_words_the_values_and_the_defaults(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = help.page(Options, "program", "Does it.\n\n    program --name=x\n")
    for each in itertools.chain(dataclasses.fields(Options), dataclasses.fields(Inner)):
        assert f"words of {each.name}" in text
    assert text.startswith("usage: program --name=NAME [--FLAG=VALUE …]\n\nDoes it.\n\n    program")
    assert "  --workers=N, --jobs=N   words of workers (default: 1)\n" in text
    assert "--kind={a,b}" in text
    assert "--loud  " in text
    assert "--search[=N]" in text
    assert "words of price (default" not in text
    assert "\ninner:\n  words of inner\n\n  --inner.size=N, --inner.width=N" in text
    assert max(map(len, text.splitlines())) <= 80


def test_help_of_a_group():
    text = help.page(Options, "program", "Does it.", "inner")
    assert text.startswith("inner:\n")
    assert "--price" not in text
    with pytest.raises(UserError, match=r"--help=iner: no such group \(did you mean inner\?\)"):
        help.page(Options, "program", "Does it.", "iner")


def test_a_long_list_is_cut_to_what_is_used_often():
    kind = dataclasses.make_dataclass(
        "Many",
        [
            (f"x{n}", int, field(n, f"words of {n}", often="often" if n < 2 else ""))
            for n in range(99)
        ],
    )
    short = help.page(kind, "program", "Does it.")
    assert "--x1=N" in short
    assert "--x2=N" not in short
    assert "--help=all shows all 99 flags" in short
    assert "--x98=N" in help.page(kind, "program", "Does it.", "all")
