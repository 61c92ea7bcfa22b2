"""Uploads exported folders to the Hugging Face Hub, each as branch `step_N`, the last as `main`."""

import contextlib
import logging
from collections.abc import Iterator

from tasks.terminal.command_line import UserError

_AGAIN = "run the same command again to continue; uploaded files are kept"
_DENIED = {401: "the token is not valid", 403: "the token has no permission to write there"}


def check(repository: str) -> None:
    """Raises UserError for an invalid repository name or a missing token."""
    import huggingface_hub
    from huggingface_hub.utils import validate_repo_id

    flag = f"--push_to={repository}"
    valid = False
    with contextlib.suppress(huggingface_hub.errors.HFValidationError):
        validate_repo_id(repository)
        valid = all(repository.partition("/"))
    if not valid:
        raise UserError(f"{flag} is not a repository name: use OWNER/NAME")
    if huggingface_hub.get_token() is None:
        raise UserError(f"{flag} needs a write token: set HF_TOKEN, or run hf auth login")


def push(
    folder: str, repository: str, step: int, message: str, facts: str, main: bool = True
) -> str:
    """Uploads a folder to the branch `step_N` and, if `main`, to `main`; returns the branch's URL.

    Creates the repository OWNER/NAME and the branch if necessary. `message` is the first line of
    the commit message, `facts` the rest.
    """
    from huggingface_hub import HfApi

    # Hide warnings about retries; the final error is sufficient.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    api, branch = HfApi(), f"step_{step}"
    with _in_one_line(repository):
        url = api.create_repo(repository, exist_ok=True)
        api.create_branch(repository, branch=branch, exist_ok=True)
        for revision in (branch, "main") if main else (branch,):
            api.upload_folder(
                repo_id=repository,
                folder_path=folder,
                revision=revision,
                commit_message=message,
                commit_description=facts,
                delete_patterns="*",  # weights of an earlier upload may have other names
            )
    return f"{url}/tree/{branch}"


@contextlib.contextmanager
def _in_one_line(repository: str) -> Iterator[None]:
    import httpx
    from huggingface_hub.errors import HfHubHTTPError

    flag = f"--push_to={repository}"
    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        if status in _DENIED:
            raise UserError(f"{flag}: {_DENIED[status]} ({status})") from error
        said = " ".join(str(error).split())[:200]
        raise UserError(f"{flag}: the Hub refused the upload ({said}); {_AGAIN}") from error
    except (httpx.HTTPError, OSError, RuntimeError) as error:
        said = " ".join(str(error.__cause__ or error).split())[:200] or type(error).__name__
        raise UserError(f"{flag}: the connection to the Hub was lost ({said}); {_AGAIN}") from error
    except ValueError as error:
        said = " ".join(str(error).split())[:200]
        raise UserError(f"{flag}: the Hub refused the upload ({said})") from error
