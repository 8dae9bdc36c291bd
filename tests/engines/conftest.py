from __future__ import annotations

import pytest

from tests.engines.ranks import end_ranks


@pytest.fixture(scope="session", autouse=True)
def _ranks_end_by_themselves():
    yield
    assert all(code == 0 for code in end_ranks())
