"""Data-parallel engines side by side: step time, waiting, peak memory, losses, on Gloo ranks of this machine.

    python benchmarks/engines.py --model A --modes fsdp2,fsdp2-pairwise,ours-3,ours-3-overlap
    python benchmarks/engines.py --model B --ranks 4 --modes ours-0,ours-1 --measure time --seconds 120
    sudo python benchmarks/engines.py --link 1gbit --modes ours-2,ours-2-overlap

Every mode trains the same GPT on the same words, one torch thread a rank. DDP with AdamW always runs too. All
worlds of ranks stay alive; in each round each of them takes a few steps in turn, in an order that rotates, while the
others wait for their next order. A step's time is compared with DDP's in the same round, so that a machine that
slows down meanwhile slows all of them: the table gives the median of these ratios, and their range.

`waiting` is the time of a step in which the thread that computes neither ran nor was ready to run: communication
that nothing covers. Work that collectives do on that thread (copies, sums, sending) counts as compute. `local`
trains without any communication. With `--link` the share of coverable communication that is covered follows for
each `ours-N-overlap`, `-deep` and `-units`, with a run of the same plan that sends nothing beside it (engines_cover.py).
Peaks come from worlds of their own, one after another: the highest total of
torch's CPU allocator's account in three steps after two, looked at every 20 microseconds, so a peak that is
shorter than that may be missed. `losses` is the largest relative difference from DDP's of any step and rank.

Nothing else should run meanwhile. Each world of model A or B takes about 1.5 GiB a rank: with little memory take a
few modes at a time. DeepSpeed's modes are skipped where it is not installed.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from engines_cover import print_cover, silent_twin
from engines_link import Link, NoLinkError
from engines_rank import MODELS, TRAININGS

RANK_SCRIPT = Path(__file__).resolve().parent / "engines_rank.py"
WARM_STEPS = 3
PEAK_STEPS = 3
_ON_REQUEST = (
    "ddp",
    "local",
    "ours-1-silent",
    "ours-2-silent",
    "ours-3-silent",
    "fsdp2-keep-pairwise",
    "ours-3-8bit",
    "ours-3-4bit",
)
DEFAULT_MODES = [mode for mode in TRAININGS if mode not in _ON_REQUEST]


class EngineError(Exception):
    """A mode's ranks died; its text is the end of what they wrote."""


class Ended(Exception):
    """A signal ends the benchmark: what has been measured by then is printed."""


class World:
    """The ranks of one mode, waiting for orders on their stdin."""

    def __init__(self, mode, args, link, *, peak):
        self.mode = mode
        port = free_port()
        self.logs = [Path(args.logs) / f"{mode}-{rank}.txt" for rank in range(args.ranks)]
        self.processes = []
        for rank in range(args.ranks):
            command = [sys.executable, str(RANK_SCRIPT), mode, "--model", args.model]
            command += ["--fused"] * args.fused + ["--peak"] * peak
            command += [f"--kept={args.kept}"] * bool(args.kept) + ["--listen"] * (link is not None)
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(args.ranks),
                "MASTER_ADDR": link.address if link else "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                **(link.environment if link else {"GLOO_SOCKET_IFNAME": "lo"}),
            }
            with self.logs[rank].open("w") as log:
                self.processes.append(
                    subprocess.Popen(
                        (link.prefix(rank) if link else []) + command,
                        env=environment,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                    )
                )

    def steps(self, num_steps):
        """What each rank measured in its next steps. Raises EngineError."""
        return self._ask(f"steps {num_steps}")

    def transfers(self):
        """What each rank's messages of the last step take on the idle link. Raises EngineError."""
        return self._ask("transfers")

    def _ask(self, order):
        with contextlib.suppress(BrokenPipeError):
            for process in self.processes:
                print(order, file=process.stdin, flush=True)
        answers = []
        for process, log in zip(self.processes, self.logs, strict=True):
            line = process.stdout.readline()
            if not line:
                raise EngineError(log.read_text().strip()[-600:] or f"no word in {log}")
            answers.append(json.loads(line))
        return answers

    def stop(self):
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
        for process in self.processes:
            process.wait()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main():
    args = parse_args()
    modes = ["ddp", *[mode for mode in dict.fromkeys(args.modes) if mode != "ddp"]]
    if importlib.util.find_spec("deepspeed") is None:
        skipped = [mode for mode in modes if mode.startswith("deepspeed")]
        modes = [mode for mode in modes if mode not in skipped]
        if skipped:
            print(f"skipped {', '.join(skipped)}: DeepSpeed is not installed (pip install deepspeed)")
    if args.link and args.measure != "memory":
        modes = [*dict.fromkeys([*modes, *filter(None, map(silent_twin, modes))])]
    Path(args.logs).mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    try:
        link = Link(args.link, args.ranks) if args.link else None
    except NoLinkError as error:
        sys.exit(f"engines.py: {error}")
    rounds, losses, peaks, more_losses = [], {}, {}, {}
    with link or contextlib.nullcontext(), contextlib.suppress(Ended):
        if args.measure != "memory":
            timed_rounds(modes, args, link, rounds, losses)
        if args.measure != "time":
            peaks_of(modes, args, link, peaks, more_losses)
    print_table(modes, rounds, peaks, losses or more_losses, args)


