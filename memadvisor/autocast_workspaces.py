"""What a run's products would take for themselves under autocast, measured on this machine where somebody asks for it."""

from __future__ import annotations

from collections.abc import Mapping, Set

from memadvisor.autocast import NarrowProduct, WorkspacesOf
from memadvisor.run.run import Run


def workspaces_for(run: Run) -> WorkspacesOf:
    """With as many threads as the run had. torch is imported when it is called."""

    def measured(products: Set[NarrowProduct]) -> Mapping[NarrowProduct, int]:
        if not products:
            return {}
        from memadvisor.calibrate.product_workspaces import product_workspaces

        return product_workspaces(products, run.ranks[0].process.num_threads)

    return measured
