"""Memory under other activations, against playing the step with them."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.simulate import simulate
from memadvisor.cost.transfers import TransferTimes
from memadvisor.hardware.hardware import TierBandwidth
from memadvisor.plan import UnitPlan
from memadvisor.schedule import Lane
from memadvisor.write_schedule import write_schedule
from tests.cost.test_simulate import TIMES, plan
from tests.make_run import make_run

DISK = TransferTimes({Lane.DISK: TierBandwidth(read_bytes_per_s=1e9, write_bytes_per_s=1e9)}, "a test")
STATES = st.sampled_from([(0, True), (1, True), (2, True), (3, False), (3, True)])


@st.composite
def activations(draw, units):
    """Units that run again by themselves, or two and more as one, and units whose activations wait on a disk."""
    first, last = sorted(draw(st.tuples(*[st.integers(0, len(units) - 1)] * 2)))
    stretches = ((units[first].name, units[last].name),) if first < last and draw(st.booleans()) else ()
    inside = {unit.name for unit in units[first : last + 1]} if stretches else set()
    changed = tuple(
        replace(
            unit,
            recompute=unit.name not in inside and draw(st.booleans()),
            activation_tier=draw(st.sampled_from(["device", "disk"])),
        )
        for unit in units
    )
    return changed, stretches


@given(data=st.data(), blocks=st.integers(2, 4), batches=st.integers(1, 2), divisor=st.sampled_from([1, 2]))
@settings(max_examples=60, deadline=None)
def test_one_play_of_a_way_of_sharding_tells_the_memory_of_all_that_may_be_done_to_activations(
    data, blocks, batches, divisor
):
    ranks = data.draw(st.integers(1, 4))
    step = captured_step(make_run(num_blocks=blocks, num_micro_batches=batches), micro_batch_divisor=divisor)
    shared = [data.draw(STATES) for _ in step.units]
    units = tuple(
        UnitPlan(name=unit.name, zero_stage=stage, recompute=False, reshard=reshard)
        for unit, (stage, reshard) in zip(step.units, shared, strict=True)
    )
    like = plan(
        ranks=ranks,
        stage=max(stage for stage, _ in shared),
        overlap=data.draw(st.booleans()),
        depth=data.draw(st.integers(0, 2)),
    )
    like = replace(like, update_in_backward=data.draw(st.booleans()))

    def played():
        chosen, stretches = data.draw(activations(units))
        schedule = write_schedule(replace(like, units=chosen, stretches=stretches), step.units)
        return simulate(step, schedule, TIMES, transfers=DISK).moments

    one, other = played(), played()

    assert list(map(plain, one.under(other.activations))) == list(map(plain, other))


def plain(moment):
    """Without categories of which there is nothing."""
    sizes = {name: size for name, size in moment.by_category_bytes.items() if size}
    return replace(moment, by_category_bytes=sizes)
