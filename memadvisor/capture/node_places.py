"""Which module's forward made a node of the backward, by the node's sequence number.

Autograd numbers its nodes in the order that a thread makes them. So it is enough to know the number at each place
that the forward comes to: what was made from there on, up to the next place, is of that one.
"""

from __future__ import annotations

from torch._C._autograd import _get_sequence_nr

from memadvisor.capture.label_log import Place

LEAST_OF_LEAVES = 2**62  # gradient accumulation nodes carry the largest number


class NodePlaces:
    def __init__(self) -> None:
        self._marks: list[tuple[int, Place]] = []
        self.known: dict[int, Place] = {}  # of the nodes that have been asked for

    def mark(self, place: Place) -> None:
        """Nodes made from here on belong to this place."""
        marks, number = self._marks, _get_sequence_nr()
        if not marks or number >= marks[-1][0]:  # another thread (CUDA's backward) counts from 0 again
            marks.append((number, place))

    def of_node(self, number: int, now: Place) -> Place:
        """The place in the backward of the node with this number; `now` where nobody knows it."""
        marks = self._marks
        low, high = 0, len(marks)
        while low < high:
            middle = (low + high) // 2
            if marks[middle][0] <= number:
                low = middle + 1
            else:
                high = middle
        if low == 0 or number >= LEAST_OF_LEAVES:
            return now
        made = marks[low - 1][1]
        found = self.known[number] = Place("backward", made.module, made.unit, now.micro_batch)
        return found
