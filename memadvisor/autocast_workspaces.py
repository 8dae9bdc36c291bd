"""What a run's products and convolutions would take for themselves under autocast, measured on this machine where somebody
asks for it."""

from __future__ import annotations

from collections.abc import Mapping, Set

from memadvisor.autocast import NarrowConvolution, NarrowProduct, NarrowWork, WorkspacesOf
from memadvisor.run.run import Run


def workspaces_for(run: Run) -> WorkspacesOf:
    """With as many threads as the run had. torch is imported when it is called."""

    def measured(works: Set[NarrowWork]) -> Mapping[NarrowWork, int]:
        num_threads = run.ranks[0].process.num_threads
        found: dict[NarrowWork, int] = {}
        if products := {work for work in works if isinstance(work, NarrowProduct)}:
            from memadvisor.calibrate.product_workspaces import product_workspaces

            found.update(product_workspaces(products, num_threads))
        if convolutions := {work for work in works if isinstance(work, NarrowConvolution)}:
            from memadvisor.calibrate.convolution_workspaces import convolution_workspaces

            found.update(convolution_workspaces(convolutions, num_threads))
        return found

    return measured
