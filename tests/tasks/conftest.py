"""Python processes that use tests/support/servers/hub.py as the Hub."""

import os

import pytest

from tests.support.processes import started


@pytest.fixture
def with_hub(tmp_path):
    """Returns a function that runs Python with the server at a URL as the Hub."""

    def run(url, *arguments, token="", **more):
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("HF_")
        }
        environment.update(HF_ENDPOINT=url, HF_HOME=str(tmp_path / "home"), HF_TOKEN=token)
        environment["NO_PROXY"] = environment["no_proxy"] = "127.0.0.1,localhost"
        environment.update({"PALIMPSEST_RETRY_DELAY": "0.01", **more})
        return started(*arguments, env=environment)

    return run
