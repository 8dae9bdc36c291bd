"""How much of the host's memory is free for this process: what the kernel says, within the limit of its control group."""

from __future__ import annotations

from pathlib import Path


def free_host_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that could be taken without swapping; None where the kernel does not tell (Linux alone does)."""
    try:
        free_bytes = _available_bytes(root / "proc/meminfo")
    except (OSError, ValueError):
        return None
    limited = [_room_bytes(group) for group in control_groups(root)]
    return min([free_bytes, *(room_bytes for room_bytes in limited if room_bytes is not None)])


def _available_bytes(path: Path) -> int:
    for line in path.read_text(encoding="ascii").splitlines():
        name, _, size = line.partition(":")
        if name == "MemAvailable":
            return int(size.split()[0]) * 1024
    raise ValueError("no MemAvailable")


def control_groups(root: Path) -> list[Path]:
    """Folders of this process's control group (version 2) and of those around it, each of which may have a limit."""
    top = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
    paths = [line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")]
    return [
        folder
        for path in paths
        for folder in (top / path, *(top / path).parents)
        if top in (folder, *folder.parents)
    ]


def _room_bytes(group: Path) -> int | None:
    """What is left under a group's limit, its page cache taken as free; None where it has no limit."""
    try:
        limit, used = (
            (group / name).read_text(encoding="ascii") for name in ("memory.max", "memory.current")
        )
        if limit.strip() == "max":
            return None
        counts = dict(
            line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines()
        )
        return max(0, int(limit) - int(used) + int(counts.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None
