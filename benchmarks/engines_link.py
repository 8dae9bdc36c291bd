"""A slow link for benchmarks/engines.py: two network namespaces, one veth pair, `tc tbf` at both ends.

Linux's own shaping of real TCP between two ranks, nothing emulated. Needs root, iproute2 and util-linux.

The namespaces have no names and no files: each belongs to a process that waits for the end of its stdin, which comes
when the benchmark closes it or dies, of whatever signal. With the last process in it a namespace goes, and its end of
the link with it. Ranks are killed when the benchmark dies: one that waits for another would not hear of its end where
the link has gone too. So nothing is left behind that another run would have to clean up.
"""

import os
import shutil
import subprocess

LATENCY = "50ms"  # what may wait in the shaper's queue before packets are dropped
BURST = "256kb"
_TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
}


class NoLinkError(Exception):
    """Why namespaces cannot be had here."""


class Link:
    """Context manager: namespaces that exist while it is open. Rank r lives in namespace r."""

    def __init__(self, rate, num_ranks):
        if num_ranks != 2:
            raise NoLinkError(f"--link joins 2 ranks, not {num_ranks}; leave --ranks at 2.")
        if os.geteuid() != 0:
            raise NoLinkError("--link makes network namespaces and needs root.")
        missing = [tool for tool in _TOOLS if not shutil.which(tool)]
        if missing:
            packages = " ".join(sorted({_TOOLS[tool] for tool in missing}))
            raise NoLinkError(f"--link needs {', '.join(missing)}: apt-get install {packages}.")
        self.rate = rate
        self.address = "10.77.0.1"
        self.environment = {"GLOO_SOCKET_IFNAME": "slow"}
        self._holders = []

    def __enter__(self):
        try:
            self._build()
        except (subprocess.CalledProcessError, BrokenPipeError, NoLinkError) as error:
            self.__exit__()
            why = getattr(error, "stderr", None) or str(error)
            raise SystemExit(
                f"engines.py: a link of {self.rate} cannot be had here ({why.strip()})"
            ) from None
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info):
        while self._holders:
            holder = self._holders.pop()
            holder.stdin.close()
            holder.wait()
            holder.stdout.close()
            holder.stderr.close()

    def prefix(self, rank):
        """What a command is started with to run in a rank's namespace."""
        return ["setpriv", "--pdeathsig", "KILL", "nsenter", f"--net=/proc/{self._holders[rank].pid}/ns/net"]

    def _build(self):
        for _ in range(2):
            self._holders.append(_hold_namespace())
        other = self._holders[1].pid
        _run(self.prefix(0), f"ip link add slow type veth peer name slow netns {other}")
        for rank in range(2):
            _run(self.prefix(rank), f"ip addr add 10.77.0.{rank + 1}/24 dev slow")
            _run(self.prefix(rank), "ip link set slow up")
            _run(self.prefix(rank), "ip link set lo up")
            shaper = f"tc qdisc add dev slow root tbf rate {self.rate} burst {BURST} latency {LATENCY}"
            _run(self.prefix(rank), shaper)


def _hold_namespace():
    """A process in a namespace of its own, until its stdin ends. It answers a line when it is there."""
    holder = subprocess.Popen(
        ["unshare", "--net", "cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the benchmark, which needs the link until its ranks have ended
    )
    print("here", file=holder.stdin, flush=True)
    if not holder.stdout.readline():
        raise NoLinkError(holder.stderr.read())
    return holder


def _run(prefix, command):
    subprocess.run([*prefix, *command.split()], check=True, capture_output=True, text=True)
