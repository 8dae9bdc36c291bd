"""Step times of the ZeRO stages as multiples of DDP's: predicted from a plain run, and measured in turn.

For each width the sample GPT (6 layers, vocabulary 256 tied, sequence 128, micro-batch 2) is profiled under DDP, a plan
of each stage is simulated over that run, and benchmarks/engines.py's worlds of ranks train the same model under DDP and
each stage (with overlap, one unit gathered ahead), a few steps each in turn. A ratio of steps of one round says little
of how fast the machine was meanwhile, so predicted and measured ratios may be compared where step times may not.

    python benchmarks/stage_ratios.py --hardware hardware.json [--widths 64 128 384 512] [--seconds 40]

`without` is the prediction without what the engine itself takes (`engine` of a hardware file). Nothing else should run
meanwhile.
"""

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engines import slowest, timed_rounds
from engines_rank import MICRO_BATCH, MODELS
from stages import SCRIPT, WAYS, command, plan_of

import memadvisor
from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.collectives import times_from_curves
from memadvisor.hardware.load import load_hardware

STAGES = {
    "ours-0": "0",
    "ours-1-overlap": "1 overlap",
    "ours-2-overlap": "2 overlap",
    "ours-3-overlap": "3 overlap",
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hardware", required=True)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 384, 512])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=40)
    args = parser.parse_args()
    args.ranks, args.fused, args.kept, args.logs = 2, False, None, "/tmp/memadvisor-engines"
    hardware = load_hardware(args.hardware)
    times = times_from_curves(
        hardware.collectives, args.ranks, hardware.source, hardware.overlap, engine=hardware.engine
    )
    print(
        f"{'width':>6}{'':18}{'predicted':>10}{'without':>9}{'measured':>9}{'range':>12}{'error':>9}{'waits ms':>9}{'measured':>9}"
    )
    for width in args.widths:
        compare(width, times, args)


def compare(width, times, args):
    args.model = f"gpt{width}"
    run = plain_run(args.model, args.ranks)
    step = captured_step(run)
    Path(args.logs).mkdir(exist_ok=True)
    rounds = []
    timed_rounds(["ddp", *STAGES], args, None, rounds, {})
    print(
        f"{width:>6} DDP: {1e3 * step.step_time_s:.1f} ms when planned from, "
        f"{1e3 * statistics.median(slowest(taken['ddp'], 'step_s') for taken in rounds):.1f} ms in {len(rounds)} rounds"
    )
    for mode, way in STAGES.items():
        found = [
            plan_of(run, step, known, WAYS[way]).prediction for known in (times, replace(times, engine=None))
        ]
        predicted, without = (prediction.step_time_s / step.step_time_s for prediction in found)
        ratios = [slowest(taken[mode], "step_s") / slowest(taken["ddp"], "step_s") for taken in rounds]
        measured = statistics.median(ratios)
        waiting_s = statistics.median(
            statistics.mean(answer["waiting_s"] for answer in taken[mode]) for taken in rounds
        )
        spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
        print(
            f"{'':>6}{mode:18}{predicted:>10.3f}{without:>9.3f}{measured:>9.3f}{spread:>12}"
            f"{100 * (predicted / measured - 1):>+7.1f} %{1e3 * found[0].exposed_communication_s:>9.1f}"
            f"{1e3 * waiting_s:>9.1f}",
            flush=True,
        )


def plain_run(model, num_ranks):
    layers, dim, heads, _, seq = MODELS[model]
    options = {
        "layers": layers,
        "dim": dim,
        "heads": heads,
        "seq": seq,
        "micro-batch": MICRO_BATCH,
        "steps": 40,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "plain"
        command("profile", "--nproc", num_ranks, "--out", out, SCRIPT, *words, "--tied")
        return memadvisor.load(out)


if __name__ == "__main__":
    main()
