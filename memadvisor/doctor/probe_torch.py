"""What torch finds here, asked in a process of its own: importing it may fail, or never end."""

from __future__ import annotations

import json

from memadvisor.doctor.facts import DeviceFacts, TorchFacts
from memadvisor.doctor.processes import last_words, run_python


def probe_torch() -> TorchFacts | str:
    """What torch finds in a process of its own; why not, where that fails."""
    code, output, errors = run_python(["-m", "memadvisor.calibrate.probe"])
    if code != 0:
        return last_words(errors) or ("no answer in time" if code is None else f"exit code {code}")
    fields = json.loads(output.splitlines()[-1])
    devices = tuple(DeviceFacts(**device) for device in fields.pop("devices"))
    return TorchFacts(**{**fields, "devices": devices, "backends": tuple(fields["backends"])})
