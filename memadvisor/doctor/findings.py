"""What the facts mean: one finding a subject, with what to do where something is wrong. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from memadvisor.doctor.facts import TIME_LIMIT_S, HostFacts, TorchFacts, TrialFacts
from memadvisor.hardware.load import named_hardware
from memadvisor.units import format_bytes

State = Literal["ok", "warning", "problem"]

# From and up to which torch memadvisor is tested: pyproject.toml's bounds.
TESTED_TORCH = ((2, 11), (2, 15))

# Variables that change what a profile measures, and how.
ODD_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": "each kernel waits for the one before, so step times are not the training's own",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "nothing is cached, so reserved bytes and predicted peaks do not hold",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL checks each collective by another, so communication takes longer",
    "NCCL_P2P_DISABLE": "GPUs exchange through the host's memory, which is slower",
    "NCCL_SHM_DISABLE": "GPUs without a link of their own exchange over the network, which is slower",
}
_OFF = ("", "0", "OFF", "INFO")  # values that switch nothing on

_LITTLE_DISK_BYTES = 2 * 10**9  # a rank writes 1 GB at most unless told otherwise
_LITTLE_SHARED_BYTES = 512 * 2**20
_LITTLE_MEMORY_BYTES = 2 * 2**30  # torch alone takes a quarter of it in each process


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`ok`: as it should be. `warning`: it works, with the consequence said. `problem`: something will not work."""

    subject: str
    state: State
    text: str
    hint: str | None = None


def findings(host: HostFacts, torch: TorchFacts | str) -> tuple[Finding, ...]:
    """One finding a subject, in the order in which they build on each other.

    `torch` is a text where it could not be imported: why.
    """
    found = [_python(host), _packages(host), _torch(torch)]
    if not isinstance(torch, str):
        found += [_devices(host, torch), _cores(host, torch)]
    return (*found, _memory(host), _shared_memory(host), _disk(host), *_variables(host))


def _python(host: HostFacts) -> Finding:
    return Finding(subject="python", state="ok", text=host.python_version)


def _packages(host: HostFacts) -> Finding:
    missing = [name for name, version in host.package_versions.items() if version is None]
    if missing:
        return Finding(
            subject="packages",
            state="problem",
            text=f"{', '.join(missing)} not installed",
            hint=f"pip install {' '.join(missing)}",
        )
    texts = (f"{name} {version}" for name, version in host.package_versions.items())
    return Finding(subject="packages", state="ok", text=", ".join(texts))


def _torch(torch: TorchFacts | str) -> Finding:
    first, last = (".".join(map(str, version)) for version in TESTED_TORCH)
    if isinstance(torch, str):
        return Finding(
            subject="torch",
            state="problem",
            text=f"cannot be imported: {torch}",
            hint=f"install torch {first} to {last} into this environment",
        )
    build = "a build for CPU" if torch.cuda_version is None else f"built for CUDA {torch.cuda_version}"
    text = f"{torch.version}, {build}; torch.distributed with {' and '.join(torch.backends) or 'no backend'}"
    if not TESTED_TORCH[0] <= _version(torch.version) <= TESTED_TORCH[1]:
        return Finding(
            subject="torch",
            state="warning",
            text=text,
            hint=f"memadvisor is tested with {first} to {last}: with others hooks may miss things",
        )
    return Finding(subject="torch", state="ok", text=text)


def _version(text: str) -> tuple[int, int]:
    """Major and minor of `2.13.0+cpu`; (0, 0) of what is no such text."""
    words = text.split(".")
    digits = [word for word in words[:2] if word.isdigit()]
    return (int(digits[0]), int(digits[1])) if len(digits) == 2 else (0, 0)


def _devices(host: HostFacts, torch: TorchFacts) -> Finding:
    if not torch.devices:
        return _no_device(host, torch)
    names = [device.name for device in torch.devices]
    unknown = sorted({name for name in names if named_hardware(name) is None})
    smallest = min(torch.devices, key=lambda device: device.free_bytes)
    counted = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    driver = "" if host.driver_version is None else f", driver {host.driver_version}"
    free = f"{format_bytes(smallest.free_bytes)} of {format_bytes(smallest.memory_bytes)} free"
    text = f"{counted}{driver}; {free}{' on the fullest' if len(names) > 1 else ''}"
    hint = None
    if smallest.free_bytes < smallest.memory_bytes / 2:
        hint = "another process holds the rest (nvidia-smi names it): a training here has only what is free"
    elif unknown:
        hint = f"no peak FLOP/s is known of {', '.join(unknown)}: `memadvisor calibrate -o hardware.json` measures it for MFU"
    return Finding(subject="devices", state="ok" if hint is None else "warning", text=text, hint=hint)


