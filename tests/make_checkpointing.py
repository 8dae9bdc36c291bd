"""Rows of what checkpointing a module would do, for tests of the views that show them."""

from memadvisor.analyzers.checkpointing import CheckpointedModule

PEAK_BYTES = 100 * 2**20


def checkpointed(name, saved_bytes, extra_time_s=None, obstacle=""):
    """A module whose checkpoint lowers a peak of `PEAK_BYTES` by so much, or cannot be for a reason."""
    return CheckpointedModule(
        name=name,
        type_name="Block",
        modules=(name,),
        num_calls=1,
        freed_bytes=saved_bytes,
        still_kept_bytes={},
        peak_bytes=PEAK_BYTES - (saved_bytes or 0),
        peak_saved_bytes=saved_bytes,
        peak_position="backward",
        recomputed_flops=None,
        extra_time_s=extra_time_s,
        obstacle=obstacle,
    )
