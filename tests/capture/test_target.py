"""Which scripts and modules are known not to be there before anything of them runs."""

import sys
from importlib.machinery import ModuleSpec

import pytest

from memadvisor.capture.script import Target, check_target
from memadvisor.errors import UsageError


class InPlace:
    """As pip's editable installs have one: it alone knows where the package's files are."""

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, None) if name == "installed_in_place" else None


def test_a_module_that_only_a_finder_of_its_own_knows_may_be_run(monkeypatch):
    """`python -m` runs it; it was refused as not there."""
    module = Target(name="installed_in_place.train", is_module=True, arguments=())
    with pytest.raises(UsageError, match="There is no module"):
        check_target(module)

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, InPlace()])
    check_target(module)