def end(*_):
    raise Ended


def timed_rounds(modes, args, link, rounds, losses):
    """Fill `rounds`, of {mode: what its ranks measured}, and each mode's losses by rank."""
    worlds, longest_s, deadline = {}, 0.0, time.monotonic() + args.seconds
    try:
        for mode in modes:
            worlds[mode] = World(mode, args, link, peak=False)
        for mode in modes:
            try:
                answers = worlds[mode].steps(WARM_STEPS)
            except EngineError as error:
                print(f"skipped {mode}: {error}")
                worlds.pop(mode).stop()
                continue
            losses[mode] = [answer["losses"] for answer in answers]
        while len(rounds) < args.rounds and (time.monotonic() + longest_s < deadline or not rounds):
            start_s = time.monotonic()
            first = len(rounds) % len(worlds)
            order = [*worlds][first:] + [*worlds][:first]
            taken = {mode: worlds[mode].steps(args.steps) for mode in order}
            for mode in order:
                if silent_twin(mode) in worlds:
                    for answer, transfers in zip(taken[mode], worlds[mode].transfers(), strict=True):
                        answer |= transfers
            for mode, answers in taken.items():
                for all_losses, answer in zip(losses[mode], answers, strict=True):
                    all_losses += answer["losses"]
            rounds.append(taken)
            longest_s = max(longest_s, time.monotonic() - start_s)
    finally:
        for world in worlds.values():
            world.stop()


def peaks_of(modes, args, link, peaks, losses):
    """Fill {mode: the highest peak of its ranks in bytes}, one world after another; and losses."""
    for mode in modes:
        world = World(mode, args, link, peak=True)
        try:
            warm = world.steps(2)
            answers = world.steps(PEAK_STEPS)
        except EngineError as error:
            print(f"skipped {mode}: {error}")
            continue
        finally:
            world.stop()
        peaks[mode] = max(answer["peak_bytes"] for answer in answers)
        print(f"{mode}: {peak_cell(peaks[mode]).strip()}", file=sys.stderr, flush=True)
        losses[mode] = [a["losses"] + b["losses"] for a, b in zip(warm, answers, strict=True)]


