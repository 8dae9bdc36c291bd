"""Draw one tab of the terminal view as an SVG file, as in the README.

    python tools/tui_screenshot.py RUN OUT.svg [--tab memory] [--size 120x36] [--keys home,right]

No terminal is needed. Browsers draw it as the terminal does; some converters drop leading spaces.
"""

import argparse
import asyncio
from pathlib import Path

from memadvisor.tui.app import RunApp


async def draw(arguments: argparse.Namespace) -> str:
    width, height = map(int, arguments.size.split("x"))
    app = RunApp(arguments.run)
    app.animation_level = "none"
    async with app.run_test(size=(width, height)) as pilot:
        while app.view is None:
            if app.return_value is not None:
                raise SystemExit(app.return_value.one_line())
            await pilot.pause(0.05)
        app.action_tab(arguments.tab)
        await pilot.pause(0.2)
        for key in filter(None, arguments.keys.split(",")):
            await pilot.press(key)
        await pilot.pause(0.2)
        return app.export_screenshot(title=f"memadvisor tui {arguments.run.name}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tab", default="memory")
    parser.add_argument("--size", default="120x36")
    parser.add_argument("--keys", default="", help="keys to press, separated by commas")
    arguments = parser.parse_args()
    arguments.output.write_text(asyncio.run(draw(arguments)), encoding="utf-8")


if __name__ == "__main__":
    main()