def _no_device(host: HostFacts, torch: TorchFacts) -> Finding:
    if host.driver_devices:
        seen = f"the driver {host.driver_version} has {', '.join(host.driver_devices)}, and torch uses none"
        hint = (
            "this torch is a build for CPU: install one for CUDA"
            if torch.cuda_version is None
            else f"torch says: {torch.device_error or 'no device is visible (CUDA_VISIBLE_DEVICES?)'}"
        )
        return Finding(subject="devices", state="problem", text=seen, hint=hint)
    text = "no GPU: trainings run, and are measured, on the CPU"
    return Finding(subject="devices", state="ok", text=text)


def _cores(host: HostFacts, torch: TorchFacts) -> Finding:
    quota = host.quota_cores
    limited = quota is not None and quota < host.num_cores
    usable = min(host.num_cores, quota) if quota is not None else host.num_cores
    text = f"{host.num_cores} for this process{f', time of {quota:g} allowed' if limited else ''}; torch uses {torch.num_threads}"
    if torch.num_threads > usable:
        hint = f"more threads than cores get in each other's way: OMP_NUM_THREADS={max(1, int(usable))}"
        return Finding(subject="cores", state="warning", text=text, hint=hint)
    return Finding(subject="cores", state="ok", text=text)


def _memory(host: HostFacts) -> Finding:
    free = host.free_memory_bytes
    if free is None:
        return Finding(subject="memory", state="ok", text="free memory of the host: not recorded")
    text = f"{format_bytes(free)} of the host's free"
    if free < _LITTLE_MEMORY_BYTES:
        hint = "each rank's process takes about 0.5 GiB before any tensor"
        return Finding(subject="memory", state="warning", text=text, hint=hint)
    return Finding(subject="memory", state="ok", text=text)


def _shared_memory(host: HostFacts) -> Finding:
    free = host.free_shared_memory_bytes
    if free is None:
        return Finding(subject="shared memory", state="ok", text="no /dev/shm on this system")
    text = f"{format_bytes(free)} free in /dev/shm"
    if free < _LITTLE_SHARED_BYTES:
        hint = "workers of a DataLoader may die of it: in a container, start it with --shm-size=2g or more"
        return Finding(subject="shared memory", state="warning", text=text, hint=hint)
    return Finding(subject="shared memory", state="ok", text=text)


def _disk(host: HostFacts) -> Finding:
    if not host.can_write:
        return Finding(
            subject="disk",
            state="problem",
            text=f"no file can be made in {host.directory}",
            hint="runs go to the working directory: change to another, or give --out",
        )
    if host.free_disk_bytes is None:
        return Finding(subject="disk", state="ok", text=f"{host.directory}: free bytes not recorded")
    text = f"{format_bytes(host.free_disk_bytes)} free in {host.directory}"
    if host.free_disk_bytes < _LITTLE_DISK_BYTES:
        hint = "a run of many steps may fill it: give --out elsewhere, or --max-run-size"
        return Finding(subject="disk", state="warning", text=text, hint=hint)
    return Finding(subject="disk", state="ok", text=text)


def _variables(host: HostFacts) -> Iterator[Finding]:
    for name, value in host.variables.items():
        if value.upper() not in _OFF:
            yield Finding(
                subject="environment",
                state="warning",
                text=f"{name}={value}",
                hint=f"{ODD_VARIABLES[name]}: unset it",
            )


def trial_finding(trial: TrialFacts) -> Finding:
    subject = "recording" if trial.num_ranks == 1 else f"{trial.num_ranks} ranks"
    if trial.exit_code is None:
        text = f"a small training did not end in the {TIME_LIMIT_S:.0f} s that it has"
        # What it said last was no error: it may have been about to end.
        last = f"; it last said: {trial.last_words}" if trial.last_words else ""
        hint = f"it takes seconds where cores are free: try again once other programs leave some{last}"
        return Finding(subject=subject, state="problem", text=text, hint=hint)
    if trial.exit_code != 0:
        text = f"a small training ended with exit code {trial.exit_code}"
        hint = trial.last_words or "it left no message"
        return Finding(subject=subject, state="problem", text=text, hint=hint)
    if trial.is_same_output is False:
        text = "a small training prints something else when it is recorded"
        hint = "that must not happen: please report it, with this output"
        return Finding(subject=subject, state="problem", text=text, hint=hint)
    if trial.peak_bytes is None or trial.unexplained_bytes is None:
        hint = trial.last_words or "it left no message"
        return Finding(subject=subject, state="problem", text="a small training left no peak", hint=hint)
    same = "" if trial.is_same_output is None else ", its losses as without it"
    text = (
        f"a small training: peak {format_bytes(trial.peak_bytes)}, "
        f"unexplained {format_bytes(trial.unexplained_bytes)}{same}"
    )
    if trial.unexplained_bytes > trial.peak_bytes / 100:
        hint = "more than a hundredth has no label here: trust the peak, and its categories less"
        return Finding(subject=subject, state="warning", text=text, hint=hint)
    return Finding(subject=subject, state="ok", text=text)
