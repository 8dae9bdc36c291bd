"""Who is alive, in a process that holds whatever a script holds."""

import threading
import weakref
from abc import ABC

import torch

from memadvisor.run.living import all_objects, living, one_look


class Base:
    pass


class Child(Base):
    pass


class Unhashable(type):
    __hash__ = None


class Strange(Base, metaclass=Unhashable):
    pass


class Proxy:
    @property
    def __class__(self):
        raise RuntimeError("woken up")


def test_instances_of_a_kind_and_its_subclasses_are_found():
    held = [Base(), Child(), Strange(), {"not": "one"}]
    assert {id(each) for each in living(Base)} == {id(each) for each in held[:3]}


def test_objects_are_not_asked_what_they_are():
    proxy = Proxy()
    assert [each for each in living(Proxy) if each is proxy] == [proxy]


class Abstract(ABC):  # noqa: B024
    pass


class OfAbstract(Abstract):
    pass


def test_an_abstract_kind_is_not_asked_about_types_that_cannot_be_hashed():
    """As torch's DistributedDataParallel is one, which is looked for in every run of several ranks."""
    held, strange = OfAbstract(), Strange()
    assert living(Abstract) == [held]
    assert living(Base) == [strange]


def test_one_look_finds_what_several_would_in_the_same_order_and_lets_go_of_it():
    held = [torch.nn.Linear(2, 2), torch.ones(3), {"a": torch.ones(1)}, torch.nn.Sequential(torch.nn.ReLU())]
    kinds = (torch.nn.Module, torch.Tensor, torch.nn.Parameter, torch.nn.Linear, torch.optim.Optimizer, Base)
    several = {kind: [id(each) for each in living(kind)] for kind in kinds}
    with one_look():
        assert {kind: [id(each) for each in living(kind)] for kind in kinds} == several
        assert any(each is held for each in all_objects())
        later = torch.ones(2)
        assert not any(each is later for each in living(torch.Tensor))
        with one_look():
            assert not any(each is later for each in living(torch.Tensor))
    assert any(each is later for each in living(torch.Tensor))
    gone = weakref.ref(held[1])
    del held
    assert gone() is None


def test_a_look_is_a_threads_own_and_asks_no_class():
    strange, seen = Strange(), []
    with one_look():
        assert any(each is strange for each in living(Base))
        later = Base()
        thread = threading.Thread(target=lambda: seen.extend(living(Base)))
        thread.start()
        thread.join()
        assert not any(each is later for each in living(Base))
        assert living(torch.optim.Optimizer) == []
    assert any(each is later for each in seen)
