import pytest
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.tui.text import flow, legend, module, number, operator, paragraph, plain, words

HOSTILE = ["layers[/0]", "[red]x", "\x1b[31mred", "a\nb", "\u202eevil", "\ud800", "\x9b31m", "[/]", "\\[x"]


@given(st.text(st.characters(codec=None)))
def test_no_character_that_a_terminal_acts_on_comes_through(text):
    shown = plain(text)

    assert all(character.isprintable() or character.isspace() for character in shown)
    assert not set(shown) & {"\x1b", "\n", "\r", "\x9b", "\u202e"}
    shown.encode()


@pytest.mark.parametrize("text", ["layers[/0]", "[red]x", "[/]", "blocks.3.mlp", "été"])
def test_brackets_and_accents_are_shown_as_they_stand(text):
    assert words(text).plain == number(text).plain == paragraph((text, "bold")).plain == text
    assert words(text).spans == []


def test_a_legend_flows_without_breaking_an_item():
    items = legend(
        [("optimizer_state", "red", "1 MiB"), ("gradient", "blue", "2 MiB"), ("input", "red", "3 B")]
    )

    rows = flow(items, 40)

    assert [row.plain for row in rows] == ["■ optimizer state 1 MiB", "■ gradient 2 MiB  ■ input 3 B"]


def test_an_item_wider_than_the_row_has_a_row_of_its_own():
    assert [row.plain for row in flow([words("long" * 9), words("b")], 10)] == ["long" * 9, "b"]


def test_a_long_operator_is_told_by_its_end():
    assert operator("aten::mm").plain == "mm"
    assert (
        operator("aten::_scaled_dot_product_flash_attention_for_cpu").plain
        == "...uct_flash_attention_for_cpu"
    )


def test_a_long_module_is_shown_by_its_end_so_that_the_columns_behind_it_are_on_the_screen():
    """Its beginning is that of all modules around it; cut at its end, rows looked alike and figures were out of sight."""
    name = "hierarchical_representation_backbone_with_residual_connections.3.first_projection"

    narrow, wide = module(name, 80, 64).plain, module(name, 160, 64).plain
    assert narrow.endswith(".3.first_projection")
    assert narrow.startswith("...") and len(narrow) == 26
    assert wide.endswith(narrow[3:]) and len(wide) == 60
    assert module("blocks.0.attn", 80, 64).plain == "blocks.0.attn"
    assert module("", 80, 64).plain == "(model)"
    in_tree = module(name, 80, 64, before="  ▾ ").plain
    assert in_tree.startswith("  ▾ ...") and in_tree.endswith(narrow[-10:]) and len(in_tree) == 26
