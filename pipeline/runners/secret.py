"""The Hugging Face token for workers, which read it from Google's Secret Manager by its name."""

import base64
import os
import re

from tasks.terminal import extras
from tasks.terminal.command_line import UserError

_NAME = re.compile(r"projects/[^/]+/secrets/[^/]+(/versions/[^/]+)?")
_TIMEOUT_SECONDS = 60


def provide_hf_token(secret: str) -> None:
    """Sets HF_TOKEN to the value of `secret`, unless HF_TOKEN is set or `secret` is "".

    gcloud's variable CLOUDSDK_API_ENDPOINT_OVERRIDES_SECRETMANAGER overrides the service's address.
    """
    if not secret or os.environ.get("HF_TOKEN"):
        return
    if not _NAME.fullmatch(secret):
        raise UserError(f"--hf_token_secret={secret} is not projects/PROJECT/secrets/NAME")
    version = secret if "/versions/" in secret else f"{secret}/versions/latest"
    with extras.needed("--hf_token_secret", "gcp"):
        import google.auth
        from google.auth.exceptions import GoogleAuthError
        from google.auth.transport.requests import AuthorizedSession
    address = os.environ.get(
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_SECRETMANAGER", "https://secretmanager.googleapis.com/"
    )
    try:
        credentials, _ = google.auth.default(["https://www.googleapis.com/auth/cloud-platform"])
        url = f"{address.rstrip('/')}/v1/{version}:access"
        answer = AuthorizedSession(credentials).get(url, timeout=_TIMEOUT_SECONDS)
    except (GoogleAuthError, OSError) as error:
        raise UserError(f"the secret {secret} cannot be read: {type(error).__name__}") from error
    if answer.status_code != 200:
        raise UserError(
            f"the secret {secret} cannot be read (HTTP {answer.status_code}): it must exist, and "
            "the account of every machine that reads it needs roles/secretmanager.secretAccessor"
        )
    value = base64.b64decode(answer.json()["payload"]["data"]).decode().strip()
    os.environ["HF_TOKEN"] = value
