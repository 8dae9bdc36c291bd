"""A user's mistake is one line, whatever the message holds."""

import pytest

from memadvisor import errors
from memadvisor.errors import MemadvisorError

KINDS = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MemadvisorError)
]


@pytest.mark.parametrize("kind", KINDS)
def test_message_and_hint_make_one_line(kind):
    error = kind("'a\nb' is\t not a size.", hint="write\nit so.")

    assert error.one_line() == "'a b' is not a size. Hint: write it so."
    assert str(kind("No hint.")) == kind("No hint.").one_line() == "No hint."


def test_every_error_of_ours_is_one_of_a_users_making():
    assert {kind.__name__ for kind in KINDS} >= {"UsageError", "RunFormatError", "PlanError"}
