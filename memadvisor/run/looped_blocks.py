"""Blocks that a loop calls: modules that are no blocks by how the model is made (cut.py), and are called several times within
one call of the module around them, or, of a model, before one backward.

The function of a neural differential equation, a decoder's step, an update that refines an estimate, a network that is asked
about a batch in chunks: each call keeps something, so each is what may run again. Where there are blocks inside of such a module
the finer cut stays, unless the loop goes round more often than blocks are called within one call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from memadvisor.run.cut import ModuleNode, cut_units

_LOOP = 2  # calls


@dataclass(slots=True)
class SeenCalls:
    """`most`: by module, how often it was called at most within one call of whatever called it. `inside`: by module, the
    modules that were called within one of its calls, and how often at most."""

    most: dict[str, int] = field(default_factory=dict)
    inside: dict[str, dict[str, int]] = field(default_factory=dict)

    def see_loop(self, name: str, number: int) -> None:
        """Something has called it so often by itself."""
        self.most[name] = max(number, self.most.get(name, 0))

    def see_call(self, name: str, within: Mapping[str, int]) -> None:
        known = self.inside.setdefault(name, {})
        for inner, number in within.items():
            known[inner] = max(number, known.get(inner, 0))


def looped_blocks(root: ModuleNode, seen: SeenCalls) -> frozenset[str]:
    """Names of the modules that are blocks for being called in a loop; none inside of another."""
    chosen: frozenset[str] = frozenset()
    for node in _inner_first(root):
        num_calls = seen.most.get(node.name, 0)
        if num_calls < _LOOP or not node.children:
            continue
        units = cut_units(root, chosen)
        inside = {each.name: each for each in _inner_first(node)}
        own = {units[each.name] for each in inside.values() if each.num_own_parameters}
        if not own or own == {units[node.name]}:
            continue  # without parameters, or of one unit
        blocks = {name for name in own & {*inside} - {node.name} if inside[name].children}
        within = seen.inside.get(node.name, {})
        if num_calls > sum(within.get(name, 1) for name in blocks):
            chosen = frozenset({*chosen - {*inside}, node.name})
    return chosen


def looped_blocks_of(root: ModuleNode, planned: Collection[str]) -> frozenset[str]:
    """The same as a plan has them, which names all units: those inside of which it names none, though the cut has some."""
    if not planned:
        return frozenset()
    usual = cut_units(root)
    found = set()
    for node in _inner_first(root):
        if node.name in planned and node.children:
            inside = {each.name for each in _inner_first(node)} - {node.name}
            own = {usual[each.name] for each in _inner_first(node) if each.num_own_parameters}
            if own & inside and inside.isdisjoint(planned):
                found.add(node.name)
    return frozenset(found)


def _inner_first(node: ModuleNode) -> Iterator[ModuleNode]:
    for child in node.children:
        yield from _inner_first(child)
    yield node
