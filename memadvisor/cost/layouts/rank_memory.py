"""What a rank holds at its peak, component by component, and what of it the allocator can do without."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes on one rank. `allocator_bytes`: what the caching allocator holds beyond its tensors. `context_bytes` are the
    driver's and the communicators', which no allocator of torch sees: they are in `total_bytes` alone. `cached_bytes`:
    what the allocator holds besides, but gives up before memory runs out.
    """

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    activation_bytes: float
    head_bytes: float
    buffer_bytes: float
    allocator_bytes: float
    context_bytes: float
    cached_bytes: float = 0.0

    @property
    def states_bytes(self) -> float:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def allocated_bytes(self) -> float:
        """Tensors alone, as `max_memory_allocated` counts them."""
        return (
            self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes
            + self.head_bytes + self.buffer_bytes
        )  # fmt: skip

    @property
    def needed_bytes(self) -> float:
        """What of the device's memory the allocator cannot do without."""
        return self.allocated_bytes + self.allocator_bytes

    @property
    def peak_bytes(self) -> float:
        """What the allocator reserves, as `max_memory_reserved` counts it."""
        return self.needed_bytes + self.cached_bytes

    @property
    def total_bytes(self) -> float:
        return self.peak_bytes + self.context_bytes


def within(memory: StageMemory, device_bytes: int) -> StageMemory:
    """The same on a device of so much memory: the allocator gives up what it only keeps where that would not fit."""
    room = max(0.0, device_bytes - memory.needed_bytes - memory.context_bytes)
    return memory if memory.cached_bytes <= room else replace(memory, cached_bytes=room)
