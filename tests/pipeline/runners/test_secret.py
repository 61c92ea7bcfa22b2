"""The Hub's token is read from Secret Manager only if HF_TOKEN is not set."""

import base64
import os

import pytest

from pipeline.runners import secret
from tasks.terminal.command_line import UserError
from tests.support.servers.quiet import QuietHandler, QuietServer

pytestmark = [pytest.mark.google, pytest.mark.processes]


@pytest.fixture
def asked(monkeypatch):
    """Starts a local Secret Manager with one secret; returns the list of requested paths."""
    import google.auth
    from google.auth.credentials import AnonymousCredentials

    paths = []

    class SecretManager(QuietServer):
        class handler(QuietHandler):
            def do_GET(self):
                paths.append(self.path)
                data = base64.b64encode(b"hf_of_the_secret\n").decode()
                found = "secrets/hub/" in self.path
                self.answer(*((200, {"payload": {"data": data}}) if found else (403, {})))

    monkeypatch.setattr(google.auth, "default", lambda scopes: (AnonymousCredentials(), None))
    monkeypatch.setenv("HF_TOKEN", "")
    with SecretManager() as server:
        url = f"{server.url}/"
        monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_SECRETMANAGER", url)
        yield paths


def test_a_secret_is_read_once(asked):
    secret.provide_hf_token("projects/ours/secrets/hub")
    assert os.environ["HF_TOKEN"] == "hf_of_the_secret"
    assert asked == ["/v1/projects/ours/secrets/hub/versions/latest:access"]
    secret.provide_hf_token("projects/ours/secrets/hub")
    assert len(asked) == 1
    os.environ["HF_TOKEN"] = ""
    secret.provide_hf_token("projects/ours/secrets/hub/versions/3")
    assert asked[1:] == ["/v1/projects/ours/secrets/hub/versions/3:access"]


def test_a_secret_without_permission(asked):
    with pytest.raises(UserError, match=r"HTTP 403.*roles/secretmanager.secretAccessor"):
        secret.provide_hf_token("projects/ours/secrets/other")
    assert not os.environ["HF_TOKEN"]


def test_a_token_that_is_set_is_kept(asked, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_of_this_machine")
    secret.provide_hf_token("projects/ours/secrets/hub")
    secret.provide_hf_token("")
    assert os.environ["HF_TOKEN"] == "hf_of_this_machine"
    assert not asked


def test_an_invalid_name(asked, build, tmp_path):
    with pytest.raises(UserError, match="is not projects/PROJECT/secrets/NAME"):
        secret.provide_hf_token("hub")
    with pytest.raises(UserError, match="is for corpora from the Hugging Face Hub"):
        build(tmp_path, "--hf_token_secret=projects/ours/secrets/hub")
