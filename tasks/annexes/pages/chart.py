"""Charts on a page, drawn by uPlot (decision 019) from data in the page.

A reader can choose among a series' columns of x values, such as steps or hours.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence

from tasks.annexes.pages.document import plain, text

# Points per series; a screen has fewer pixels.
MOST_POINTS = 2000
_DIGITS = 6
Values = Sequence[float | int | None]


@dataclasses.dataclass(frozen=True)
class Series:
    """A line of a chart.

    `x` has alternative x values by name, ascending and as long as `y`; None and non-finite values
    of `y` are gaps. A `faint` line lies behind the others, as training does behind evaluation; with
    `dots`, each value is a dot; with `smooth`, the reader may smooth the line.
    """

    label: str
    x: Mapping[str, Values]
    y: Values
    colour: int = 0
    faint: bool = False
    dots: bool = False
    smooth: bool = False


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart; `key` is its id in the page, `unit` is shown under the heading.

    `labels` name the x values 0, 1, … and make a bar chart. With `percent`, values are shares; with
    `logarithmic`, the reader may choose that scale.
    """

    key: str
    title: str
    series: Sequence[Series]
    unit: str = ""
    labels: Sequence[str] = ()
    percent: bool = False
    logarithmic: bool = False


def figure(chart: Chart) -> str:
    """Returns a chart's placeholder as HTML."""
    title, unit = text(chart.title), f" <small>{text(chart.unit)}</small>" if chart.unit else ""
    return (
        f"<figure class=chart id=chart-{chart.key}><figcaption>{title}{unit}</figcaption>"
        f"<div class=plot role=img aria-label='{title}'></div></figure>"
    )


def figures(charts: Iterable[Chart], axes: Mapping[str, str]) -> str:
    """Returns charts side by side, under their common controls.

    `axes` maps each column of x values to its unit; the first is drawn initially.
    """
    charts = list(charts)
    choices = "".join(
        f"<label><input type=radio name=axis value='{text(name)}'{' checked' * (not place)}>"
        f"{text(name)}</label>"
        for place, name in enumerate(axes)
    )
    controls = f"<fieldset><legend>against</legend>{choices}</fieldset>" if len(axes) > 1 else ""
    if any(series.smooth for chart in charts for series in chart.series):
        controls += (
            "<label>smoothing <input type=range id=smoothing min=0 max=0.98 step=0.02 value=0>"
            "</label>"
        )
    if any(chart.logarithmic for chart in charts):
        controls += "<label><input type=checkbox id=logarithmic>logarithmic losses</label>"
    form = f"<form class=controls>{controls}</form>" if controls else ""
    return (
        f"{form}<noscript><p class=note>Charts need JavaScript; the tables do not.</p></noscript>"
        f"<div class=charts>{''.join(map(figure, charts))}</div>"
    )


def data(charts: Iterable[Chart], axes: Mapping[str, str]) -> str:
    """Returns the data of all charts on a page as JSON that is safe in a <script> element.

    Series of more than MOST_POINTS values are thinned evenly; the last value stays.
    """
    columns: list[dict[str, list[float | int | None]]] = []
    places: dict[str, int] = {}

    def place_of(x: Mapping[str, Values], count: int) -> int:
        made = {name: [_number(value) for value in thinned(x[name], count)] for name in x}
        key = json.dumps(made)
        if key not in places:
            places[key] = len(columns)
            columns.append(made)
        return places[key]

    made = [
        {
            "key": chart.key,
            "percent": chart.percent,
            "logarithmic": chart.logarithmic,
            "labels": [plain(label) for label in chart.labels],
            "series": [
                {
                    **vars(series),
                    "label": plain(series.label),
                    "x": place_of(series.x, len(series.y)),
                    "y": [_number(value) for value in thinned(series.y, len(series.y))],
                }
                for series in chart.series
            ],
        }
        for chart in charts
    ]
    value = {"axes": dict(axes), "columns": columns, "charts": made}
    # Without "<", nothing in the JSON can end the element or begin a comment.
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def thinned(values: Values, count: int) -> Values:
    """Returns at most MOST_POINTS of `count` values."""
    every = -(-count // MOST_POINTS)
    if every <= 1:
        return values
    return [value for place, value in enumerate(values, 1) if place % every == 0 or place == count]


def _number(value: float | int | None) -> float | int | None:
    if value is None or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.{_DIGITS}g}")
