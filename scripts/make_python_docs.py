"""Makes the corpus `python_docs`: the documentation in CPython 3.11.7's standard library.

    python3.11 scripts/make_python_docs.py

Run it with CPython 3.11.7 as python.org releases it, for example with pyenv's. It writes
tasks/reading/files/python_docs.jsonl.gz and, beside it, the library's licence, with the same bytes
each time. Files are parsed; nothing is imported or executed.
"""

import ast
import gzip
import inspect
import io
import json
import os
import pathlib
import platform
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Iterator

FILES = pathlib.Path(__file__).parents[1] / "tasks" / "reading" / "files"
PYTHON = "3.11.7"
# Tests and applications, which are not documentation; packages installed by pip; bytecode.
_LEFT_OUT = frozenset(
    {"test", "tests", "idle_test", "idlelib", "turtledemo", "lib2to3", "ensurepip"}
    | {"site-packages", "dist-packages", "__pycache__"}
)
_TOPICS = "pydoc_data/topics.py"


def documents(root: str) -> dict[str, str]:
    """Returns {id: text} of the library in a folder, sorted by id: a dotted name or "topic:NAME".

    Repeated docstrings (posixpath and ntpath) are included once, so that none is in both train and
    validation.
    """
    found: dict[str, str] = {}
    seen: set[str] = set()
    for relative in sorted(_sources(root)):
        with open(os.path.join(root, relative), "rb") as file:
            source = file.read()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in old modules
                tree = ast.parse(source)
        except (SyntaxError, ValueError):  # a template, or an intentionally invalid file
            continue
        if relative == _TOPICS:
            found.update((f"topic:{name}", text) for name, text in _topics(tree))
            continue
        module = relative.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name, node, deep in _entries(tree, module):
            if sections := list(_sections(node, name, deep, seen)):
                # A name defined twice, under `if` and `else`, is one document.
                found[name] = "\n\n".join([*filter(None, [found.get(name)]), *sections])
    return dict(sorted(found.items()))


def _sources(root: str) -> Iterator[str]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _LEFT_OUT]
        for name in names:
            if name.endswith(".py"):
                yield os.path.relpath(os.path.join(folder, name), root).replace(os.sep, "/")


_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _entries(node: ast.AST, name: str) -> Iterator[tuple[str, ast.AST, bool]]:
    """Yields (name, node, deep) for a module's documents; `deep` includes nested definitions."""
    if isinstance(node, ast.Module):
        yield name, node, False
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Definition):
            yield f"{name}.{child.name}", child, True
        else:  # definitions inside `if` or `try`
            yield from _entries(child, name)


def _sections(node: ast.AST, name: str, deep: bool, seen: set[str]) -> Iterator[str]:
    """Yields "qualified name, blank line, docstring" of `node` and, if `deep`, of its children."""
    if isinstance(node, ast.Module | _Definition):
        text = ast.get_docstring(node)
        if text and text not in seen:
            seen.add(text)
            yield f"{name}\n\n{text}"
    for child in ast.iter_child_nodes(node) if deep else ():
        inner = f"{name}.{child.name}" if isinstance(child, _Definition) else name
        yield from _sections(child, inner, deep, seen)


def _topics(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            for name, text in ast.literal_eval(statement.value).items():
                yield name, inspect.cleandoc(text)


def compressed(found: dict[str, str]) -> bytes:
    """Returns the documents as JSON lines, compressed by gzip without a time and a file name."""
    rows = ({"id": name, "text": text} for name, text in found.items())
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    written = io.BytesIO()
    with gzip.GzipFile("", "wb", compresslevel=9, fileobj=written, mtime=0) as file:
        file.write(lines.encode())
    return written.getvalue()


def main() -> None:
    """Writes the files."""
    if platform.python_version() != PYTHON:
        sys.exit(f"this is Python {platform.python_version()}: run it with CPython {PYTHON}")
    root = sysconfig.get_paths()["stdlib"]
    found = documents(root)
    FILES.mkdir(exist_ok=True)
    data = compressed(found)
    (FILES / "python_docs.jsonl.gz").write_bytes(data)
    shutil.copyfile(os.path.join(root, "LICENSE.txt"), FILES / "python_docs.LICENSE.txt")
    print(f"{len(found):,} documents, {len(data):,} bytes")


if __name__ == "__main__":
    main()
