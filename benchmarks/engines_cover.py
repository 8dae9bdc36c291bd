"""Communication that compute could cover, and how much of it is covered (benchmarks/engines.py with `--link`).

A step has two windows in which the engine's messages may travel beside compute:

    forward     from the end of one optimizer step to the end of the next forward: gathers of parameters for it
    backward    the backward: reductions of gradients, and gathers of parameters for the backward

For each window w
    C_w         its seconds in a run of the same plan whose messages are left out (`ours-N-silent`): all of the engine's
                compute (copies, sums, hooks) is there, and ranks still meet with their few bytes
    X_w         the seconds that the same messages take on the same link when nothing else runs: those of one step, one
                after another as the engine sends them, between ranks that do nothing else
    min(C_w, X_w)   what the window's compute could cover of it

Whatever the schedule, a step takes at least the sum of max(C_w, X_w) and the compute outside of the windows. With T the
step's seconds with overlap and C those of a silent step

    covered = (C + sum of X_w - T) / (sum of min(C_w, X_w))

so 1 is a step that no schedule beats, and 0 one that computes and communicates in turn. A run without overlap plays no
part: its messages wait for the other rank's compute too, which is more than the link takes for them.

In a silent run nothing arrives: what would be received is whatever lies in its memory, and losses mean nothing. Each
number is the slower rank's, the mean of the steps of a round; the table has the median of rounds.
"""

import statistics
import time

import torch
import torch.distributed as dist

from memadvisor.engines.collectives.wire import Wire

WINDOWS = ("forward", "backward")
_TAG = 1  # of replayed messages, which nothing else under way bears


class Messages:
    """What this rank's engine sends, seen where it sends it. `window`: the one that the training is in."""

    def __init__(self):
        self.window = "forward"
        self.sent = {
            window: [] for window in WINDOWS
        }  # (elements, dtype, is a sum over all ranks), of the last step
        self._wires = []
        self._begin_exchange, self._begin_sum = Wire._begin_exchange, Wire._begin_sum

    def listen(self):
        """Remember all messages from here on."""
        Wire._begin_exchange = _listening(self, self._begin_exchange, is_sum=False)
        Wire._begin_sum = _listening(self, self._begin_sum, is_sum=True)

    def silence(self):
        """Leave all messages out from here on."""
        Wire._begin_exchange = lambda *args, **kwargs: []
        Wire._begin_sum = lambda wire, tensor, unit, group: wire.lane(tensor.device).adopt(
            [], writes=(tensor,)
        )

    def optimizer_begins(self):
        """What is sent from here on is the next step's."""
        self.sent, self._before = _nothing(), self.sent

    def remember(self, wire, numel, dtype, *, is_sum):
        self._wires[:] = [wire]
        self.sent[self.window].append((numel, dtype, is_sum))

    def transfer_s(self):
        """{window: seconds of its messages with nothing else under way}. All ranks call this together, after a step."""
        for wire in self._wires:
            wire.lane(torch.device("cpu")).run(lambda: None)  # after what is still on its way
        return {window: self._replay(messages) for window, messages in self._before.items()}

    def _replay(self, messages):
        if not messages:
            return 0.0
        wire = self._wires[0]
        other = 1 - wire.rank
        buffers = [
            (torch.zeros(numel, dtype=dtype), None if is_sum else torch.zeros(numel, dtype=dtype))
            for numel, dtype, is_sum in messages
        ]
        dist.barrier()
        start_s = time.perf_counter()
        sums = []
        for sent, received in buffers:
            if received is None:  # begun at once and waited for at the end, as in a backward
                sums.append(self._begin_sum(wire, sent, "", wire.everyone))
                continue
            for work in self._begin_exchange(wire, "replay", "", [sent], other, [received], other, _TAG):
                work.wait()
        for ticket in sums:
            ticket.wait()
        return time.perf_counter() - start_s


def _nothing():
    return {window: [] for window in WINDOWS}


def _listening(messages, begin, *, is_sum):
    def begin_and_remember(wire, *args, **kwargs):
        tensors = [args[0]] if is_sum else args[2]  # those of one exchange travel as one
        messages.remember(wire, sum(each.numel() for each in tensors), tensors[0].dtype, is_sum=is_sum)
        return begin(wire, *args, **kwargs)

    return begin_and_remember


def silent_twin(mode):
    """The mode that computes what a mode with overlap does, and sends nothing; None for others."""
    stem, _, how = mode.rpartition("-")
    return f"{stem}-silent" if stem.startswith("ours-") and how in ("overlap", "deep", "units") else None


def print_cover(mode, rounds, print_line=print):
    """What a mode's rounds with its silent twin's and its transfers say. rounds: [{mode: what ranks measured}]."""
    twin = silent_twin(mode)
    compute = {w: _median(rounds, twin, lambda answer, w=w: answer["window_s"][w]) for w in WINDOWS}
    transfer = {w: _median(rounds, mode, lambda answer, w=w: answer["transfer_s"][w]) for w in WINDOWS}
    shares = [_covered(taken, mode, twin) for taken in rounds]
    for window in WINDOWS:
        print_line(
            f"{mode}, {window}: {compute[window]:.3f} s of compute, {transfer[window]:.3f} s of transfers on the idle "
            f"link, {min(compute[window], transfer[window]):.3f} s can be covered"
        )
    print_line(
        f"{mode}: {statistics.median(shares):.0%} of that is covered ({min(shares):.0%} to {max(shares):.0%} by round)"
    )


def _covered(taken, mode, twin):
    compute = {w: _slowest(taken[twin], lambda answer, w=w: answer["window_s"][w]) for w in WINDOWS}
    transfer = {w: _slowest(taken[mode], lambda answer, w=w: answer["transfer_s"][w]) for w in WINDOWS}
    step_s, silent_s = (_slowest(taken[name], lambda answer: answer["step_s"]) for name in (mode, twin))
    coverable_s = sum(min(compute[w], transfer[w]) for w in WINDOWS)
    return (silent_s + sum(transfer.values()) - step_s) / coverable_s


def _slowest(answers, value_of):
    return max(value_of(answer) for answer in answers)


def _median(rounds, mode, value_of):
    return statistics.median(_slowest(taken[mode], value_of) for taken in rounds)
