"""The page for tests that read its words."""

from memadvisor.analyzers.analysis import Analysis
from memadvisor.report.page import render


def rendered(analysis: Analysis) -> str:
    """With plain spaces between figures and their units."""
    return render(analysis).replace("\u00a0", " ")
