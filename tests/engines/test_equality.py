"""Losses, gradients, weights and optimizer state under any plan are DDP's."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from tests.engines.equality import Configuration, check, configurations


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("num_ranks", "num_examples"), [(2, 8), (3, 4), (4, 2)])
def test_random_plans_follow_ddp(num_ranks, num_examples):
    """Bitwise where no sum is reordered; else only by rounding. A plan that is taken off leaves a plain model."""

    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(configurations(num_ranks))
    def follow(configuration: Configuration) -> None:
        check(configuration, num_ranks)

    follow()
