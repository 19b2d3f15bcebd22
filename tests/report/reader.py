"""What the page tests share: a strict reader of pages, and what has to be escaped."""

from __future__ import annotations

from html.parser import HTMLParser

EVIL = "<script>alert('x')</script>&\"</title></style>"
VOID = frozenset({"meta", "link", "br"})
LOADING = frozenset(
    {"script", "img", "iframe", "object", "embed", "base", "form", "audio", "video"}
)


class Reader(HTMLParser):
    """Collects text, tags and ids; fails on what loads or runs, and on tags left open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in LOADING, tag
        for name, value in attrs:
            assert not name.startswith("on") and name != "src", (tag, name)
            if name == "href":
                assert value is not None and value.startswith(("#", "data:")), value
                self.targets += [value] if value.startswith("#") else []
            if name == "id":
                self.ids.append(value or "")
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text.append(data)


def read(page: str) -> Reader:
    """The page's parts; fails unless it is whole and loads nothing."""
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    assert len(reader.ids) == len(set(reader.ids))
    assert {target[1:] for target in reader.targets} <= set(reader.ids)
    rest = page.replace("http-equiv", "")
    assert not [word for word in ("http", "@import", "url(", "javascript:") if word in rest]
    return reader


def words(page: str) -> str:
    """All text of the page, spaces made single."""
    return " ".join(" ".join(read(page).text).split())
