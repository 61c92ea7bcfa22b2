"""Output folders of vocabularies: one writer at a time, even after one was killed."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tasks.cache.manifest import MANIFEST
from tasks.storage import files, lock
from tasks.terminal.command_line import UserError
from tasks.vocabulary import VOCABULARY_FILES


@contextlib.contextmanager
def held(output: str) -> Iterator[lock.Lock]:
    """Makes and locks the folder `output`; deletes a new folder if nothing was written to it."""
    found = files.exists(output)
    try:
        with contextlib.ExitStack() as stack:
            try:
                files.make_folder(output)
                taken = stack.enter_context(lock.held(output, "command", "--output"))
            except OSError as error:
                raise UserError(f"--output={output} cannot be written: {error.strerror}") from error
            yield taken
    finally:
        if not found and not files.is_remote(output):
            with contextlib.suppress(OSError):
                os.rmdir(files.local_path(output))


def finished(
    output: str, options: Mapping[str, Any], corpus: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Returns a finished vocabulary's manifest or None; raises UserError if its settings differ."""
    path = files.join(output, MANIFEST)
    if not files.exists(path):
        return None
    manifest = files.read_json(path)
    ours = json.loads(json.dumps({**options, **corpus}))
    try:
        theirs = {**manifest["options"], **manifest["corpus"]}
        sha256 = manifest["model"]["sha256"]
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{path} is not the manifest of a vocabulary: choose another --output"
        ) from error
    differing = [key for key in {**theirs, **ours} if ours.get(key) != theirs.get(key)]
    if differing:
        key = differing[0]
        values = f"was {theirs.get(key)}, now {ours.get(key)}"
        raise UserError(
            f"{output} holds a vocabulary made with other settings: {', '.join(differing)}"
            f"{f' ({values})' if len(values) < 100 else ''}: choose another --output"
        )
    models = [files.join(output, name) for name in VOCABULARY_FILES]
    if sha256 not in [files.sha256(model) for model in models if files.exists(model)]:
        raise UserError(
            f"the model in {output} does not match the {MANIFEST} beside it: choose another "
            "--output, or delete the folder and run again"
        )
    return manifest


@contextlib.contextmanager
def claimed(output: str, names: Sequence[str]) -> Iterator[lock.Lock]:
    """Locks a folder as `held` does; it must be empty or left over from a killed command.

    The command writes the files `names`; the first is written first and so marks its folder.
    """
    with held(output) as taken:
        found = {name for name in files.list_names(output) if not name.startswith(files.PARTIAL)}
        found.discard(lock.LOCK)
        if found and (names[0] not in found or not found <= {*names}):
            raise UserError(f"--output={output} holds other files: choose another folder")
        files.remove_partial(output)
        yield taken
