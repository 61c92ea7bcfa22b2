"""Data sets of the Hugging Face Hub, as files to stream.

Only the driver resolves a data set; workers read `hf://datasets/REPOSITORY@COMMIT/PATH` with the
token that huggingface_hub finds on their own machine (HF_TOKEN, or its store).
"""

import dataclasses
from typing import Any

from tasks.command_line import UserError
from tasks.sources import VALIDATION, CorpusSpec, SourceFile

_TIMEOUT_SECONDS = 15
_PATHS_PER_REQUEST = 100
_FORMATS = ("parquet", "json", "text")


def list_files(spec: CorpusSpec) -> tuple[CorpusSpec, str, list[SourceFile]]:
    """Returns the spec with its revision pinned to a commit, the files' format, and the files.

    Raises:
      UserError: the Hub is out of reach, the data set cannot be accessed (a private one without a
        token), it has no such revision or configuration, or its files are of another format.
    """
    from huggingface_hub import HfApi

    name = spec.location
    api = HfApi()
    try:
        revision = spec.revision or None
        commit = api.dataset_info(name, revision=revision, timeout=_TIMEOUT_SECONDS).sha or ""
        builder = _builder(name, spec.config, commit)
        form = builder.name
        splits = {
            str(split): [url.partition(f"@{commit}/")[2] for url in urls]
            for split, urls in (builder.config.data_files or {}).items()
        }
        paths = [path for urls in splits.values() for path in urls]
        states = {
            info.path: info
            for start in range(0, len(paths), _PATHS_PER_REQUEST)
            for info in api.get_paths_info(
                name,
                paths[start : start + _PATHS_PER_REQUEST],
                revision=commit,
                repo_type="dataset",
            )
        }
    except UserError:
        raise
    except Exception as error:  # the Hub's client and its HTTP library have dozens of kinds
        raise _explain(spec, error) from error
    if form not in _FORMATS or not all(splits.values()):
        raise UserError(
            f"{spec} holds {form} files; only parquet, JSON lines and text are read. The Hub may "
            f"have a parquet copy: try --corpus=hf:{name}@refs/convert/parquet"
        )
    pinned = dataclasses.replace(spec, revision=commit)
    return pinned, form, [
        _source_file(name, commit, split, states[path])
        for split in sorted(splits)
        for path in sorted(splits[split])
    ]  # fmt: skip


def _builder(name: str, config: str, commit: str) -> Any:
    import datasets

    datasets.disable_progress_bars()
    return datasets.load_dataset_builder(name, config or None, revision=commit)


def _source_file(name: str, commit: str, split: str, info: Any) -> SourceFile:
    state = {"sha256": info.lfs.sha256} if info.lfs else {"etag": info.blob_id}
    own = VALIDATION if split in ("validation", "valid", "val", "dev") else split
    url = f"hf://datasets/{name}@{commit}/{info.path}"
    return SourceFile(url, info.path, own, info.size, state)


def _explain(spec: CorpusSpec, error: Exception) -> UserError:
    from huggingface_hub import errors

    chain: list[BaseException] = [error]
    while following := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(following)
    kinds = {kind.__name__ for link in chain for kind in type(link).__mro__}
    name = f"hf:{spec.location}"
    instead = "or read files that you have: --corpus=parquet:FILES"
    if any(isinstance(link, errors.GatedRepoError) for link in chain):
        return UserError(
            f"{name} is gated: ask for access on its page, then set HF_TOKEN (or `hf auth login`), "
            + instead
        )
    if any(isinstance(link, errors.RevisionNotFoundError) for link in chain):
        return UserError(f"{name} has no revision {spec.revision}")
    if any(isinstance(link, errors.RepositoryNotFoundError) for link in chain) or (
        "DatasetNotFoundError" in kinds
    ):
        return UserError(
            f"{name} does not exist or cannot be accessed: if it is private, set HF_TOKEN "
            f"(or `hf auth login`), {instead}"
        )
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    if kinds & {"ConnectError", "ConnectionError", "TimeoutException", "OfflineModeIsEnabled"}:
        return UserError(f"the Hugging Face Hub cannot be reached for {name} ({reason}), {instead}")
    return UserError(f"{name} cannot be read: {reason}")
