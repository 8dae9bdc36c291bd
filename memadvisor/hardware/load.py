"""Hardware by name (the catalogue of data sheets) or from a file (what `memadvisor calibrate` wrote).

The file is one JSON object with the fields of `Hardware`:

    {"format": 1, "name": "...", "kind": "measured", "source": "...",
     "memory_bytes": 85899345920 | null, "memory_bandwidth_bytes_per_s": 1.9e12 | null,
     "peak_flops_per_s": {"bfloat16": 2.8e14},
     "collectives": [{"operation": "all_reduce", "num_ranks": 8,
                      "sizes_bytes": [1024, 1048576], "durations_s": [2e-5, 9e-5]}],
     "disk": {"read_bytes_per_s": 2e9, "write_bytes_per_s": 1e9}, "host": null,
     "page_cache": {"bandwidth": {"read_bytes_per_s": 5e9, "write_bytes_per_s": 3e9}, "size_bytes": 8589934592}}

`disk`, `page_cache`, `host`, `coder` (as `disk`, of optimizer state in 8 bits) and `overlap` (`{"compute": 1.2,
"collective": 1.5, "late_s": 1e-3, "spread": 0.05}`, of which the last two may be missing) may be missing; so may
`disk_both_ways`, `page_cache_both_ways` and `host_both_ways` (as `disk`), `matmuls`, `optimizers`, and the `pieces` of a
collective, which are lists of what hardware.py says, and `engine`, with the seconds of its EngineCost, and `paging`, with
those of its PagingCost.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from difflib import get_close_matches
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from memadvisor.errors import UnknownHardwareError, UsageError
from memadvisor.hardware.catalogue import CATALOGUE, find_entry
from memadvisor.hardware.hardware import (
    CollectiveCurve,
    EngineCost,
    Hardware,
    LinkPiece,
    MatmulRate,
    OptimizerRate,
    OverlapSlowdown,
    PageCache,
    PagingCost,
    TierBandwidth,
)
from memadvisor.json_field import JsonField, read_json
from memadvisor.run.files import may_be_there, write_output

FORMAT = 1
_TIERS = ("disk", "host", "coder", "disk_both_ways", "page_cache_both_ways", "host_both_ways")
_NUM_NEAREST = 5  # devices that are named where another was meant
KINDS = ("datasheet", "measured", "given")

_Cost = TypeVar("_Cost", EngineCost, PagingCost)


def load_hardware(name_or_path: str) -> Hardware:
    """The catalogue's entry of that name, else the file of that name.

    Raises UnknownHardwareError when it is neither, UsageError when the file is broken.
    """
    known = named_hardware(name_or_path)
    if known is not None:
        return known
    path = Path(name_or_path)
    if path.suffix == ".json" or may_be_there(path):
        return _read(path)
    raise UnknownHardwareError(
        f"{name_or_path!r} is neither a known device nor a file.",
        hint=f"{_nearest(name_or_path)}; measure yours with `memadvisor calibrate -o hardware.json`.",
    )


def _nearest(name: str) -> str:
    """The few known devices that a name may have meant; what all of them begin with where it is like none."""
    entries = {entry.name.casefold(): entry.name for entry in CATALOGUE}
    heads: dict[str, list[str]] = {}
    for entry in entries.values():
        heads.setdefault(entry.partition("-")[0].casefold(), []).append(entry)
    near = [entries[each] for each in get_close_matches(name.casefold(), entries, n=_NUM_NEAREST, cutoff=0.5)]
    of_family = get_close_matches(name.casefold().partition("-")[0], heads, n=2, cutoff=0.6)
    near += [entry for head in of_family for entry in heads[head]]
    shown = list(dict.fromkeys(near))[:_NUM_NEAREST]
    if shown:
        return f"the nearest known are {', '.join(shown)}"
    return f"known names begin with {', '.join(dict.fromkeys(each.partition('-')[0] for each in entries.values()))}"


def named_hardware(name: str) -> Hardware | None:
    """What the data sheet says of a device, by its catalogue name or the name its driver reports."""
    entry = find_entry(name)
    if entry is None:
        return None
    return Hardware(
        name=entry.name,
        kind="datasheet",
        source="; ".join(dict.fromkeys(entry.sources.values())),
        memory_bytes=entry.memory_bytes,
        memory_bandwidth_bytes_per_s=entry.memory_bandwidth_bytes_per_s,
        peak_flops_per_s=dict(entry.peak_flops_per_s),
    )


def save_hardware(hardware: Hardware, path: str | Path) -> None:
    """Write a hardware file, readable by its owner alone. Raises UsageError when it cannot be written."""
    fields = {f.name: getattr(hardware, f.name) for f in dataclasses.fields(hardware)}
    fields["peak_flops_per_s"] = dict(hardware.peak_flops_per_s)
    for name in ("collectives", "alternatives", "matmuls", "optimizers"):
        fields[name] = [dataclasses.asdict(row) for row in getattr(hardware, name)]
    for tier in ("page_cache", "overlap", "engine", "paging", *_TIERS):
        bandwidth = getattr(hardware, tier)
        fields[tier] = None if bandwidth is None else dataclasses.asdict(bandwidth)
    text = json.dumps({"format": FORMAT, **fields}, indent=1) + "\n"
    write_output(path, text, hint="name a file in a writable directory.")


def _read(path: Path) -> Hardware:
    try:
        value = read_json(path).value
    except OSError as error:
        raise UsageError(
            f"{str(path)!r} cannot be read: {error.strerror}.",
            hint="write one with `memadvisor calibrate -o hardware.json`.",
        ) from error
    except ValueError as error:
        raise UsageError(
            f"{str(path)!r} is not JSON: {error}.",
            hint="write one with `memadvisor calibrate -o hardware.json`.",
        ) from error
    return hardware_from_json(value, repr(str(path)))


def hardware_from_json(value: Any, source: str) -> Hardware:
    """Hardware from the JSON object described above. Raises UsageError, naming `source` and the field, for anything
    else."""
    try:
        return _hardware_from_json(JsonField(value))
    except ValueError as error:
        raise UsageError(
            f"{source} is not a hardware file: {error}.",
            hint="write one with `memadvisor calibrate -o hardware.json`.",
        ) from error


def _hardware_from_json(value: JsonField) -> Hardware:
    for name, known in (("format", (FORMAT,)), ("kind", KINDS)):
        if value[name].value not in known:
            value[name].refuse(" or ".join(map(json.dumps, known)))
    return Hardware(
        name=value["name"].typed(str),
        kind=value["kind"].value,
        source=value["source"].typed(str),
        memory_bytes=value["memory_bytes"].maybe(_whole),
        memory_bandwidth_bytes_per_s=value["memory_bandwidth_bytes_per_s"].maybe(_positive),
        peak_flops_per_s={dtype: _positive(rate) for dtype, rate in value["peak_flops_per_s"].items()},
        collectives=tuple(_curve(item) for item in value["collectives"]),
        alternatives=tuple(_curve(item) for item in value.get("alternatives", ())),
        page_cache=value.get("page_cache").maybe(_page_cache),
        overlap=value.get("overlap").maybe(_overlap),
        engine=value.get("engine").maybe(partial(_seconds, EngineCost)),
        paging=value.get("paging").maybe(partial(_seconds, PagingCost)),
        matmuls=tuple(_matmul(item) for item in value.get("matmuls", ())),
        optimizers=tuple(_optimizer(item) for item in value.get("optimizers", ())),
        **{name: value.get(name).maybe(_tier) for name in _TIERS},
    )


def _curve(value: JsonField) -> CollectiveCurve:
    sizes = tuple(_whole(size) for size in value["sizes_bytes"])
    durations = tuple(_positive(duration) for duration in value["durations_s"])
    if len(sizes) != len(durations) or not sizes:
        raise ValueError(f"{value.place} needs as many durations as sizes, and at least one")
    if any(after <= before for before, after in pairwise(sizes)):
        raise ValueError(f"{value.place}.sizes_bytes must ascend")
    return CollectiveCurve(
        operation=value["operation"].typed(str),
        num_ranks=_whole(value["num_ranks"]),
        sizes_bytes=sizes,
        durations_s=durations,
        pieces=tuple(_piece(item) for item in value.get("pieces", ())),
        algorithm=value.get("algorithm").typed(str, optional=True),
    )


def _piece(value: JsonField) -> LinkPiece:
    return LinkPiece(
        from_bytes=_whole(value["from_bytes"]),
        alpha_s=_zero_or_more(value["alpha_s"]),
        bytes_per_s=_positive(value["bytes_per_s"]),
        residual_fraction=_zero_or_more(value["residual_fraction"]),
    )


def _matmul(value: JsonField) -> MatmulRate:
    return MatmulRate(
        dtype=value["dtype"].typed(str),
        rows=_whole(value["rows"]),
        columns=_whole(value["columns"]),
        depth=_whole(value["depth"]),
        flops_per_s=_positive(value["flops_per_s"]),
    )


def _optimizer(value: JsonField) -> OptimizerRate:
    return OptimizerRate(
        optimizer=value["optimizer"].typed(str),
        implementation=value["implementation"].typed(str),
        elements_per_s=_positive(value["elements_per_s"]),
    )


def _tier(value: JsonField) -> TierBandwidth:
    return TierBandwidth(
        read_bytes_per_s=_positive(value["read_bytes_per_s"]),
        write_bytes_per_s=_positive(value["write_bytes_per_s"]),
    )


def _overlap(value: JsonField) -> OverlapSlowdown:
    found = OverlapSlowdown(
        compute=_positive(value["compute"]),
        collective=_positive(value["collective"]),
        late_s=value.get("late_s").maybe(_zero_or_more),
        spread=value.get("spread").maybe(_zero_or_more),
    )
    if min(found.compute, found.collective) < 1:
        raise ValueError("at the same time nothing is faster than alone: overlap's factors are 1 or more")
    return found


def _zero_or_more(value: JsonField) -> float:
    return 0.0 if value.value == 0 and value.value is not False else _positive(value)


def _seconds(kind: type[_Cost], value: JsonField) -> _Cost:
    """A record all of whose fields are seconds."""
    names = (field.name for field in dataclasses.fields(kind))
    return kind(**{name: _zero_or_more(value[name]) for name in names})


def _page_cache(value: JsonField) -> PageCache:
    return PageCache(bandwidth=_tier(value["bandwidth"]), size_bytes=_whole(value["size_bytes"]))


def _whole(value: JsonField) -> int:
    if value.typed(int) <= 0:
        value.refuse("a positive whole number")
    return int(value.value)


def _positive(value: JsonField) -> float:
    rate = value.value
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= sys.float_info.max:
        value.refuse("a positive number")
    return float(rate)
