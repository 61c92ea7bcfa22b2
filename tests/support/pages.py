"""HTML pages, parsed as tests look at them."""

import html.parser


class Page(html.parser.HTMLParser):
    """A page whose every tag must be closed, in order.

    Attributes:
      tags: (tag, attributes) in their order.
      text: all text but styles and scripts.
      tables: caption -> rows of texts, the heads first.
    """

    _VOID = {"meta", "link", "input", "wbr", "br", "img"}

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.open, self.text, self.tables = [], [], "", {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self._VOID:
            self.open.append(tag)
        if tag == "tr":
            self._row = []
        if tag in ("td", "th", "caption"):
            self._cell = ""

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "caption":
            self._rows = self.tables[self._cell] = []
        if tag in ("td", "th"):
            self._row.append(self._cell)
        if tag == "tr":
            self._rows.append(self._row)

    def handle_data(self, data):
        if not {"style", "script"} & {*self.open}:
            self.text += data
        if self.open and self.open[-1] in ("td", "th", "caption"):
            self._cell += data
