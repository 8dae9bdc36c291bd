"""The tree of modules, with what each subtree holds at the peak and keeps for the backward."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from memadvisor.analyzers.activations import Activations
from memadvisor.analyzers.peak import PeakBreakdown
from memadvisor.run.records import Module, Parameter


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A module with its subtree. Bytes are the analyzers' own, summed over the subtree; None: not recorded.

    `peak_bytes` were alive at the peak, and born while a module of the subtree was the innermost one running;
    what was there before the step counts where its unit is, if it has one.
    """

    name: str
    type_name: str
    unit: str
    depth: int
    num_parameters: int  # tied ones once
    peak_bytes: int | None
    saved_bytes: int | None
    children: tuple[TreeNode, ...]

    @property
    def label(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2] or "(model)"


def module_tree(
    modules: tuple[Module, ...],
    parameters: tuple[Parameter, ...],
    peak: PeakBreakdown | None,
    activations: Activations | None,
) -> TreeNode:
    """Nest modules by their dotted names; what names no module of the list belongs to its nearest parent."""
    known = {module.name: module for module in modules}
    known.setdefault("", Module(name="", type_name="", unit=""))
    children: dict[str, list[str]] = {name: [] for name in known}
    for name in known:
        if name:
            children[_parent(name, known)].append(name)

    def owner(name: str) -> str:
        return name if name in known else _parent(name, known)

    own_parameters: Counter[str] = Counter()
    for parameter in parameters:
        if not parameter.tied_to:
            own_parameters[_parent(parameter.name, known)] += parameter.num_elements
    own_peak: Counter[str] = Counter()
    for part in peak.by_module if peak is not None else ():
        own_peak[owner(part.module or part.unit)] += part.size_bytes
    own_saved: Counter[str] = Counter()
    for kept in activations.modules if activations is not None else ():
        own_saved[owner(kept.name)] += kept.saved_bytes

    def build(name: str, depth: int) -> TreeNode:
        below = tuple(build(child, depth + 1) for child in children[name])
        return TreeNode(
            name=name,
            type_name=known[name].type_name,
            unit=known[name].unit,
            depth=depth,
            num_parameters=own_parameters[name] + sum(child.num_parameters for child in below),
            peak_bytes=None if peak is None else own_peak[name] + sum(c.peak_bytes or 0 for c in below),
            saved_bytes=None
            if activations is None
            else own_saved[name] + sum(c.saved_bytes or 0 for c in below),
            children=below,
        )

    return build("", 0)


def _parent(name: str, known: dict[str, Module]) -> str:
    while name:
        name = name.rpartition(".")[0]
        if name in known:
            return name
    return ""
