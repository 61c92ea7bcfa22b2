"""A fixture for searches in this process."""

from collections import Counter

import pytest

from pipeline.runners import beam_job


@pytest.fixture
def without_beam(monkeypatch):
    """Runs the stages in this process, where the runner is not what is tested."""

    def run(function, elements, *_, **__):
        return sum((function(each) for each in elements), Counter())

    monkeypatch.setattr(beam_job, "run", run)
