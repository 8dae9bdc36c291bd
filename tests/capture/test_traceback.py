"""The traceback of a script's exception is the one that Python would have printed without us."""

import subprocess
import sys

SCRIPT = """
import torch
model = torch.nn.Linear(4, 4)
loss = model(torch.ones(2, 4)).sum()
loss.register_hook(lambda gradient: gradient.no_such_attribute)
loss.backward()
"""


def test_an_exception_in_a_backward_pass_shows_no_frame_of_ours(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    plain = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    command = [sys.executable, "-m", "memadvisor", "profile", "--out", str(tmp_path / "run"), str(script)]
    profiled = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert profiled.returncode == plain.returncode == 1
    assert profiled.stderr.endswith(plain.stderr[plain.stderr.index("Traceback") :])
