"""Charts: their data are JSON that cannot leave its element, thinned and without NaN."""

import json
import math

from tasks.annexes.pages import chart
from tasks.annexes.pages.chart import Chart, Series

AXES = {"steps": "updates", "hours": "hours of training"}
EVIL = "</script><script>alert(1)</script>\x00\u202e"


def data(*charts):
    text = chart.data(charts, AXES)
    assert "<" not in text
    return json.loads(text)


def test_text_cannot_end_the_element():
    made = data(Chart("a", "t", [Series(EVIL, {"steps": [1]}, [2.0])], labels=[EVIL]))
    assert made["charts"][0]["series"][0]["label"] == EVIL.replace("\x00", "\u2400")
    assert made["charts"][0]["labels"] == [EVIL.replace("\x00", "\u2400")]
    shown = chart.figure(Chart("a", EVIL, [], unit=EVIL))
    assert "<script>" not in shown
    assert "&lt;/script&gt;" in shown


def test_values_that_are_not_finite_are_gaps():
    y = [1, 2.5, math.nan, math.inf, None, 1 / 3]
    made = data(Chart("a", "t", [Series("s", {"steps": range(6)}, y)]))
    assert made["charts"][0]["series"][0]["y"] == [1, 2.5, None, None, None, 0.333333]


def test_series_share_their_columns():
    x = {"steps": [1, 2], "hours": [0.1, 0.2]}
    other = {"steps": [1, 3], "hours": [0.1, 0.3]}
    both = [Series("s", x, [1, 2]), Series("r", dict(x), [3, 4])]
    made = data(Chart("a", "t", both), Chart("b", "t", [Series("s", other, [1, 2])]))
    assert [each["x"] for each in made["charts"][0]["series"]] == [0, 0]
    assert made["charts"][1]["series"][0]["x"] == 1
    assert made["columns"][0] == {"steps": [1, 2], "hours": [0.1, 0.2]}


def test_long_series_are_thinned_to_their_end():
    count = 3 * chart.MOST_POINTS + 5
    made = data(Chart("a", "t", [Series("s", {"steps": range(count)}, range(count))]))
    y = made["charts"][0]["series"][0]["y"]
    assert y == made["columns"][0]["steps"]
    assert len(y) <= chart.MOST_POINTS
    assert y[-1] == count - 1
    assert chart.thinned([1, 2], 2) == [1, 2]


def test_choices_appear_where_they_have_an_effect():
    plain = Chart("a", "t", [Series("s", {"steps": [1]}, [1])])
    rich = Chart("b", "t", [Series("s", {"steps": [1]}, [1], smooth=True)], logarithmic=True)
    one = chart.figures([plain], {"steps": "updates"})
    assert "<form" not in one
    every = chart.figures([plain, rich], AXES)
    assert "value='hours'" in every
    assert "id=smoothing" in every
    assert "id=logarithmic" in every
