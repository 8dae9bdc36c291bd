"""A small training, with and without memadvisor: the proof that recording works here."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from memadvisor.analyzers.analysis import analyze
from memadvisor.doctor.facts import TorchFacts, TrialFacts
from memadvisor.doctor.processes import last_words, run_python
from memadvisor.errors import RunFormatError
from memadvisor.run.store import load_run

_SCRIPT = """\
import os
import torch
import torch.distributed as dist

ranks = int(os.environ.get("WORLD_SIZE", "1"))
devices = torch.cuda.device_count()
use_cuda = devices >= ranks
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if use_cuda else torch.device("cpu")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)).to(device)
if ranks > 1:
    dist.init_process_group("nccl" if use_cuda else "gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    loss = model(torch.randn(64, 256, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if ranks == 1:
        print(step, loss.item())
if ranks > 1:
    dist.destroy_process_group()
"""


def run_trials(torch: TorchFacts) -> Iterator[TrialFacts]:
    """A small training recorded on one process, and among two where torch can do that."""
    with tempfile.TemporaryDirectory(prefix="memadvisor-") as directory:
        script = Path(directory) / "trial.py"
        script.write_text(_SCRIPT, encoding="utf-8")
        yield _trial(script, 1)
        if torch.backends:
            yield _trial(script, 2)


def _trial(script: Path, num_ranks: int) -> TrialFacts:
    run = script.parent / f"run-{num_ranks}"
    ranks = ("--nproc", str(num_ranks)) if num_ranks > 1 else ()
    code, output, errors = run_python(["-m", "memadvisor", "profile", *ranks, "--out", str(run), str(script)])
    same = None
    if num_ranks == 1 and code == 0:
        plain_code, plain_output, _ = run_python([str(script)])
        same = (plain_code, plain_output) == (code, output)
    peak_bytes, unexplained_bytes = _peak(run) if code == 0 else (None, None)
    return TrialFacts(
        num_ranks=num_ranks,
        exit_code=code,
        last_words=last_words(errors),
        is_same_output=same,
        peak_bytes=peak_bytes,
        unexplained_bytes=unexplained_bytes,
    )


def _peak(run: Path) -> tuple[int | None, int | None]:
    """The fullest rank's peak, and how much of it has no label."""
    try:
        peak = analyze(load_run(run)).largest_rank.peak
    except RunFormatError:
        return None, None
    return (None, None) if peak is None else (peak.allocated_bytes, peak.unexplained_bytes)
