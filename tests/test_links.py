"""Relative links of README.md, CONTRIBUTING.md and docs/ lead to a file, and to a heading of it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page):
    """As GitHub makes them: a heading's words in small letters, joined by hyphens; a second one of a name is numbered."""
    found = []
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for heading in re.findall(r"^#+ +(.+?) *$", text, flags=re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.append(name if name not in found else f"{name}-{found.count(name)}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    lost = []
    for link in _LINK.findall(text):
        name, _, anchor = link.partition("#")
        target = (page.parent / name) if name else page
        if re.match(r"[a-z]+:", link):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(link)

    assert lost == []
