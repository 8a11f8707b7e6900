"""What a page is made of, and that it fetches nothing."""

from html.parser import HTMLParser

from stretto.extras import optional

FETCHING_TAGS = {"link", "iframe", "object", "embed", "img", "image", "base", "a", "use"}
FETCHING_ATTRIBUTES = {"src", "href", "srcset", "xlink:href", "action", "data", "poster"}


class Elements(HTMLParser):
    """Collects tags, attributes, and the text outside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] not in (["script"], ["style"]):
            self.text += data


def assert_self_contained(text: str) -> None:
    found = Elements(text)
    assert not FETCHING_TAGS & set(found.tags)
    assert not FETCHING_ATTRIBUTES & {name for name, _ in found.attributes}
    outside = text.replace(optional("plotly.offline").get_plotlyjs(), "")
    assert "http" not in outside.replace("http-equiv", "")
    assert "url(" not in outside
    assert "@import" not in outside
    assert "default-src 'none'" in outside
