"""`python -m memadvisor` is the command `memadvisor`."""

import sys

from memadvisor.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
