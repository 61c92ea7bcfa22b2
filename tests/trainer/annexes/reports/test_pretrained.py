"""The report on a run that was really made."""

import re

import pytest

from tests.support.runs import command, done
from tests.trainer.test_pretrain import finished as finished

pytestmark = pytest.mark.processes  # a whole run


def test_the_report_shows_the_curves_and_examples(finished, tmp_path):
    picture = tmp_path / "losses.png"
    flags = [f"--picture={picture}", "--rows=2", "--samples=2"]
    result = done(command("trainer.annexes.reports.report", finished, *flags))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "validation loss" in result.stdout
    assert "blocked training for" in result.stdout
    page = (finished / "report.html").read_text()
    for heading in ("Highest loss, 2", "Lowest loss, 1", "The model", "The text"):
        assert heading in page
    # The documents behind the rows, by the corpus's ids.
    assert re.search(r"<td>\d+\.\d{4}</td><td>python_docs_span_corruption</td>", page)
    assert "train.txt" in page or "validation.txt" in page
    losses = [float(value) for value in re.findall(r"<dt>loss</dt><dd>([\d.]+)</dd>", page)]
    assert len(losses) == 4
    assert losses[0] >= losses[1] > losses[3] >= losses[2]
