"""Reads the files in a tar or zip archive, also a compressed one, as files of the corpus.

A member is called ARCHIVE::MEMBER, in ids too. Members are read in the archive's order, each from a
temporary copy. Folders, links, hidden files and those in hidden folders are passed over.
"""

import contextlib
import os
import shutil
import stat
import tarfile
import tempfile
import zipfile
from collections.abc import Generator, Iterator
from typing import IO, Any, Self

from tasks.reading import compression, listers, opening, splits
from tasks.reading.batches import Batches
from tasks.reading.corpus import (
    IN_ARCHIVE,
    Corpus,
    CorpusSpec,
    FilePart,
    FileRange,
    Member,
    SourceFile,
)
from tasks.reading.formats.format import Format
from tasks.terminal.command_line import UserError

_DEEPEST = 3  # archives in archives
_COPY_BYTES = 1 << 20
# The record at the end of a zip archive, before its comment.
_END, _END_BYTES = b"PK\5\6", 22
_ENCRYPTED = 1  # a flag of zip's members


def ranges(form: Format, spec: CorpusSpec, file: SourceFile) -> list[FileRange]:
    """Returns an archive as one range, after a check of its first documents; [] if it has none.

    Raises errors as `Format.ranges` does.
    """
    with contextlib.closing(_members(spec, file)) as members:
        for member in members:
            with opening.user_errors(member.path):
                if listers.ranges(form, spec, member):
                    return [FileRange(0, None, file.bytes)]
    return []


def read(form: Format, corpus: Corpus, part: FilePart, batch_documents: int) -> Batches:
    """Yields the documents of an archive; see `Format.read`."""
    with contextlib.closing(_members(corpus.spec, part.file)) as members:
        for member in members:
            with opening.user_errors(member.path):
                for each in listers.ranges(form, corpus.spec, member):
                    whole = FilePart(member, each.start, each.stop, each.bytes, each.cuts)
                    yield from listers.read(form, corpus, whole, batch_documents)


def _members(spec: CorpusSpec, file: SourceFile) -> Generator[Member, None, None]:
    """Yields an archive's files, each of which can be opened until the next one is asked for."""
    if file.name.count(IN_ARCHIVE) >= _DEEPEST:
        raise UserError(f"{file.path} is an archive in {_DEEPEST} others: unpack them first")
    seen: set[str] = set()
    with (
        _value_errors(),
        opening.open_file(file) as handle,
        tempfile.TemporaryFile(buffering=0) as copy,
    ):
        is_zip = compression.is_zip(handle)
        for name, data in _of_zip(handle) if is_zip else _of_tar(handle, file.path):
            name = name.removeprefix("./")
            if any(part.startswith(".") for part in name.split("/")):
                continue
            if spec.split and splits.split_of(f"{file.name}/{name}") != file.split:
                raise UserError(
                    f"{file.path}: the path of {name} names another split, but an archive is of "
                    "one: unpack it first, or leave out ?split to read all of it"
                )
            if name in seen:
                raise UserError(f"{file.path} has two files {name}: unpack it first")
            seen.add(name)
            copy.seek(0)
            copy.truncate()
            shutil.copyfileobj(data, copy, _COPY_BYTES)
            size, full_name = copy.tell(), f"{file.name}{IN_ARCHIVE}{name}"
            yield Member(file.folder, full_name, file.split, size, {}, copy=copy.fileno())


@contextlib.contextmanager
def _value_errors() -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, zipfile.BadZipFile) as error:
        raise ValueError(str(error)) from error


def _of_zip(handle: IO[bytes]) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(handle) as archive:
        begins = (member.header_offset for member in archive.infolist())
        if min(begins, default=archive.start_dir):
            raise ValueError("it begins with other bytes, perhaps another archive: split it")
        handle.seek(-_END_BYTES - len(archive.comment), os.SEEK_END)
        if handle.read(len(_END)) != _END:
            raise ValueError("other bytes follow its end, perhaps another archive: split it")
        for member in archive.infolist():
            if member.flag_bits & _ENCRYPTED:
                raise ValueError(f"{member.filename} is encrypted")
            if not member.is_dir() and not stat.S_ISLNK(member.external_attr >> 16):
                with archive.open(member) as data:
                    yield member.filename, data


def _of_tar(handle: IO[bytes], path: str) -> Iterator[tuple[str, IO[bytes]]]:
    stream = compression.decompress(handle, path, archives=True)
    archive: Any  # the list of members is not public
    with tarfile.open(
        fileobj=stream, mode="r|", tarinfo=_Header, errors="backslashreplace"
    ) as archive:
        while member := archive.next():
            archive.members = []  # or all of them are kept
            if data := archive.extractfile(member) if member.isreg() else None:
                yield member.name, data
        while rest := archive.fileobj.read(_COPY_BYTES):
            if rest.strip(b"\0"):
                raise ValueError("it continues after its end: it may be two archives in one")


class _Header(tarfile.TarInfo):
    """A header whose damage is an error, where `tarfile` takes it for the archive's end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        if len(buf) < tarfile.BLOCKSIZE:
            raise tarfile.ReadError("it is cut short: the archive's end is missing")
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if not any(buf):
                raise
            raise tarfile.ReadError(f"a header in it is corrupt: {error}") from error
