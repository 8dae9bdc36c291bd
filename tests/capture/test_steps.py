"""Where a training step ends."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import memadvisor
from memadvisor.capture.steps import StepCycle

BACKWARD = 0


def ends(events, existing=None):
    """For each update among the events, whether a step ended before it or with it; and one may end with the script."""
    cycle = StepCycle(lambda: set(events) - {BACKWARD} if existing is None else existing)
    found = []
    for event in events:
        if event == BACKWARD:
            cycle.see_backward()
        else:
            found.append((cycle.before(event), cycle.after(event)))
    return found, cycle.has_open_step


def num_steps(events, existing=None):
    found, has_open_step = ends(events, existing)
    return sum(sum(each) for each in found) + has_open_step


def test_one_optimizer_ends_every_step():
    assert ends([1, 1, 1]) == ([(False, True)] * 3, False)


def test_two_optimizers_share_a_step_from_the_first_one_on():
    assert ends([0, 1, 0, 2] * 2) == ([(False, False), (False, True)] * 2, False)


def test_a_critic_that_steps_twice_a_round_makes_two_steps_a_round():
    assert num_steps([0, 1, 0, 1, 0, 2] * 5) == 10


def test_an_optimizer_of_which_the_first_step_knew_nothing_ends_the_later_ones():
    found, _ = ends([0, 1, 2, 3] * 3, existing={1})

    assert (
        found
        == [(False, True), (False, False), (False, False)]
        + [
            (False, False),
            (False, False),
            (False, True),
        ]
        * 2
    )


def test_what_is_left_over_is_a_step_where_it_is_the_most_there_is_of_it():
    assert num_steps([0, 1], existing={1, 2}) == 1
    assert num_steps([0, 1, 0, 2, 0, 1]) == 2
    assert num_steps([0, 1] * 3 + [0, 2, 0, 1] * 3 + [0, 2], existing={1}) == 6


@st.composite
def trainings(draw):
    """(events, number of rounds, who may exist at the first update): a round is a backward, and those whose turn it is.

    Optimizer 1 steps in every round; another one from its first round on, every so many rounds.
    """
    num_rounds = draw(st.integers(1, 12))
    others = draw(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4), st.booleans()), max_size=4))
    events = []
    for number in range(num_rounds):
        turn = [
            (2 + index, is_before)
            for index, (first, every, is_before) in enumerate(others)
            if number >= first and (number - first) % every == 0
        ]
        events += [BACKWARD]
        events += [one for one, is_before in turn if is_before] + [1]
        events += [one for one, is_before in turn if not is_before]
    # One that exists, and steps in the second round for the first time, is a GAN's other half as far as anybody sees.
    others = [2 + index for index, (first, _, is_before) in enumerate(others) if first == 0 or not is_before]
    return events, num_rounds, {1, *draw(st.sets(st.sampled_from(others) if others else st.nothing()))}


@given(trainings())
def test_as_many_steps_as_rounds_whoever_steps_how_often(training):
    """Whichever of the optimizers exist when the first one steps."""
    events, num_rounds, existing = training

    assert num_steps(events, existing) == num_rounds


@given(st.lists(st.integers(0, 4), max_size=60), st.sets(st.integers(1, 4)))
def test_no_step_holds_an_update_twice_whatever_happens(events, existing):
    """So there are at least as many steps as any optimizer has updates."""
    updates = [event for event in events if event != BACKWARD]
    most = max((updates.count(each) for each in updates), default=0)

    assert most <= num_steps(events, existing) <= len(updates)


def record(tmp_path, train):
    with memadvisor.profile(tmp_path / "run") as prof:
        train()
    [rank] = prof.run.ranks
    for step in rank.steps:
        inside = [span for span in rank.spans if span.step == step.index]
        assert all(step.start_s <= span.start_s <= span.end_s <= step.end_s for span in inside)
    return rank


def updates(rank):
    """The number of optimizer spans of each step."""
    return [sum(s.kind == "optimizer" and s.step == step.index for s in rank.spans) for step in rank.steps]


def test_optimizers_made_one_by_one_for_each_parameter_make_one_step_together(tmp_path):
    """What pyro does; the first step ends too early, its other updates stand in the second one."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    def train():
        optimizers = {}
        for _ in range(6):
            model(torch.ones(2, 4)).sum().backward()
            for parameter in model.parameters():
                if parameter not in optimizers:
                    optimizers[parameter] = torch.optim.SGD([parameter], lr=0.1)
                optimizers[parameter].step()

    rank = record(tmp_path, train)

    assert updates(rank) == [1, 7, 4, 4, 4, 4]
    assert rank.traced_step.index == 2


