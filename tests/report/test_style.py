"""The colors stay apart for everybody, on both backgrounds."""

import re
from itertools import combinations

import numpy as np
import pytest

from memadvisor.report.style import CATEGORY_COLORS, PHASE_COLORS, stylesheet
from memadvisor.report.words import PHASE_NAMES, STACK, color_of

# What a dichromat sees, in linear RGB (Machado, Oliveira, Fernandes 2009, severity 1).
VISIONS = {
    "ordinary": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def _linear(color):
    parts = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def _oklab(linear):
    """Perceptual coordinates (Ottosson 2020); 0.02 apart is about as little as one can tell."""
    cones = np.cbrt(
        np.array(
            [
                [0.4122214708, 0.5363325363, 0.0514459929],
                [0.2119034982, 0.6806995451, 0.1073969566],
                [0.0883024619, 0.2817188376, 0.6299787005],
            ]
        )
        @ np.clip(linear, 0, 1)
    )
    return (
        np.array(
            [
                [0.2104542553, 0.7936177850, -0.0040720468],
                [1.9779984951, -2.4285922050, 0.4505937099],
                [0.0259040371, 0.7827717662, -0.8086757660],
            ]
        )
        @ cones
    )


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("palette", [CATEGORY_COLORS, PHASE_COLORS], ids=["categories", "phases"])
def test_any_two_colors_of_a_figure_differ_for_every_eye(palette, vision, theme):
    seen = {name: _oklab(VISIONS[vision] @ _linear(pair[theme])) for name, pair in palette.items()}

    closest = min(combinations(seen, 2), key=lambda pair: np.linalg.norm(seen[pair[0]] - seen[pair[1]]))

    assert np.linalg.norm(seen[closest[0]] - seen[closest[1]]) > 0.08, closest


def test_every_category_and_phase_has_a_color_in_both_themes():
    css = stylesheet()

    for name in (*STACK, *PHASE_NAMES):
        assert css.count(color_of(name).removeprefix("var(").removesuffix(")") + ":#") == 2


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_on_any_filled_color_can_be_read(theme):
    """A contrast of 4.5 or more (WCAG 2.1, AA)."""
    css = stylesheet()
    start, end = (
        (css.find(":root{"), css.find("@media screen"))[theme],
        (css.find("@media screen"), css.find("*{box-sizing"))[theme],
    )
    values = dict(re.findall(r"--([a-z-]+):(#[0-9a-f]{6})", css[start:end]))
    weights = np.array([0.2126, 0.7152, 0.0722])

    for name in (*CATEGORY_COLORS, *PHASE_COLORS):
        below, above = sorted(weights @ _linear(values[key]) for key in (name, f"on-{name}"))
        assert (above + 0.05) / (below + 0.05) >= 4.5, name


def test_a_narrow_window_keeps_the_contents_and_paper_has_none():
    css = stylesheet()
    narrow = css.partition("@media (max-width:1000px)")[2].partition("\n")[0]
    paper = css.partition("@media print")[2]

    assert "nav{position:static}" in narrow and "display:none" not in narrow
    assert "nav,header label" in paper and "display:none" in paper
