"""What every page is: one HTML file with everything in it, which needs no network and asks for none.

Plotly is nearly all of it, and stands in it compressed: the page's own script unpacks it (script.py), which makes a page
of 2 MB in place of 5. The policy names the hash of what is unpacked, so that nothing else runs.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Mapping
from pathlib import Path

from memadvisor.report.blocks import Block, Figure, Html, Missing, Section, kinds_html, legend_html
from memadvisor.report.escape import html_text, html_with_code, prose, script_json
from memadvisor.report.script import SCRIPT
from memadvisor.report.style import stylesheet
from memadvisor.run.files import write_output


def write_page(text: str, path: Path) -> None:
    """Write the page whole or not at all, readable by its owner alone. Raises UsageError."""
    write_output(path, text, hint="name a writable file with -o.")


def document(title: str, body: str, figures: Mapping[str, object]) -> str:
    """The page around a finished body, whose figures' places the script fills."""
    from plotly.offline import (
        get_plotlyjs,
    )  # nothing but this file needs Plotly, and nothing else pays for it

    # A carriage return would be a newline to the browser, and the script's hash would not fit.
    plotly = get_plotlyjs().replace("\r\n", "\n").replace("\r", "\n")
    packed = base64.b64encode(gzip.compress(plotly.encode(), compresslevel=6, mtime=0)).decode()
    hashes = " ".join(f"'sha256-{_sha256(text)}'" for text in (plotly, SCRIPT))
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>memadvisor: {html_text(title)}</title>\n"
        f"<style>{stylesheet()}</style>\n</head>\n<body>\n"
        '<p class="alert" id="undrawn" hidden>The figures could not be unpacked: that takes a browser of 2023 or later. '
        "Tables and texts are complete without them.</p>\n"
        f"{body}"
        f'<script type="application/json" id="figures">{script_json(figures)}</script>\n'
        f'<script type="application/gzip" id="plotly">{packed}</script>\n'
        f"<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def section_html(section: Section, first_rank: str, figures: dict[str, object]) -> str:
    blocks = [_block_html(block, "", figures) for block in section.shared]
    for rank, own in section.by_rank.items():
        inside = "".join(_block_html(block, f"-rank{rank}", figures) for block in own)
        # What is hidden until the reader chooses it is not drawn either: figures need a width.
        hidden = "" if str(rank) == first_rank else " hidden"
        blocks.append(f'<div data-rank="{rank}"{hidden}>{inside}</div>')
    title = f"<h2>{html_text(section.title)}</h2>" if section.title else ""
    lead = f'<p class="lead">{html_text(section.lead)}</p>' if section.lead else ""
    return f'<section id="{section.name}">{title}{lead}{"".join(blocks)}</section>\n'


def _block_html(block: Block, suffix: str, figures: dict[str, object]) -> str:
    if isinstance(block, Html):
        return block.text
    title = f"<h3>{html_text(block.title)}</h3>"
    if isinstance(block, Missing):
        return (
            f'<figure class="missing" data-missing="{block.name}"><figcaption>{title}</figcaption>'
            f"<p><b>{block.absence}</b> {html_with_code(block.why)}</p></figure>"
        )
    return _figure_html(block, title, f"{block.name}{suffix}", figures)


def _figure_html(figure: Figure, title: str, identity: str, figures: dict[str, object]) -> str:
    figures[identity] = {"traces": figure.traces, "layout": figure.layout, "height": figure.height_px}
    note = f'<p class="note">{prose(figure.note)}</p>' if figure.note else ""
    return (
        f"<figure><figcaption>{title}{kinds_html(figure.kinds, figure.basis)}</figcaption>"
        f"{legend_html(figure.legend)}"
        f'<div class="plot" id="figure-{identity}" data-figure="{identity}" role="img" '
        f'aria-label="{html_text(figure.label)}" style="min-height:{figure.height_px}px"></div>{note}</figure>'
    )
