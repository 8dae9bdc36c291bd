"""A slow link for benchmarks/engines.py: two network namespaces, one veth pair, `tc tbf` at both ends.

Linux's own shaping of real TCP between two ranks, nothing emulated. Needs root and iproute2.
"""

import os
import shutil
import subprocess

LATENCY = "50ms"  # what may wait in the shaper's queue before packets are dropped
BURST = "256kb"


class NoLinkError(Exception):
    """Why namespaces cannot be had here."""


class Link:
    """Context manager: namespaces that exist while it is open. Rank r lives in namespace r."""

    def __init__(self, rate, num_ranks):
        if num_ranks != 2:
            raise NoLinkError("--link joins 2 ranks; leave --ranks at 2.")
        if os.geteuid() != 0:
            raise NoLinkError("--link makes network namespaces and needs root.")
        if not (shutil.which("ip") and shutil.which("tc")):
            raise NoLinkError("--link needs `ip` and `tc`: apt-get install iproute2.")
        self.rate = rate
        self.names = [f"memadvisor-{os.getpid()}-{rank}" for rank in range(2)]
        self.address = "10.77.0.1"
        self.environment = {"GLOO_SOCKET_IFNAME": "slow"}

    def __enter__(self):
        try:
            self._build()
        except subprocess.CalledProcessError as error:
            self.__exit__()
            raise SystemExit(
                f"engines.py: namespaces are not permitted here ({error.stderr.strip()})"
            ) from None
        return self

    def __exit__(self, *exc_info):
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def prefix(self, rank):
        """What a command is started with to run in a rank's namespace."""
        return ["ip", "netns", "exec", self.names[rank]]

    def _build(self):
        first, second = self.names
        for name in self.names:
            _run(f"ip netns add {name}")
        _run(f"ip link add slow netns {first} type veth peer name slow netns {second}")
        for rank, name in enumerate(self.names):
            _run(f"ip -n {name} addr add 10.77.0.{rank + 1}/24 dev slow")
            _run(f"ip -n {name} link set slow up")
            _run(f"ip -n {name} link set lo up")
            _run(f"tc -n {name} qdisc add dev slow root tbf rate {self.rate} burst {BURST} latency {LATENCY}")


def _run(command):
    subprocess.run(command.split(), check=True, capture_output=True, text=True)
