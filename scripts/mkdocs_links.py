"""Replaces links from the documents to files outside of docs/, which the site does not have.

The links lead to the repository if REPO_URL is set; if not, they become plain text.
"""

import os
import re

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?P<path>[^)]+)\)")


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Returns the page's text with links to outside of docs/ replaced."""
    folder = os.path.dirname(page.file.src_uri)

    def replaced(match: re.Match) -> str:
        target = match[0].rpartition("](")[2][:-1]
        path = os.path.normpath(os.path.join("docs", folder, target))
        if path.startswith("docs/"):
            return match[0]
        return f"[{match[1]}]({config.repo_url}/blob/main/{path})" if config.repo_url else match[1]

    return _OUTSIDE.sub(replaced, markdown)
