"""Who is alive, in a process that holds whatever a script holds."""

from abc import ABC

from memadvisor.run.living import living


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
