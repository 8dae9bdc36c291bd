"""Lines on stderr hold the names that the user gave, byte for byte."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("text", "said"), [(os.fsdecode(b"run-\xff"), b"run-\xff\n"), ("\ud800 \u00e9", "? \u00e9\n".encode())]
)
def test_names_that_are_no_utf_8_come_back_as_they_were(text, said):
    program = "import sys; from memadvisor.run.say import say; say(eval(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", program, ascii(text)], capture_output=True)

    assert done.stderr == said
