"""Nothing that a user's program calls its modules becomes markup."""

import json
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.report.blocks import table
from memadvisor.report.escape import (
    html_text,
    html_with_code,
    plotly_text,
    prose,
    script_json,
    shortened,
    visible,
)
from tests.report.hostile import HOSTILE_NAMES

ANY_TEXT = st.text(st.characters(codec=None)) | st.sampled_from(HOSTILE_NAMES)  # lone surrogates too


class _Reader(HTMLParser):
    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.tags, self.text, self.attributes = [], "", []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


def _read(html):
    reader = _Reader()
    reader.feed(html)
    reader.close()
    return reader


@given(ANY_TEXT)
def test_text_comes_out_of_html_as_it_went_in(text):
    reader = _read(f"<p>{html_text(text)}</p>")

    assert reader.tags == ["p"]
    assert reader.text == visible(text)


@given(ANY_TEXT)
def test_an_attribute_cannot_be_left(text):
    reader = _read(f'<p title="{html_text(text)}">')

    assert reader.attributes == [("title", visible(text))]


@given(ANY_TEXT)
def test_a_label_of_a_figure_holds_no_tag(text):
    reader = _read(plotly_text(text))

    assert reader.tags == []
    assert reader.text == visible(text)


@given(st.recursive(ANY_TEXT | st.integers() | st.none(), lambda inner: st.lists(inner, max_size=4)))
def test_json_in_a_script_can_neither_end_it_nor_open_a_comment(value):
    text = script_json(value)

    assert not set("<>&\u2028\u2029") & set(text)
    assert text.isascii()
    assert json.loads(text) == value


def test_json_refuses_what_a_browser_would_not_read():
    with pytest.raises(ValueError):
        script_json(float("nan"))


@given(ANY_TEXT)
def test_visible_text_has_no_character_that_acts(text):
    shown = visible(text)

    assert shown.isprintable() or all(char.isprintable() or char.isspace() for char in shown)
    shown.encode("utf-8")


def test_code_stands_between_backticks_and_an_odd_one_stays():
    assert html_with_code("run `a < b` now") == "run <code>a &lt; b</code> now"
    assert html_with_code("run `a") == "run `a"
    assert (
        html_with_code("`run --zero 1` --zero")
        == '<code>run <span class="option">--zero 1</span></code> --zero'
    )


def test_a_long_name_keeps_its_end():
    assert shortened("model.decoder.layers.17.attention", 12) == "…7.attention"
    assert shortened("head") == "head"


def test_a_long_name_of_a_module_is_broken_at_its_dots_first():
    """`up.8.normalizati` stood above `on_before_first_c`."""
    block = table(
        "T", ("module", "bytes"), [("up.8.normalization_before_first", "1 B"), ("a_b.c", "2 B")], kinds=()
    )

    assert "up.<wbr>8.<wbr>normalization_<wbr>before_<wbr>first</td>" in block.text
    assert ">a_b.c</td>" in block.text


@given(ANY_TEXT)
def test_prose_differs_from_text_in_spaces_before_units_alone(text):
    assert prose(text).replace("\u00a0", " ") == html_text(text).replace("\u00a0", " ")


def test_prose_keeps_figures_with_their_units():
    assert prose("697 k parameters, 59.2 % of 31.2 MiB in 1.8 ms, 2 ranks") == (
        "697\u00a0k parameters, 59.2\u00a0% of 31.2\u00a0MiB in 1.8\u00a0ms, 2 ranks"
    )


def test_code_between_sentences_is_copied_as_it_is():
    assert html_with_code("5 MiB: `x --size 5 MiB`") == (
        '5\u00a0MiB: <code>x <span class="option">--size 5</span> MiB</code>'
    )
