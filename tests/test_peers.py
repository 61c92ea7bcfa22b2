"""Tests without a peer's mark neither import a peer nor could."""

import ast
import importlib.util
import pathlib

import pytest

from tests.support.peers import PEERS, marks_of

FILES = sorted(pathlib.Path(__file__).parent.rglob("test_*.py"))
OF_PACKAGE = {package: peer for peer, packages in PEERS.items() for package in packages}


def imported(node):
    """Returns the peers that the code of a node imports."""
    names = []
    for each in ast.walk(node):
        if isinstance(each, ast.Import):
            names += [alias.name for alias in each.names]
        elif isinstance(each, ast.ImportFrom):
            names.append(each.module or "")
    return {OF_PACKAGE.get(name.partition(".")[0]) for name in names} - {None}


@pytest.mark.parametrize("package", OF_PACKAGE)
def test_a_peer_looks_as_if_it_were_not_installed(package):
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(package)
    assert importlib.util.find_spec(package) is None


def test_every_test_that_imports_a_peer_has_its_mark():
    wrong = []
    for path in FILES:
        of_file, whole = marks_of(path)
        for node in ast.parse(path.read_text()).body:
            helper = isinstance(node, ast.FunctionDef) and not node.name.startswith("test")
            if helper or not imported(node):
                continue
            decorators = [ast.unparse(each) for each in getattr(node, "decorator_list", ())]
            marks = of_file if whole else decorators
            missing = {peer for peer in imported(node) if not any(peer in mark for mark in marks)}
            wrong += [f"{path.name}: {ast.unparse(node)[:60]} needs {peer}" for peer in missing]
    assert not wrong


def test_each_peer_has_tests():
    assert set(PEERS) == {peer for path in FILES for peer in marks_of(path)[0]}
