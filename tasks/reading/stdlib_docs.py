"""The text of the built-in corpus: documentation of the running Python's standard library.

It is real English prose, found wherever Python is. A document is the docstring of a module, of a
function, or of a class with its methods, or a topic of `help()`. Files are parsed; nothing is
imported or executed.
"""

import ast
import functools
import hashlib
import inspect
import json
import os
import platform
import sysconfig
import warnings
from collections.abc import Iterator, Sequence

from tasks.reading import batches, cutting, splits
from tasks.reading.batches import Batches
from tasks.reading.corpus import PYTHON_DOCS, TRAIN, VALIDATION, Corpus, CorpusSpec, Piece
from tasks.terminal.command_line import UserError

# Tests and applications, which are not documentation; packages installed by pip; bytecode.
_LEFT_OUT = frozenset(
    {"test", "tests", "idle_test", "idlelib", "turtledemo", "lib2to3", "ensurepip"}
    | {"site-packages", "dist-packages", "__pycache__"}
)
_TOPICS = "pydoc_data/topics.py"


@functools.cache
def documents() -> dict[str, str]:
    """Returns {id: text}, sorted by id, which is a dotted name or "topic:NAME".

    Repeated docstrings (posixpath and ntpath) are included once, so that none is in both train and
    validation. Machines with the same Python release and library files get the same documents.
    """
    root = sysconfig.get_paths()["stdlib"]
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


@functools.cache
def sha256() -> str:
    """Returns the hex SHA-256 of all ids and texts."""
    return hashlib.sha256(json.dumps(documents(), sort_keys=True).encode()).hexdigest()


class PythonDocs:
    """The kind `python_docs`."""

    has_paths = False
    reads_folders = False

    def resolve(
        self,
        spec: CorpusSpec,
        piece_bytes: int,
        max_document_bytes: int,
        earlier: Sequence[Sequence[str]],
        rules: int,
    ) -> Corpus:
        if spec.split not in (TRAIN, VALIDATION):
            raise UserError(f"corpus {spec}: no split {spec.split}; it has train, validation")
        sizes = {name: len(text.encode()) for name, text in documents().items()}
        of_piece, held_out = splits.held_out_splits(spec)
        pieces: list[Piece] = []
        target = cutting.target_bytes(sum(sizes.values()), piece_bytes)
        for members in cutting.join(sizes, sizes.__getitem__, target):
            name = f"{PYTHON_DOCS}:{len(pieces)}"
            size = sum(map(sizes.__getitem__, members))
            pieces.append(Piece(name, of_piece, size, held_out, PYTHON_DOCS, members=members))
        record = {
            "spec": str(spec),
            "python": platform.python_version(),
            "validation": spec.validation,
            "piece_bytes": piece_bytes,
            "max_document_bytes": max_document_bytes,
            "documents": len(sizes),
            "bytes": sum(sizes.values()),
            "sha256": sha256(),
        }
        return Corpus(spec, record, tuple(pieces))

    def read(self, corpus: Corpus, piece: Piece, batch_documents: int) -> Batches:
        if corpus.record["sha256"] != sha256():
            raise UserError(
                f"the corpus {PYTHON_DOCS} was listed with Python {corpus.record['python']}, but "
                f"this is Python {platform.python_version()}, or another build of it"
            )
        texts = documents()
        found = ((name, texts[name], None, 0, f"{PYTHON_DOCS}:{name}") for name in piece.members)
        yield from batches.collect(found, batch_documents, corpus.max_document_bytes)

    def check(self, spec: CorpusSpec) -> None:
        pass
