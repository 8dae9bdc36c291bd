"""Parameters, gradients and optimizer state: theory beside measured."""

from __future__ import annotations

from dataclasses import dataclass

from memadvisor.plan import Plan
from memadvisor.run.run import RankRun


@dataclass(frozen=True, slots=True, kw_only=True)
class StateComponent:
    """One kind of model state in one dtype: `parameter`, `gradient`, or a key of the optimizer's state.

    `expected_bytes` is the theory's; 0 for what it does not know (step counters, factored states).
    `recorded_bytes` is the sum over the tensors that the training itself holds of this component, None
    for gradients, which are not recorded one by one.
    """

    kind: str  # "parameter", "gradient" or "optimizer_state"
    component: str
    dtype: str
    num_elements: int  # of the full model, or of the tensors recorded where theory is silent
    expected_bytes: int
    recorded_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStates:
    """Bytes of model state alive on this rank's device when the traced step's optimizer step begins.

    Theory (ZeRO, arXiv:1910.02054, section 3): each parameter element has its dtype's bytes as parameter
    and as gradient, and one element of each optimizer component (16 bytes for Adam in float32: 4 + 4 + 8;
    also 16 in classic mixed precision: 2 + 2 + 12). Of a unit at stage s on n ranks a rank holds 1/n of the
    optimizer state from s = 1, of the gradients from s = 2, of the parameters at s = 3.
    `padding_bytes` is measured minus expected: alignment, step counters, and whatever theory does not know.
    """

    num_params: int  # tied ones once, frozen ones too
    num_trainable: int
    num_ranks: int
    zero_stages: tuple[int, ...]  # in use, ascending; (0,) without a plan
    parameter_bytes: int
    gradient_bytes: int
    optimizer_state_bytes: int
    expected_parameter_bytes: int
    expected_gradient_bytes: int
    expected_optimizer_state_bytes: int
    components: tuple[StateComponent, ...]

    @property
    def measured_bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_state_bytes

    @property
    def expected_bytes(self) -> int:
        return (
            self.expected_parameter_bytes + self.expected_gradient_bytes + self.expected_optimizer_state_bytes
        )

    @property
    def padding_bytes(self) -> int:
        return self.measured_bytes - self.expected_bytes

    @property
    def bytes_per_parameter(self) -> float | None:
        return self.measured_bytes / self.num_params if self.num_params else None


def model_states(rank: RankRun, plan: Plan | None) -> ModelStates | None:
    """Measured and expected model states. None when no step was traced or it had no optimizer step."""
    raise NotImplementedError