def test_an_end_that_was_not_foreseen_leaves_each_step_its_own(tmp_path):
    """Two optimizers exist, and one of them never steps."""
    model, idle = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, idle))

    def train():
        for _ in range(5):
            for _ in range(2):
                model(torch.ones(3, 4)).sum().backward()
            optimizer.step()

    rank = record(tmp_path, train)

    assert other is not None
    assert updates(rank) == [1] * 5
    assert [step.num_samples for step in rank.steps] == [6] * 5
    assert [step.num_micro_batches for step in rank.steps] == [2] * 5
    assert {span.micro_batch for span in rank.spans if span.kind == "backward"} == {0, 1}


def test_updates_inside_the_backward_end_the_step_with_the_pass(tmp_path):
    """And an optimizer that steps inside another one's step is a part of it."""

    class Outer(torch.optim.SGD):
        def step(self, closure=None):
            inner.step()
            super().step(closure)

    model, extra = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), nn.Parameter(torch.ones(1))
    inner = torch.optim.SGD([extra], lr=0.1)
    optimizers = {each: Outer([each], lr=0.1) for each in model.parameters()}
    for parameter, optimizer in optimizers.items():
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())

    def train():
        for _ in range(5):
            model(torch.ones(2, 4)).sum().backward()

    rank = record(tmp_path, train)

    assert updates(rank)[2:] == [4] * 3
    assert [step.num_micro_batches for step in rank.steps] == [1] * 5


def test_a_step_is_traced_where_no_end_is_right(tmp_path):
    """An actor and a temperature are updated twice, after every second update of the critic: wherever a step is expected to
    end, the next one would hold an update twice. Once three traces were cut for it, a step ends with the critic's."""
    critic, actor, temperature = nn.Linear(4, 4), nn.Linear(4, 4), torch.zeros(1, requires_grad=True)
    optimizers = [
        torch.optim.SGD(each, lr=0.1) for each in (critic.parameters(), actor.parameters(), [temperature])
    ]

    def update(number, loss):
        optimizers[number].zero_grad()
        loss.backward()
        optimizers[number].step()

    def train():
        for number in range(12):
            update(0, critic(torch.ones(2, 4)).sum())
            for _ in range(2 if number % 2 == 0 else 0):
                update(1, critic(actor(torch.ones(2, 4))).sum())
                update(2, temperature.exp().sum())

    rank = record(tmp_path, train)

    assert rank.traced_step is not None and not rank.notes
    assert updates(rank)[-4:] == [1, 5, 1, 5] or updates(rank)[-5:-1] == [5, 1, 5, 1]


def test_an_optimizer_of_another_training_that_was_not_collected_yet_is_not_waited_for(tmp_path):
    other = nn.Linear(4, 4)
    left_over = torch.optim.SGD(other.parameters(), lr=0.1)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memadvisor.profile(tmp_path / "run", trace_step=1) as profile:
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    del left_over

    rank = profile.run.ranks[0]
    assert len(rank.steps) == 3 and rank.traced_step.index == 1


def test_derivatives_are_no_micro_batches_and_a_solvers_points_no_samples(tmp_path):
    """A step of a field with its own slope in it was said to be three micro-batches, of three times the samples."""
    field = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(field.parameters(), lr=0.1)

    def train():
        for _ in range(5):
            for _ in range(2):
                x = torch.randn(6, 4, requires_grad=True)
                for _ in range(3):
                    y = field(x).tanh()
                    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
                    x = x + 0.1 * y + 0.1 * slope
                x.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    rank = record(tmp_path, train)

    assert [step.num_micro_batches for step in rank.steps] == [2] * 5
    assert [step.num_samples for step in rank.steps] == [12] * 5


def test_trials_of_one_step_each_are_steps_of_their_own(tmp_path):
    """As a search gives most of them up after the first: these were one step together, as none made what was expected."""

    def trial(num_steps):
        models = [nn.Linear(4, 4), nn.Linear(4, 1)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        for _ in range(num_steps):
            for model, optimizer in zip(models, optimizers, strict=True):
                model(torch.randn(8, 4)).sum().backward()
                optimizer.step()

    with memadvisor.profile(tmp_path / "run") as prof:
        for num_steps in (3, 1, 1, 1, 2):
            trial(num_steps)
    assert len(prof.run.ranks[0].steps) == 8
