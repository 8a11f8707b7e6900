"""The page: everything escaped, nothing fetched, the plotting library inside once."""

import pytest
from html_pages import Elements
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.extras import optional
from stretto.report import Html, bullets, columns, duration, escape, facts, figure, grid, page, paragraph, plot
from stretto.report.page import headline

HOSTILE = "<script>alert(1)</script> \"double\" 'single' & <img src=x onerror=alert(2)>"


def _page(words: str, *, scripted: bool = False) -> str:
    body = Html(
        paragraph(words)
        + bullets([words])
        + facts([(words, words)])
        + columns([words], [[words]])
        + grid([figure(paragraph(words), title=words, caption=words)])
    )
    return page(
        title=words,
        subtitle=words,
        top=[headline([(words, words, words)])],
        sections=[(words, body)],
        footer=words,
        scripted=scripted,
    )


def test_hostile_words_are_shown_everywhere_and_obeyed_nowhere() -> None:
    found = Elements(_page(HOSTILE))
    assert "script" not in found.tags
    assert "img" not in found.tags
    assert "onerror" not in dict(found.attributes)
    assert found.text.count("<script>alert(1)</script>") == 17


@settings(deadline=None, max_examples=60)
@given(words=st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=30))
def test_any_words_leave_the_same_elements(words: str) -> None:
    assert Elements(_page(words)).tags == Elements(_page("plain")).tags


@settings(deadline=None, max_examples=60)
@given(words=st.text(max_size=30))
def test_escaped_text_holds_no_markup_and_can_be_written(words: str) -> None:
    text = escape(words)
    assert not set(text) & set("<>\"'")
    text.encode("utf-8")


def test_a_lone_surrogate_is_shown_as_its_escape() -> None:
    assert escape("a\ud800b") == "a\\ud800b"


def test_the_plotting_library_is_inside_exactly_once() -> None:
    source = optional("plotly.offline").get_plotlyjs()
    assert _page("plain", scripted=True).count(source) == 1
    assert source not in _page("plain", scripted=False)


def test_text_in_a_plot_cannot_close_its_script() -> None:
    closing = "</script><script>alert(1)</script><!--"
    trace = optional("plotly.graph_objects").Scatter(x=[1], y=[2], name=closing, text=[closing])
    div = plot([trace], name="one", x={"title": closing}, y={"title": "y"})
    assert div.count("</script") == 1
    assert div.count("<script") == 1
    assert "<!--" not in div


def test_a_plot_is_the_same_each_time_and_named() -> None:
    trace = optional("plotly.graph_objects").Scatter(x=[1], y=[2])
    divs = {plot([trace], name="one", x={"title": "x"}, y={"title": "y"}) for _ in range(2)}
    assert len(divs) == 1
    assert 'id="plot-one"' in divs.pop()


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.04, "0.0 s"), (119.94, "119.9 s"), (120.0, "2 min 0 s"), (754.6, "12 min 35 s"), (11_111.0, "3 h 5 min")],
)
def test_durations_are_said_as_people_say_them(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_control_characters_are_shown_as_their_escapes() -> None:
    assert escape("\x1b[31mred\x07\x9b\ttab\nline") == "\\x1b[31mred\\x07\\x9b\ttab\nline"
