"""The report on runs in Chromium, on a desktop and on a phone: see `make test-browser`."""

import pytest

from tests.support.browser import opened
from tests.trainer.annexes.reports.test_report import EVIL, made, training, validation
from trainer.annexes.reports.page import page
from trainer.reporting import history

pytestmark = pytest.mark.browser

SIZES = [(390, False), (390, True), (1280, False), (1280, True)]
LONG = "word" * 5000


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A report on two runs, of which names, settings and metrics are hostile."""
    folder = tmp_path_factory.mktemp("runs")
    metric = f"</script>{EVIL}"
    rows = [*training(range(5, 105, 5)), *(validation(n, 4.0 + 1 / n) for n in range(20, 101, 20))]
    one = made(folder / "one", [*rows, (10, "validation", {metric: 1.0})])
    two = made(
        folder / "two",
        [*training(range(10, 105, 10), rate=4.0), (15, "train", {"loss": float("nan")})],
        f"--metrics.wandb={EVIL}\x1b\u202e{LONG}",
        "--seed=1",
        record={"rates": [[0, [["\u202eabc", 0.5], [EVIL, 0.5]]]]},
    )
    found = folder / "report.html"
    runs = [history.load(one, f"</script>{EVIL}"), history.load(two, "\u202etwo \u202bעברית")]
    found.write_text(page(runs), encoding="utf-8")
    return found


@pytest.mark.parametrize(("width", "dark"), SIZES)
def test_the_page_asks_for_nothing_and_fits(browser, file, width, dark):
    with opened(browser, file, width, dark=dark) as found:
        assert found.errors == []
        assert found.requests == []
        assert found.overflow == 0
        drawn = found.page.locator(".chart canvas").count()
        assert drawn == found.page.locator(".chart").count() > 8
        # No chart is wider than its place.
        widest = "Math.max(...[...document.querySelectorAll('canvas')].map(e => e.clientWidth))"
        assert found.page.evaluate(widest) <= width
        paper = found.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(255, 255, 255)") != dark


def test_hostile_text_stays_text(browser, file):
    with opened(browser, file, 1280) as found:
        assert found.page.evaluate("typeof hacked") == "undefined"
        assert EVIL in found.page.inner_text("body")
        assert found.page.locator("img, iframe, object, script[src]").count() == 0
        # A script that got into the page would not run.
        found.page.evaluate(
            "document.body.append(Object.assign(document.createElement('script'),"
            " {textContent: 'window.hacked = 1'}))"
        )
        assert found.page.evaluate("typeof hacked") == "undefined"


def test_choices_redraw_the_charts(browser, file):
    with opened(browser, file, 1280) as found:
        title = found.page.locator("#chart-loss .u-legend .u-label").first
        assert title.inner_text() == "updates"
        found.page.check("input[value=hours]")
        assert title.inner_text() == "hours of training"
        before = found.page.locator("#chart-loss canvas").screenshot()
        found.page.locator("#smoothing").fill("0.9")
        after = found.page.locator("#chart-loss canvas").screenshot()
        assert before != after
        found.page.check("#logarithmic")
        assert found.page.locator("#chart-loss canvas").screenshot() != after
        found.page.emulate_media(color_scheme="dark")
        found.page.set_viewport_size({"width": 500, "height": 800})
        found.page.wait_for_timeout(200)
        assert found.overflow == 0
        assert found.errors == []


def test_values_are_shown_at_the_pointer(browser, file):
    with opened(browser, file, 1280) as found:
        place = found.page.locator("#chart-loss .u-over")
        value = found.page.locator("#chart-loss .u-legend .u-value").nth(1)
        last = value.inner_text()
        place.scroll_into_view_if_needed()
        box = place.bounding_box()
        found.page.mouse.move(box["x"] + 5, box["y"] + 50)
        assert value.inner_text() not in (last, "–")
        # The same place in the other charts.
        assert found.page.locator("#chart-learning-rate .u-cursor-x").is_visible()
        found.page.mouse.move(5, 5)
        found.page.wait_for_timeout(100)
        assert value.inner_text() == last