def print_table(modes, rounds, peaks, losses, args):
    layers, dim, _, vocabulary, seq = MODELS[args.model]
    print(
        f"model {args.model}: {layers} layers, d={dim}, vocabulary {vocabulary} tied, sequence {seq}, micro-batch 2, "
        f"fp32 AdamW{' (fused)' if args.fused else ''}; {args.ranks} Gloo ranks, 1 torch thread each, "
        f"link {args.link or 'loopback'}"
    )
    print(
        f"torch {torch.__version__}, {processor()}, {os.cpu_count()} cores; "
        f"{len(rounds)} rounds of {args.steps} steps, interleaved"
    )
    print(f"{'mode':20}{'step':>9}{'of DDP':>8}{'range':>13}{'waiting':>10}{'peak':>12}  losses")
    for mode in modes:
        if mode not in losses:
            continue
        print(f"{mode:20}{time_cells(mode, rounds)}{peak_cell(peaks.get(mode))}  {loss_cell(mode, losses)}")
    if args.link:
        for mode, sent in sent_mib(rounds).items():
            print(f"{mode} sends {sent:.1f} MiB a step and rank")
        for mode in modes if rounds else ():
            if mode in losses and silent_twin(mode) in losses:
                print_cover(mode, rounds)


def sent_mib(rounds):
    """{mode: what the network interface of a rank sends in a step, headers included}."""
    return {
        mode: statistics.median(slowest(taken[mode], "sent_bytes") for taken in rounds) / 2**20
        for mode in (rounds[0] if rounds else ())
    }


def time_cells(mode, rounds):
    if not rounds:
        return f"{'-':>9}{'-':>8}{'-':>13}{'-':>10}"
    steps_s = [slowest(taken[mode], "step_s") for taken in rounds]
    ratios = [slowest(taken[mode], "step_s") / slowest(taken["ddp"], "step_s") for taken in rounds]
    waiting_s = statistics.median(statistics.mean(a["waiting_s"] for a in taken[mode]) for taken in rounds)
    spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
    step = f"{1e3 * statistics.median(steps_s):.1f} ms"
    return f"{step:>9}{statistics.median(ratios):8.3f}{spread:>13}{f'{1e3 * waiting_s:.1f} ms':>10}"


def slowest(answers, name):
    return max(answer[name] for answer in answers)


def peak_cell(peak_bytes):
    text = "-" if peak_bytes is None else f"{peak_bytes / 2**20:.1f} MiB"
    return f"{text:>12}"


def loss_cell(mode, losses):
    if mode == "local" or mode.endswith("-silent"):
        return "its own"
    pairs = [
        (mine, ddp)
        for my_losses, ddp_losses in zip(losses[mode], losses["ddp"], strict=True)
        for mine, ddp in zip(my_losses, ddp_losses, strict=True)
    ]
    if all(mine == ddp for mine, ddp in pairs):
        return f"equal in {len(losses['ddp'][0])} steps"
    return f"within {max(abs(mine - ddp) / abs(ddp) for mine, ddp in pairs):.1e}"


def processor():
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="A")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--modes", type=modes_of, default=DEFAULT_MODES, help="of " + ", ".join(TRAININGS))
    parser.add_argument("--measure", choices=("both", "time", "memory"), default="both")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="of each mode in a round")
    parser.add_argument(
        "--seconds",
        type=float,
        default=600,
        help="with starting the ranks; no round begins that would be over later, but one",
    )
    parser.add_argument("--fused", action="store_true", help="AdamW(fused=True) everywhere")
    parser.add_argument(
        "--kept",
        type=int,
        help="blocks that ours-3-keep, ours-3-inback and ours-3-ahead keep until their backward (default: all)",
    )
    parser.add_argument(
        "--link", metavar="RATE", help="2 ranks in network namespaces, joined at RATE (1gbit)"
    )
    parser.add_argument("--logs", default="/tmp/memadvisor-engines", help="folder for what the ranks print")
    return parser.parse_args()


def modes_of(text):
    modes = text.split(",")
    for mode in modes:
        if mode not in TRAININGS:
            raise argparse.ArgumentTypeError(f"no mode {mode!r}; there are {', '.join(TRAININGS)}")
    return modes


if __name__ == "__main__":
    main()
