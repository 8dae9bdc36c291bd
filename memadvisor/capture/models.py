"""The models that the script trains, discovered at their first call: names, units, parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from functools import reduce

import torch

from memadvisor.capture.askers import Askers, is_all_of
from memadvisor.capture.loose_parameters import LooseParameters
from memadvisor.capture.module_info import ModuleInfo, module_infos, new_prefix, parameter_row, unnamed_info
from memadvisor.capture.owners import frozen_owner, parts_beside, trained_owner
from memadvisor.capture.pipeline_stages import pipeline_stages
from memadvisor.capture.position import Position
from memadvisor.capture.script_shards import shard_groups
from memadvisor.capture.tensor_parallel import num_data_dims, own_shape, tensor_parallel
from memadvisor.capture.unit_rows import unit_rows
from memadvisor.capture.unstepped import LOOSE, note_of_uncalled
from memadvisor.in_making import is_in_making, is_taken_apart
from memadvisor.run.cut import ModuleNode, cut_units, innermost, inside_wrapper, module_tree, unwrap
from memadvisor.run.living import outermost_modules
from memadvisor.run.looped_blocks import looped_blocks
from memadvisor.run.parallel_records import ShardGroup, TensorParallel
from memadvisor.run.records import Module, Parameter, Unit
from memadvisor.run.remote import holds_remote

_Stack = Sequence[ModuleInfo]  # the modules that are running, innermost last
_MOST_SEARCHES = 16  # for the model that a part is of


class Models:
    """All discovered root models, by module id. Holds no strong reference to any of them."""

    def __init__(self) -> None:
        self._infos: dict[int, ModuleInfo] = {}
        self.plain: set[int] = set()  # ids of the plain ones
        self._roots: list[tuple[str, weakref.ref[torch.nn.Module]]] = []
        # By prefix, the parts of a root: where it is made anew for each step, they are what lasts.
        self._parts: dict[str, list[tuple[str, weakref.ref[torch.nn.Module]]]] = {}
        self._kinds: dict[str, ModuleNode] = {}
        self._met: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._met_last: weakref.ref[torch.optim.Optimizer] | None = None
        self._loose = LooseParameters()
        self.num_prefixes = self._num_searches = 0
        self._askers = Askers()
        self._order: dict[str, None] = {}  # units in order of first execution
        self._looped: frozenset[str] = frozenset()  # blocks that a loop calls
        self._counts_calls = True

    def info(self, module: torch.nn.Module, around: _Stack = ()) -> ModuleInfo | None:
        info = self._infos.get(id(module))
        if info is not None and not self._askers.is_over and self._askers.may_be_asked(info, around):
            info = self._take_inside(module, info)
        if info is not None and info.is_shared and around and around[-1].is_of_model:
            return replace(info, unit=around[-1].unit)
        return info

    def is_of_model(self, module: torch.nn.Module) -> bool:
        """Whether it is known as a model, or a part of one, and no loss, metric, or module around a training."""
        info = self._infos.get(id(module))
        return info is not None and info.is_of_model and not info.is_around

    def set_aside(self, infos: Sequence[ModuleInfo]) -> None:
        """Calls of these modules are no forwards from now on (around.py)."""
        around = {key: replace(info, is_around=True) for key, info in self._infos.items() if info in infos}
        self._infos.update(around)

    def discover(
        self, module: torch.nn.Module, around: _Stack = (), *, is_traced: bool = False
    ) -> ModuleInfo:
        """Name a module that is called for the first time, inside those; the outermost one with parameters is a model.

        Where this one and one before it are parts of a third that is trained (an encoder, a decoder), that is the model; so
        is a frozen one of which a part is called alone (a VAE's encoder). Not in a traced step, whose names stand.
        """
        if holds_remote(module):  # what it calls of this process is a model; it cannot be asked for its parts
            return self._remember(module, unnamed_info(module, is_around=True))
        root = module if around else unwrap(module)
        is_new = not around and id(root) not in self._infos and any(True for _ in root.parameters())
        if is_new and not is_in_making(root) and not is_taken_apart():
            former = self._former_of(root)
            owner = self._owner_of(root) if former is None and not is_traced else None
            self._add_root(root, former) if owner is None else self._take(owner)
        info = self._infos.get(id(root))
        if info is None:
            return unnamed_info(module, around)
        if root is not module:  # the wrapper, whose own call stands for the model's
            info = replace(info, is_unit=False, is_root=True, is_plain=False, has_own_span=False)
            wrapper: torch.nn.Module | None = module
            while wrapper is not None and wrapper is not root:
                self._remember(wrapper, info)
                wrapper = inside_wrapper(wrapper)
        return info

    def discover_owners(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Find the models that own these parameters, though no call of theirs was seen; False: there are none.

        A model that is compiled together with its caller runs no hook. What is around known models is none of its own
        (an agent that holds an actor, its critics and a temperature): there it is what holds the parameters beside them.
        """
        wanted, known = {id(parameter) for parameter in parameters}, {id(root) for _, root in self.roots()}
        found = False
        for module in outermost_modules(torch.nn.Module):
            if not any(id(parameter) in wanted for parameter in module.parameters()):
                continue
            is_apart = known.isdisjoint(map(id, module.modules()))
            for part in [module] if is_apart else parts_beside(module, known, wanted):
                self.discover(part) if is_apart else self._add_root(part)
                found = True
        return found

    def meet_uncalled(self, parameters: Sequence[torch.Tensor], had_backward: bool) -> str | None:
        """Find what is trained, where nothing was seen to be called: what to say of it, None where nothing was found."""
        if all(parameter.grad is None for parameter in parameters):
            return None  # the model is yet to be called, by the optimizer's closure
        if self.discover_owners(parameters):
            return note_of_uncalled(had_backward)
        return LOOSE if self._loose.meet([*self.parameters()], parameters) else None

    def meet_trained(self, optimizer: torch.optim.Optimizer) -> None:
        """Find the models of an optimizer that has stepped for the first time, where none of its parameters is of a known
        one: meta-learning calls copies, and trains what they are copies of."""
        if self._met_last is not None and self._met_last() is optimizer:  # each step asks
            return
        self._met_last = weakref.ref(optimizer)
        self._askers.is_over = True
        if optimizer in self._met or self._num_searches >= _MOST_SEARCHES:
            return
        self._met.add(optimizer)
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if {id(parameter) for *_, parameter in self.parameters()}.isdisjoint(map(id, stepped)):
            self._num_searches += 1
            if not self.discover_owners(stepped):
                self._loose.meet([*self.parameters()], stepped)

    def note_order(self, unit: str) -> None:
        self._order.setdefault(unit)

    def _owner_of(self, part: torch.nn.Module) -> torch.nn.Module | None:
        """What is the model in place of `part`, a module around it; `part` itself where it is around a known model.

        None: there is none. Each search asks for all objects, so a script that makes models all the time is not followed.
        """
        known = {id(root) for _, root in self.roots()}
        is_trained = any(parameter.requires_grad for parameter in part.parameters())
        if is_trained and not known:
            return None
        if is_trained and not known.isdisjoint(map(id, part.modules())):
            return part
        self._num_searches += 1
        if self._num_searches > _MOST_SEARCHES:
            return None
        return trained_owner(part, known) if is_trained else frozen_owner(part, known)

    def _take(self, owner: torch.nn.Module) -> None:
        known = {id(root) for _, root in self.roots()}
        self._add_root(owner) if known.isdisjoint(map(id, owner.modules())) else self._join(owner)

    def _take_inside(self, module: torch.nn.Module, info: ModuleInfo) -> ModuleInfo:
        """What the script calls itself is the model in place of a module around all of it that only asks it."""
        root = next((root for prefix, root in self.roots() if prefix == info.model), module)
        if root is module or not is_all_of(module, root):
            return info
        for each in root.modules():
            self._forget(id(each))
        self._order.clear()
        self._add_root(module, info.model)
        for each in set(root.modules()) - set(module.modules()):
            self._remember(each, unnamed_info(each, is_around=True))
        return self._infos[id(module)]

    def see_loops(self, position: Position, *, keeps_names: bool) -> None:
        """The first step is over, in which no call was let pass: what a loop has called is a block from now on."""
        seen, is_running, position.loops = position.loops, bool(position.stack), None
        self._counts_calls = False
        self.plain.update(key for key, info in self._infos.items() if info.is_plain)
        if seen is None or keeps_names or is_running:  # of a trace, or of calls that have yet to return
            return
        # Of a pipeline's stage those are its micro-batches.
        staged = {stage.model for stage in pipeline_stages(self.roots())}
        for prefix, reference in [*self._roots]:
            root = None if prefix in staged else reference()
            looped = looped_blocks(self._kinds[prefix], seen.end())
            if root is not None and looped and not _holds_shard_groups(root, prefix, looped):
                self._looped |= looped
                self._cut_again(root, prefix)

    def _cut_again(self, root: torch.nn.Module, prefix: str) -> None:
        before = {id(each): self._infos[id(each)] for each in root.modules() if id(each) in self._infos}
        for key in before:
            self._forget(key)
        self._add_root(root, prefix)
        for key, info in before.items():
            if info.model != prefix or info.is_around or key not in self._infos:
                self._infos[key] = info  # of another model that shares it, or around the training
        renamed = {info.unit: self._infos[key].unit for key, info in before.items() if info.name == info.unit}
        self._order = {renamed.get(old, old): None for old in self._order}

    def _join(self, owner: torch.nn.Module) -> None:
        """What was named as models of their own are parts of `owner`, which takes the first one's place."""
        inside = {id(module) for module in owner.modules()}
        joined = [(prefix, root) for prefix, root in self.roots() if id(root) in inside]
        units_before = {
            id(module): info.unit
            for _, root in joined
            for module in root.modules()
            if (info := self._infos.get(id(module))) is not None  # its first call may have made modules
        }
        for key in units_before:
            self._forget(key)
        # Of a model that is gone its living parts are joined, by names that are none of a model.
        first = next(
            prefix
            for prefix, reference in self._roots
            if any(id(root) in inside for _, root in self._living(prefix, reference))
        )
        kept = [(prefix, reference) for prefix, reference in self._roots if reference() is not owner]
        gone = {id(root) for _, root in joined}
        taken = [
            any(id(part) in gone for _, part in self._living(prefix, reference)) for prefix, reference in kept
        ]
        self._roots = [entry for entry, is_taken in zip(kept, taken, strict=True) if not is_taken]
        self._add_root(owner, first, taken.index(True))
        renamed: dict[str, dict[str, None]] = {}
        for key, before in units_before.items():
            renamed.setdefault(before, {}).setdefault(self._infos[key].unit)
        self._order = {new: None for old in self._order for new in renamed.get(old, {old: None})}

    def _former_of(self, root: torch.nn.Module) -> str | None:
        """The prefix of a model that is gone and that this one is made after: it has all its living parameters and no
        others, as solvers of differential equations wrap what they integrate anew; or none of them lives, and it has the
        same modules, as copies of a model for each task."""
        gone = [prefix for prefix, reference in self._roots if reference() is None]
        own = {id(parameter) for parameter in root.parameters()} if gone else set()
        for prefix in gone:
            left = [part() for _, part in self._parts[prefix]]
            living_ids = {id(each) for part in left if part is not None for each in part.parameters()}
            if own == living_ids or (not living_ids and module_tree(root, prefix) == self._kinds[prefix]):
                return prefix
        return None

    def _add_root(self, root: torch.nn.Module, prefix: str | None = None, place: int | None = None) -> None:
        if prefix is None:
            prefix, self.num_prefixes = new_prefix(self._infos.values(), self.num_prefixes)
        self._kinds[prefix] = module_tree(root, prefix)
        units = cut_units(self._kinds[prefix], self._looped)
        before = [known for known, _ in self._roots]
        if prefix in before:
            place = before.index(prefix)
            del self._roots[place]
        self._roots.insert(len(self._roots) if place is None else place, (prefix, weakref.ref(root)))
        self._parts[prefix] = [
            (f"{prefix}.{name}" if prefix else name, weakref.ref(part))
            for name, part in root.named_children()
            if any(True for _ in part.parameters())
        ]
        for module, info in module_infos(root, prefix, units, self._looped):
            if id(module) not in self._infos:
                self._remember(module, info)

    def _remember(self, module: torch.nn.Module, info: ModuleInfo) -> ModuleInfo:
        key = id(module)
        self._infos[key] = info
        if info.is_plain and not self._counts_calls:
            self.plain.add(key)
        weakref.finalize(module, self._forget, key).atexit = False
        return info

    def _forget(self, key: int) -> None:
        self._infos.pop(key, None)
        self.plain.discard(key)

    def roots(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """(prefix, model) of the models that are still alive, and the living parts of those that are not."""
        for prefix, reference in self._roots:
            yield from self._living(prefix, reference)

    def _living(
        self, prefix: str, reference: weakref.ref[torch.nn.Module]
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        root = reference()
        if root is not None:
            yield prefix, root
            return
        for name, part in self._parts[prefix]:
            module = part()
            if module is not None:
                yield name, module

    def parameters(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """(name, unit, parameter), a tied parameter once, under its first name; last those that have none of a model's."""
        for name, unit, parameter in self._own_parameters():
            yield name, unit, self._loose.in_place_of(name, parameter)
        yield from self._loose.unnamed()

    def stood_in_for(self) -> Iterator[torch.Tensor]:
        """What a model has of the parameters that the script calls it with others in the place of."""
        for name, _, parameter in self._own_parameters():
            if self._loose.in_place_of(name, parameter) is not parameter:
                yield parameter

    def _own_parameters(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        seen: set[int] = set()
        for name, unit, parameter in self._all_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, unit, parameter

    def _all_parameters(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        for prefix, root in self.roots():
            for module_name, module in root.named_modules(prefix=prefix):
                info = self._infos.get(id(module))
                for name, parameter in module.named_parameters(recurse=False):
                    if not parameter.is_leaf:
                        continue  # what a step of meta-learning has made of a parameter, in a copy of the model
                    full = f"{module_name}.{name}" if module_name else name
                    yield full, info.unit if info else prefix, parameter

    def has_gradients(self, module: str | None) -> bool:
        """Whether a parameter of the model that a module is of has a gradient; None: of any model."""
        models = {prefix for prefix, _ in self._roots}
        return any(
            self._loose.in_place_of(name, parameter).grad is not None
            for prefix, root in self.roots()
            if module is None or innermost(prefix, models) == innermost(module, models)
            for name, parameter in root.named_parameters(prefix=prefix)
            if parameter.is_leaf
        )

    def buffers(self) -> Iterator[torch.Tensor]:
        for _, root in self.roots():
            yield from root.buffers()

    def parameter_rows(self, updated: Set[int] = frozenset()) -> list[Parameter]:
        """`updated`: ids of parameters for which an optimizer keeps state. They are trained, though the script may have
        frozen them for the moment, as Lightning's toggle_optimizer does with all but one optimizer's.
        """
        rows = self._own_rows(updated)
        loose = [*self._loose.unnamed()]
        if not loose or not all(each.device.type == "meta" for *_, each in self._all_parameters()):
            return rows
        return [parameter_row(name, unit, each, own_shape(each), True, "") for name, unit, each in loose]

    def _own_rows(self, updated: Set[int]) -> list[Parameter]:
        """Of what modules hold."""
        first_name: dict[int, str] = {}
        rows = []
        groups = shard_groups(self.roots())
        for prefix, root in self.roots():
            listed = torch.nn.Module.named_parameters(root, prefix=prefix, remove_duplicate=False)
            for name, own in listed:
                if not own.is_leaf:
                    continue
                tied_to = first_name.setdefault(id(own), name)
                parameter = self._loose.in_place_of(tied_to, own)
                is_trained = parameter.requires_grad or id(parameter) in updated
                unit = self._unit_of(name, root, prefix)
                shape = own_shape(parameter, num_data_dims(name, parameter, groups))
                other = tied_to if tied_to != name else ""
                rows.append(parameter_row(name, unit, parameter, shape, is_trained, other))
        return rows

    def _unit_of(self, parameter: str, root: torch.nn.Module, prefix: str) -> str:
        inside = parameter[len(prefix) + 1 :] if prefix else parameter
        path = inside.split(".")[:-1]
        info = self._infos.get(id(reduce(getattr, path, root)))  # a script module has no get_submodule
        return info.unit if info else prefix

    def module_rows(self) -> list[Module]:
        rows = []
        for prefix, root in self.roots():
            for name, module in root.named_modules(prefix=prefix):
                info = self._infos.get(id(module))
                is_own = info is not None and info.is_own_forward
                rows.append(Module(name, type(module).__name__, info.unit if info else prefix, is_own))
        return rows

    def shard_group_rows(self) -> list[ShardGroup]:
        groups = shard_groups(self.roots())
        return list({group.name: group for group in groups.values()}.values())

    def tensor_parallel_rows(self) -> list[TensorParallel]:
        return tensor_parallel(self.roots(), shard_groups(self.roots()))

    def unit_rows(self, updated: Set[int] = frozenset()) -> list[Unit]:
        """`updated`: as of `parameter_rows`."""
        return unit_rows(self._own_rows(updated), [*self.roots()], self._order)


def _holds_shard_groups(root: torch.nn.Module, prefix: str, looped: Set[str]) -> bool:
    """Whether FSDP2 gathers by itself what is inside of one of these modules: its groups are the finer cut."""
    names = shard_groups([(prefix, root)]).keys() - looped
    inside = (innermost(name.rpartition(".")[0], looped) for name in names)
    return any(each is not None for each in inside)
