"""What a profiled process leaves behind of the `torch.utils.data.DataLoader`s that its training reads.

As in records.py each class is one table of the journal. A script without a DataLoader, one whose batches another thread
fetches, and a run of an older version have rows in neither.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoaderInfo:
    """How a DataLoader is set up from which the training's thread has read; `loader` is its number in `DataWait`.

    Loaders of the same data set that are set up alike are one, also where the script makes a new one for each epoch.
    `prefetch_factor`: None without workers. `batch_size`: None where the loader batches nothing, or its batch sampler does
    not say. `pin_memory` is what was asked for; without an accelerator nothing is pinned.
    """

    loader: int
    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool
    persistent_workers: bool
    batch_size: int | None


@dataclass(frozen=True, slots=True)
class DataWait:
    """How long the training's thread was in a DataLoader's iterator in one step, for `num_batches` batches.

    `phase` is the one that it waited in, `outside` for most: a loader may be read inside an optimizer's closure.
    `is_evaluation`: without gradients; or while all models that were trained were in evaluation mode, from a loader that is
    not read while they train. `wait_s` is on the time axis of the step. On a device that is its own time, as a span's: a
    wait that it passes while it still has work is short there, or nothing. `thread_s` is how long the thread itself
    waited. `num_starts` passes over the loader began; `start_s` of `wait_s` were for them: the loader made its iterator,
    and with it the workers, or woke those that last; gave out its first batch; and said that there was no more.
    """

    step: int
    loader: int
    phase: str
    is_evaluation: bool
    num_batches: int
    wait_s: float
    thread_s: float
    num_starts: int
    start_s: float
