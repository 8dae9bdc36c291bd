"""What is known of a step that is under way: plain lists and numbers, of which rows are made once it has ended."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from memadvisor.capture.clock import DeviceMark
from memadvisor.capture.samples import SeenBatches
from memadvisor.run.cut import innermost

Mark = float | DeviceMark
# One span under way: kind, unit, micro-batch, start, end, whether there were gradients when it began.
OpenSpan = list[Any]


@dataclass(slots=True)
class Given:
    """What one model, or one part that the script calls itself, was called with where gradients were wanted.

    None: some batch did not tell. `takes_data`: some call was given what no other model had made; `fed_at` is how many
    losses had had their backward at the last of these.
    """

    num_calls: int = 0
    num_samples: int | None = 0
    num_tokens: int | None = 0
    model: str = ""
    takes_data: bool = False
    fed_at: int | None = None

    def since(self, earlier: Given) -> Given:
        return Given(
            self.num_calls - earlier.num_calls,
            _difference(self.num_samples, earlier.num_samples),
            _difference(self.num_tokens, earlier.num_tokens),
            self.model,
            self.takes_data,
        )


@dataclass(slots=True)
class OpenStep:
    """A step that is under way.

    `given` has models by name, `num_micro_batches` is known when the step ends: a model may be called several times for
    one backward, several models or parts of one may be, and a call may have several backwards. Of these, derivatives
    (`torch.autograd.grad(create_graph=True)`) are no micro-batches of their own, however often a step asks for one.
    `is_thin`: no module was listened to, so forwards are not seen, and nobody knows what they were given.
    `is_pieced`: where it ended or began was known only afterwards, so that what depends on the moment is not.
    `is_disturbed`: it was traced, wholly or in part, and the trace is left out.
    """

    index: int
    start: Mark
    traced: bool = False
    is_thin: bool = False
    is_pieced: bool = False
    is_disturbed: bool = False
    spans: list[OpenSpan] = field(default_factory=list)
    # For DataLoaders (data_waits.py). None before the first: a list that each step keeps brings on the garbage collector.
    waits: list[tuple[Any, ...]] | None = None
    given: dict[str, Given] = field(default_factory=dict)
    seen: SeenBatches | None = None  # before anything was given
    largest_input: int = 0  # elements that a model was given in one call, at most
    largest_input_since_update: int = 0
    gradient_bytes: int = 0  # of the parameters of one optimizer as it stepped, at most
    num_backwards: int = 0
    num_derivatives: int = 0  # of these
    num_micro_batches: int = 0
    recorder_s: float = 0.0
    listening_s: float = 0.0  # to become part of it when the step ends

    @property
    def main(self) -> Given:
        """Of the model that was given the most samples, the first of them. What is only called with results of others is
        none of these, where anything else is called: a loss of its own parameters has a row for each word."""
        models: dict[str, dict[str, Given]] = {}
        for name, given in self.given.items():
            models.setdefault(given.model, {})[name] = given
        fed = [parts for parts in models.values() if any(given.takes_data for given in parts.values())]
        told = map(_what_a_model_was_given, fed or models.values())
        return max(told, key=lambda given: given.num_samples or 0, default=Given(0, None, None))


def _what_a_model_was_given(given: dict[str, Given]) -> Given:
    """A part that the script calls beside the whole model (a generator over pieces of its output) tells nothing. Of parts
    alone it is the first of as many samples as most were given: a loss among them has a row for each word, and a part
    that reads words letter by letter one for each of these."""
    parts = [
        part
        for name, part in given.items()
        if not any(name != other and innermost(name, {other}) == other for other in given)
    ]
    known = Counter(part.num_samples or 0 for part in parts if part.num_samples)
    most = max(known.values(), default=0)
    return next((part for part in parts if known[part.num_samples or 0] == most), parts[0])


def _difference(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before
