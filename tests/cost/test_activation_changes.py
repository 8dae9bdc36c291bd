"""What a unit keeps while it waits to run again, predicted from the plain run and measured."""

import pytest

from tests.planning.test_called_again import predicted_and_measured
from tests.planning.test_moved_activations import Gpt


def test_a_unit_that_keeps_its_input_alone_keeps_the_generators_state_too():
    """A matrix product saves what it is called with, which is no less for running it again."""
    predicted, measured, losses = predicted_and_measured(Gpt, 1, ("head",), bf16=False)

    assert losses[0] == losses[1]
    assert measured == pytest.approx(predicted, abs=1000)
