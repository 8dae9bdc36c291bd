"""Type-check the three folders as the one package that they are installed as.

mypy cannot map analyzers/ and tui/ into memadvisor/, so they are copied to build/typed/ first.
"""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TYPED = ROOT / "build" / "typed"


def main() -> int:
    shutil.rmtree(TYPED, ignore_errors=True)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "memadvisor", TYPED / "memadvisor", ignore=ignore)
    for folder in ("analyzers", "tui"):
        shutil.copytree(ROOT / folder, TYPED / "memadvisor" / folder, ignore=ignore)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        str(ROOT / "pyproject.toml"),
        "-p",
        "memadvisor",
    ]
    return subprocess.run(command, cwd=TYPED, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
