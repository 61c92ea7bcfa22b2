"""The labels of charts' axes, by Node.js where there is one."""

import json
import shutil
import subprocess

import pytest

from tests.support.processes import ROOT

NODE = shutil.which("node")
SCRIPT = (ROOT / "tasks/annexes/pages/charts.js").read_text()
FUNCTIONS = SCRIPT[SCRIPT.index("  function number(") : SCRIPT.index("  const ink")]


@pytest.mark.skipif(NODE is None, reason="needs Node.js")
@pytest.mark.parametrize(
    ("ticks", "shown", "labels"),
    [
        ([3.2, 3.21, None, 3.22], "number", ["3.2", "3.21", "", "3.22"]),
        ([3.21442, 3.21444, 3.21446], "number", ["3.21442", "3.21444", "3.21446"]),
        ([10_000, 20_000], "number", ["10K", "20K"]),
        ([1_000_100, 1_000_200], "number", ["1.0001M", "1.0002M"]),
        ([1e-4, 2e-4], "number", ["1.00e-4", "2.00e-4"]),
        ([0.50001, 0.50002], "percent", ["50.001\u2009%", "50.002\u2009%"]),
    ],
)
def test_labels_of_an_axis_differ(ticks, shown, labels):
    program = f"{FUNCTIONS}\nconsole.log(JSON.stringify(labels({json.dumps(ticks)}, {shown})))"
    done = subprocess.run([NODE, "-e", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == labels
