"""Draw one figure of a run's report as a PNG file, as in the README.

    python tools/report_screenshot.py RUN OUT.png [--figure memory] [--size 1115x652]

The report's own page is opened in Chromium, without a window, with all but the figure hidden.
"""

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

from memadvisor.analyzers.analysis import analyze
from memadvisor.report.page import render
from memadvisor.run.store import load_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_ALONE = """<style>
html{{overflow:hidden}}.page{{display:block;max-width:none;padding:10px}}figure{{margin:0!important}}
header,nav,footer,h1,h2,.facts,.lead,.alert,.card,.cards,section:not(:has(#figure-{name})),
figure:not(:has(#figure-{name})){{display:none!important}}
</style></head>"""


def draw(run: Path, output: Path, figure: str, size: str) -> None:
    if BROWSER is None:
        raise SystemExit("no Chromium is installed")
    analysis = analyze(load_run(run))
    name = f"{figure}-rank{analysis.largest_rank.rank}"
    with tempfile.TemporaryDirectory() as directory:
        page = Path(directory) / "page.html"
        page.write_text(render(analysis).replace("</head>", _ALONE.format(name=name), 1))
        command = [
            BROWSER,
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *(f"--user-data-dir={directory}/profile", f"--window-size={size.replace('x', ',')}"),
            *("--blink-settings=preferredColorScheme=1", "--virtual-time-budget=10000"),
            *(f"--screenshot={output.resolve()}", page.as_uri()),
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=180)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--figure", default="memory")
    parser.add_argument("--size", default="1115x652")
    arguments = parser.parse_args()
    draw(arguments.run, arguments.output, arguments.figure, arguments.size)


if __name__ == "__main__":
    main()
