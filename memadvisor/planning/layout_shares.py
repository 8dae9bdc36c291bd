"""What each device of a pipeline has of the model, told apart as far as bounds of time and memory depend on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.stages import stage_layers
from memadvisor.errors import UsageError
from memadvisor.layout import Layout
from memadvisor.software_traits import Software


@dataclass(frozen=True, slots=True)
class Contents:
    """Layers of each of the model's kinds, in the order of `Architecture.kinds`, and its ends."""

    layers: tuple[int, ...]
    embedding: int
    head: int

    @property
    def num_layers(self) -> int:
        return sum(self.layers)

    def numbers(self) -> tuple[int, ...]:
        return *self.layers, self.embedding, self.head


# How often each of them.
Counted = tuple[tuple[int, Contents], ...]


@dataclass(frozen=True, slots=True)
class Share:
    """Of one device: its chunks, and those of the model before its first one; each also all together. `chain`: all chunks of
    the model, which a microbatch goes through one after the other; the same of each device."""

    device: int
    chunks: Counted
    whole: Contents
    before: Counted
    whole_before: Contents
    fewest: int  # layers of its smallest chunk
    messages: int  # of a microbatch's forwards, or of its backwards
    messages_before: int  # of the chunks before
    chain: Counted


# Of the devices that may be the busiest, and of those that may be the fullest.
Shares = tuple[tuple[Share, ...], tuple[Share, ...]]


@lru_cache(maxsize=4096)
def deal_shares(model: Architecture, software: Software, num_stages: int, chunks: int) -> Shares:
    """Of looped chunks: device d has the chunks d, d + p, ... Nothing where the layers cannot be dealt out."""
    try:
        layers = stage_layers(model, Layout(pipeline=num_stages, chunks=chunks), software)
    except UsageError:
        return (), ()
    contents, nothing = _contents(model, layers), Contents((0,) * len(model.kinds()), 0, 0)
    chain = _counted(contents)
    shares = []
    for device in range(num_stages):
        mine = contents[device::num_stages]
        shares.append(
            Share(
                device=device,
                chunks=_counted(mine),
                whole=_together(mine, nothing),
                before=_counted(contents[:device]),
                whole_before=_together(contents[:device], nothing),
                fewest=min(chunk.num_layers for chunk in mine),
                messages=sum(map(_messages, mine)),
                messages_before=sum(map(_messages, contents[:device])),
                chain=chain,
            )
        )
    work_numbers = _numbers_with_messages if software.stalled_message_s else _work_numbers
    return _telling(shares, work_numbers), _telling(shares, _memory_numbers)


def can_be_dealt(model: Architecture, software: Software, num_stages: int, chunks: int) -> bool:
    """Whether the model's layers fill so many stages."""
    return bool(deal_shares(model, software, num_stages, chunks)[0])


@lru_cache(maxsize=64)
def whole_model(model: Architecture) -> Contents:
    return Contents(tuple(count for count, _ in model.kinds().values()), 1, 1)


def _contents(model: Architecture, layers: tuple[int, ...]) -> list[Contents]:
    """Of each chunk."""
    kinds = model.kinds()
    found, start = [], 0
    for chunk, number in enumerate(layers):
        among = model.kinds_among(range(start, start + number))
        counts = tuple(among.get(kind, (0, 0))[0] for kind in kinds)
        found.append(Contents(counts, int(chunk == 0), int(chunk == len(layers) - 1)))
        start += number
    return found


def _messages(chunk: Contents) -> int:
    """In which a chunk's forward hears and speaks: to the chunk before it, unless it is the first, and to that after it."""
    return 2 - chunk.embedding - chunk.head


def _counted(chunks: Sequence[Contents]) -> Counted:
    return tuple((times, chunk) for chunk, times in Counter(chunks).items())


def _together(chunks: Sequence[Contents], nothing: Contents) -> Contents:
    """`nothing`: of the model's kinds of layer none, and neither end."""
    numbers = [nothing.numbers(), *(chunk.numbers() for chunk in chunks)]
    *layers, embedding, head = (sum(each) for each in zip(*numbers, strict=True))
    return Contents(tuple(layers), embedding, head)


def _telling(shares: list[Share], numbers: Callable[[Share], tuple[int, ...]]) -> tuple[Share, ...]:
    """Those that no other has as much of everything as."""
    first: dict[tuple[int, ...], Share] = {}
    for share in shares:
        first.setdefault(numbers(share), share)

    def is_beaten(these: tuple[int, ...]) -> bool:
        return any(
            those != these and all(more >= less for more, less in zip(those, these, strict=True))
            for those in first
        )

    return tuple(share for these, share in first.items() if not is_beaten(these))


def _work_numbers(share: Share) -> tuple[int, ...]:
    return *share.whole.numbers(), *share.whole_before.numbers()


def _numbers_with_messages(share: Share) -> tuple[int, ...]:
    return *_work_numbers(share), share.messages, share.messages_before


def _memory_numbers(share: Share) -> tuple[int, ...]:
    return *share.whole.numbers(), -share.device, share.fewest
