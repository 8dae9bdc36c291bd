"""What stands around a page's sections: title, what ran, the line at its top, where a rank is chosen, and the contents."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from memadvisor.report.blocks import Section
from memadvisor.report.escape import html_text, prose
from memadvisor.report.words import steps_in_words
from memadvisor.run.run import Run


def header_html(command: str, shown: Sequence[int], first_rank: str, num_ranks: int) -> str:
    """Whose page it is, and of several ranks (`shown`, of `num_ranks`) a choice."""
    chooser = ""
    if len(shown) > 1:
        options = "".join(
            f'<option value="{rank}"{" selected" if str(rank) == first_rank else ""}>{rank}</option>'
            for rank in shown
        )
        few = f" ({len(shown)} of {num_ranks})" if len(shown) < num_ranks else ""
        chooser = f'<label>rank{few} <select id="rank" autocomplete="off">{options}</select></label>'
    return (
        '<header><span class="brand">memadvisor</span>'
        f'<span class="script mono">{html_text(command)}</span>{chooser}</header>\n'
    )


def contents_html(sections: Sequence[Section]) -> str:
    named = [("answer", "Summary"), *((s.name, s.title) for s in sections if s.title)]
    items = "".join(f'<li><a href="#{name}">{html_text(title)}</a></li>' for name, title in named)
    return f'<nav aria-label="Contents"><ol>{items}</ol></nav>'


def title_html(title: str) -> str:
    return f"<h1>{prose(title)}</h1>"


def facts(run: Run) -> Iterator[str]:
    """What ran where and when."""
    process = run.ranks[0].process
    num_ranks = run.manifest.world_size
    yield f"{num_ranks} rank{'s' if num_ranks > 1 else ''} on {process.device_name} ({process.device})"
    yield f"torch {process.torch_version}"
    yield f"Python {process.python_version}"
    yield steps_in_words(run)
    yield time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.manifest.created_unix_s))
    if run.plan is not None:
        yield "a plan was applied"


def without_script() -> str:
    return (
        "<noscript><p class=alert>The figures are drawn by JavaScript, which is switched off; tables and texts are "
        "complete without it.</p></noscript>"
    )
