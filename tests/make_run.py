"""A synthetic run of a small GPT, worked out from a few numbers, for tests of everything that reads runs.

Each rank trains an embedding, some blocks and a head in float32 with AdamW under data parallelism. One step
is traced. The allocator's peak is summed by brute force, so that tests may compare an analyzer with it.
Change anything by keyword, or with `dataclasses.replace` on the frozen result.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from memadvisor.plan_file import plan_to_json
from memadvisor.run.documents import Note
from memadvisor.run.files import write_private_file
from memadvisor.run.journal import JournalWriter
from memadvisor.run.records import (
    TABLES,
    Step,
    Storage,
)
from memadvisor.run.run import Manifest, RankRun, Run
from memadvisor.run.store import write_manifest
from tests.play_training import Recorder, Settings


def make_run(**changes: object) -> Run:
    """A whole run in memory. Keywords are the fields of `Settings`."""
    settings = Settings(**changes)  # type: ignore[arg-type]
    present = [rank for rank in range(settings.num_ranks) if rank not in settings.missing_ranks]
    return Run(
        path=settings.path,
        manifest=Manifest(
            format=(1, 0),
            memadvisor_version="0.1.0",
            created_unix_s=1.7e9 + settings.start_s,
            world_size=settings.num_ranks,
            script="train_gpt.py",
            arguments=("--blocks", str(settings.num_blocks)),
        ),
        ranks=tuple(Recorder(settings, rank).record() for rank in present),
        missing_ranks=settings.missing_ranks,
        problems=settings.problems,
        plan=settings.plan,
    )


def stopped(rank: RankRun) -> RankRun:
    """As if the recorder had given up, with its line, while the script went on."""
    note = Note(level="error", text="memadvisor stopped recording: ValueError: planted", time_s=None)
    return dataclasses.replace(rank, notes=(*rank.notes, note))


def write_run(run: Run, directory: Path) -> Path:
    """Write a run as capture would, so that `load_run(directory)` gives it back; returns `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    write_manifest(directory, run.manifest)
    if run.plan is not None:
        write_private_file(directory / "plan.json", json.dumps(plan_to_json(run.plan)))
    for rank in run.ranks:
        writer = JournalWriter(directory / f"rank{rank.process.rank}.pid{rank.process.pid}.journal")
        writer.write_document("process", dataclasses.asdict(rank.process))
        for table in TABLES:
            writer.write_rows(table, getattr(rank, table))
        for note in rank.notes:
            writer.write_document("note", dataclasses.asdict(note))
        if rank.ending is not None:
            writer.write_document("ending", dataclasses.asdict(rank.ending))
        writer.close()
    return directory


def storage(**changes: object) -> Storage:
    """One storage, alive from 0 s on the processor; for tests that build their own."""
    fields: dict[str, object] = {
        "storage_id": 0,
        "birth_s": 0.0,
        "death_s": None,
        "size_bytes": 100,
        "category": "activation",
        "dtype": "float32",
        "shape": "(25,)",
        "module": "",
        "unit": "",
        "phase": "forward",
        "micro_batch": 0,
        "operator": "aten::mm",
        "device": "cpu",
        "last_use_s": None,
        "last_forward_use_s": None,
    }
    return Storage(**{**fields, **changes})  # type: ignore[arg-type]


def step(**changes: object) -> Step:
    """One timed step of 0.1 s; for tests that build their own."""
    fields: dict[str, object] = {
        "index": 0,
        "start_s": 0.0,
        "end_s": 0.1,
        "traced": False,
        "num_micro_batches": 1,
        "num_samples": None,
        "num_tokens": None,
        "allocated_bytes": None,
        "peak_allocated_bytes": None,
        "peak_reserved_bytes": None,
        "recorder_s": None,
    }
    return Step(**{**fields, **changes})  # type: ignore[arg-type]
