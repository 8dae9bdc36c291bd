"""What the training keeps beside its parameters, gradients and state, and is known by what it is like."""

from __future__ import annotations

from collections.abc import Iterator

from memadvisor.capture.census import Labelled
from memadvisor.capture.kept_gradients import kept_gradients
from memadvisor.capture.models import Models
from memadvisor.capture.weight_copies import weight_copies


def labelled_beside(models: Models) -> Iterator[Labelled]:
    """Gradients that parameters hold beside their own, and copies of weights."""
    for gradient, unit in kept_gradients(models):
        yield gradient, "gradient", unit
    for copied in weight_copies(models):
        yield copied, "weight_copy", ""
