import pytest

from memadvisor.report.memory import anchor_within


@pytest.mark.parametrize(
    ("share", "anchor"), [(0.0, "left"), (0.5, "center"), (0.97, "right"), (1.0, "right")]
)
def test_a_label_at_the_edge_of_a_drawing_is_held_at_that_side(share, anchor):
    """That of a peak in the optimizer's step, the last of a step, was cut off."""
    assert anchor_within(share) == anchor
