"""The budgets of dev/budget.toml: no folder outgrows its own, and none goes without."""

import ast
import importlib.util
import pathlib
import tomllib

ROOT = pathlib.Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("rent", ROOT / "scripts" / "rent.py")
rent = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(rent)

BOOK = tomllib.loads(rent.BOOK.read_text())
ADVICE = "make something shorter, or raise the number in dev/budget.toml and say why"
# A function may have this many lines; compiled kernels are one block each.
LONGEST, LOOP = 80, 70
KERNELS = {"backward_kernel", "forward_kernel"}
# Lines of tests for a line of the packages (docs/decisions/032).
TESTS_PER_LINE = 0.7


def test_no_folder_outgrows_its_budget():
    lines = rent.lines()
    assert {*lines} == {*BOOK["folders"]}, "dev/budget.toml lists each folder once"
    for folder, (budget, reason) in BOOK["folders"].items():
        assert len(reason) > 3, f"{folder}: say what it is for"
        assert lines[folder] <= budget, f"{folder} has {lines[folder]} of {budget} lines: {ADVICE}"


def test_the_whole_stays_in_its_budget():
    totals = rent.totals(rent.lines())
    for name, count in totals.items():
        assert count <= BOOK["totals"][name], f"{name}: {count} of {BOOK['totals'][name]}: {ADVICE}"
    assert totals["tests"] <= TESTS_PER_LINE * totals["packages"]


def functions():
    for package in rent.PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef):
                    yield path.relative_to(ROOT), node, node.end_lineno - node.lineno + 1


def test_functions_are_short():
    for path, node, lines in functions():
        limit = LOOP if str(path) == "trainer/loop.py" else LONGEST
        if node.name not in KERNELS:
            assert lines <= limit, f"{path}: {node.name} has {lines} lines, more than {limit}"
