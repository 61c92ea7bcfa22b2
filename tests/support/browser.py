"""A headless Chromium that opens pages as a reader would, for tests and for pictures of the docs.

    python -m tests.support.browser PAGE.html PICTURE.png [--width=1280] [--height=900] [--dark]
        [--scroll_to=CSS]

Needs the package playwright, and Chromium: that of `playwright install chromium`, one on PATH, or
the one that the environment variable CHROMIUM names.
"""

import argparse
import contextlib
import dataclasses
import os
import pathlib
import shutil

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def executable():
    """Returns the path of a Chromium on this machine; None: playwright's own, if it has one."""
    named = os.environ.get("CHROMIUM")
    return named or next(filter(None, map(shutil.which, _NAMES)), None)


@dataclasses.dataclass
class Opened:
    """A page that is open.

    Attributes:
      page: playwright's page.
      errors: errors on the console and uncaught exceptions.
      requests: URLs that were asked for, without the page's own.
    """

    page: object
    errors: list
    requests: list

    @property
    def overflow(self):
        return self.page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )


@contextlib.contextmanager
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=executable(), args=["--no-sandbox"])
        try:
            yield found
        finally:
            found.close()


@contextlib.contextmanager
def opened(browser, path, width, height=900, dark=False):
    """Yields the page in a file, `Opened`, in a window of the given size in pixels."""
    page = browser.new_page(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        has_touch=width < 600,
    )
    found = Opened(page, [], [])
    address = pathlib.Path(path).resolve().as_uri()
    page.on("console", lambda said: said.type == "error" and found.errors.append(said.text))
    page.on("pageerror", lambda error: found.errors.append(str(error)))
    page.on(
        "request",
        lambda request: (
            request.url.split("#")[0] == address
            or request.url.startswith("data:")
            or found.requests.append(request.url)
        ),
    )
    page.goto(address, wait_until="load")
    page.wait_for_timeout(300)  # charts are drawn when their place has a size
    try:
        yield found
    finally:
        page.close()


def main():
    """Takes a picture of a page, and fails if the page has an error or asks for anything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("picture")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=900)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--scroll_to", help="CSS selector of what to begin with")
    parser.add_argument("--full", action="store_true", help="the whole page")
    flags = parser.parse_args()
    size = flags.width, flags.height
    with chromium() as browser, opened(browser, flags.file, *size, dark=flags.dark) as found:
        if flags.scroll_to:
            found.page.locator(flags.scroll_to).first.evaluate("one => one.scrollIntoView()")
        found.page.screenshot(path=flags.picture, full_page=flags.full)
        problems = [*found.errors, *found.requests]
        problems += [f"{found.overflow} px too wide"] * (found.overflow > 0)
    if problems:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
