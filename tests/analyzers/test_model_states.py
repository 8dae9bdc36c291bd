import dataclasses

import pytest
import torch

import memadvisor
from memadvisor.analyzers.model_states import model_states
from memadvisor.capture.census import stranger_note
from memadvisor.plan import Plan, UnitPlan
from memadvisor.planning.advise import advise
from memadvisor.policies import resolve_units
from memadvisor.run.parallel_records import ShardGroup
from memadvisor.run.records import OptimizerState, Parameter
from tests.make_run import make_run

P = 212_992  # parameters of the synthetic GPT: 2 x 512 x 64, and 3 blocks of 12 x 64 x 64


def plan(stage, units=(), num_ranks=2):
    return Plan(num_ranks=num_ranks, zero_stage=stage, units=units)


def test_adam_in_float32_takes_sixteen_bytes_a_parameter():
    """4 as parameter, 4 as gradient, 8 in two moments; only the step counters are beyond theory."""
    states = model_states(make_run(num_ranks=1).ranks[0], None)

    assert states.num_params == P
    assert states.expected_bytes == 16 * P
    assert (states.parameter_bytes, states.gradient_bytes) == (4 * P, 4 * P)
    assert states.padding_bytes == 14 * 4  # 14 parameters with a step counter of 4 bytes each
    assert states.outside_text is None


def test_a_parameter_in_two_optimizers_has_its_states_twice():
    """As of InfoGAN, whose third optimizer has the parameters of both others: theory knew of one."""
    rank = make_run(num_ranks=1).ranks[0]
    rank = dataclasses.replace(rank, optimizer_states=rank.optimizer_states * 2)

    assert model_states(rank, None).expected_bytes == (4 + 4 + 2 * 8) * P


def test_parameters_mapped_from_a_file_are_said_to_be_in_no_peak(tmp_path):
    """As `from_pretrained` leaves them on a CPU: their storage is the file's."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    weights = torch.load(tmp_path / "weights.pt", mmap=True, weights_only=True)
    model.load_state_dict(weights, assign=True)
    model[2] = torch.nn.Linear(64, 8)  # this one is the allocator's
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memadvisor.profile(tmp_path / "run", trace_step=1) as prof:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 64)).sum().backward()
            optimizer.step()

    states = model_states(prof.run.ranks[0], None)

    assert (states.parameter_bytes, states.parameter_bytes_outside) == (4 * (64 * 8 + 8), 4 * (64 * 64 + 64))
    assert (
        states.outside_text is not None
        and "16.2 KiB of parameters are not the allocator's" in states.outside_text
    )
    advice = advise(prof.run, memory_bytes=10**9)
    assert f"{states.outside_text} No budget and no plan's peak has them, either." in advice.notes


def test_a_reference_model_that_is_left_trainable_says_why_it_has_no_gradients(tmp_path):
    """As of DPO: called under no_grad, in no optimizer. One whose loss reaches it has gradients, as theory says."""
    model, reference, reached = (torch.nn.Linear(64, 8) for _ in range(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memadvisor.profile(tmp_path / "run", trace_step=1) as prof:
        for _ in range(3):
            optimizer.zero_grad()
            inputs = torch.ones(4, 64)
            with torch.no_grad():
                target = reference(inputs)
            (model(inputs) - target + reached(inputs)).sum().backward()
            optimizer.step()

    states = model_states(prof.run.ranks[0], None)

    missing_bytes = 4 * (64 * 8 + 8)
    assert states.expected_gradient_bytes - states.gradient_bytes == missing_bytes
    assert (states.idle.num_elements, states.idle.size_bytes) == (64 * 8 + 8, missing_bytes)
    assert len(states.idle.units) == 1
    assert states.notes == (states.idle.text, states.forgotten.text)
    assert "2.03 KiB of parameters (" in states.idle.text
    assert "got no gradient and are in no optimizer" in states.idle.text


class WithHeads(torch.nn.Module):
    """One head is used in each step, one in every second, one in none."""

    def __init__(self):
        super().__init__()
        self.used, self.turn, self.never = (torch.nn.Linear(64, width) for width in (8, 16, 24))
        self.num_calls = 0

    def forward(self, inputs):
        self.num_calls += 1
        outputs = self.used(inputs).sum()
        return outputs if self.num_calls % 2 else outputs + self.turn(inputs).sum()


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam])
def test_a_head_that_no_loss_reaches_says_why_it_has_no_gradients(tmp_path, optimizer_class):
    model = WithHeads()
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    with memadvisor.profile(tmp_path / "run", trace_step=1) as prof:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 64)).backward()
            optimizer.step()

    states = model_states(prof.run.ranks[0], None)

    missing_bytes = 4 * (64 * 24 + 24)
    assert states.expected_gradient_bytes - states.gradient_bytes == missing_bytes
    assert states.idle is None
    assert (states.unused.num_elements, states.unused.size_bytes) == (64 * 24 + 24, missing_bytes)
    is_first = optimizer_class is torch.optim.Adam  # for the head whose turn is the traced step's
    assert states.notes == ((states.later_text,) if is_first else ()) + (states.unused.text,)
    assert "are trainable and in an optimizer, but got no gradient; theory has" in states.unused.text


def test_a_parameter_of_which_this_rank_has_no_elements_is_not_said_to_lack_a_gradient(tmp_path):
    """FSDP1 with use_orig_params leaves such ones where another rank's piece of the flat parameter has them all."""
    model = torch.nn.Linear(64, 8)
    model.register_parameter("elsewhere", torch.nn.Parameter(torch.empty(0)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memadvisor.profile(tmp_path / "run", trace_step=1) as prof:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 64)).sum().backward()
            optimizer.step()

    states = model_states(prof.run.ranks[0], None)

    assert model.elsewhere.grad is None
    assert states.gradient_bytes == states.expected_gradient_bytes
    assert states.notes == ()


def test_gradients_of_a_second_update_are_said_to_come_later(tmp_path):
    """Two networks that are trained in turn, the second of which is first called in the second step."""
    first, second = torch.nn.Linear(64, 8), torch.nn.Linear(64, 24)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    averaged = torch.nn.Linear(
        64, 8
    )  # first called when the traced step is over, of which nothing of it is known
    with memadvisor.profile(tmp_path / "run", trace_step=1) as prof:
        for step in range(4):
            if step == 3:
                averaged(torch.randn(4, 64))
            for model, optimizer in zip((first, second), optimizers, strict=True):
                model(torch.randn(4, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    states = model_states(prof.run.ranks[0], None)
    missing_bytes = 4 * (64 * 8 + 8)
    assert states.num_params == 64 * 8 + 8 + 64 * 24 + 24
    assert states.expected_gradient_bytes - states.gradient_bytes == missing_bytes
    assert states.later_gradient_bytes == missing_bytes
    assert states.notes == (states.later_text,)
    assert states.later_text.startswith("2.03 KiB of gradients come later in the step")


def test_a_first_update_within_the_step_is_said_and_what_a_target_lacks_comes_in_none(tmp_path):
    """As of TD3: the actor steps every second time, in the traced step for the first time, and the critic, whose gradients
    are there from the step before, makes them anew. Its target, which is trainable, never gets any."""
    actor, critic, target = torch.nn.Linear(64, 8), torch.nn.Linear(64, 24), torch.nn.Linear(64, 40)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (actor, critic)]
    with memadvisor.profile(tmp_path / "run", trace_step=2) as prof:
        for step in range(6):
            with torch.no_grad():
                value = target(torch.randn(4, 64)).sum()
            optimizers[1].zero_grad()
            (critic(torch.randn(4, 64)).sum() - value).backward()
            optimizers[1].step()
            if step % 2:
                optimizers[0].zero_grad()
                actor(torch.randn(4, 64)).sum().backward()
                optimizers[0].step()

    states = model_states(prof.run.ranks[0], None)
    assert states.idle.size_bytes == states.expected_gradient_bytes - states.gradient_bytes
    assert states.later_gradient_bytes == 4 * (64 * 24 + 24)  # in the place of those that were
    assert states.later_text == (
        "2.03 KiB of optimizer state come later in the step: figures are of the moment at which its first update begins."
    )


def _parameter(name, *, in_optimizer=True, has_gradient=True, requires_grad=True):
    return Parameter(name, name, "(10,)", "float32", 10, 40, requires_grad, "", in_optimizer, has_gradient)


def test_only_trainable_parameters_without_gradient_and_optimizer_are_idle():
    """Each of the others has a reason of its own: a second optimizer's turn, a loss that reaches it, a user who froze it,
    a run that is older than the record, an engine that keeps gradients and optimizer's parameters elsewhere."""
    used = _parameter("used")
    others = (
        _parameter("turn", has_gradient=False),
        _parameter("reached", in_optimizer=False),
        _parameter("frozen", in_optimizer=False, has_gradient=False, requires_grad=False),
        _parameter("older", in_optimizer=None, has_gradient=None),
    )
    idle = tuple(_parameter(f"idle{i}", in_optimizer=False, has_gradient=False) for i in range(5))
    rank = make_run(num_ranks=1).ranks[0]

    def found(*parameters):
        return model_states(dataclasses.replace(rank, parameters=parameters, optimizer_states=()), None).idle

    assert found(used, *others) is None
    assert found(*idle) is None  # as with DeepSpeed's masters
    assert found(used, *others, *idle).units == tuple(row.name for row in idle)
    assert "(idle0, idle1, idle2 and 2 more)" in found(used, *idle).text


@pytest.mark.parametrize("is_head", [True, False])
def test_parameters_with_gradients_that_no_optimizer_has_are_said_not_to_be_trained(tmp_path, is_head):
    """A head that was made behind the optimizer; or a model whose parameters were all replaced behind it, as
    tensor parallelism's example of torch replaces them, and whose step updates nothing."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for layer in model[1:] if is_head else model:
        layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
        layer.bias = torch.nn.Parameter(layer.bias.detach().clone())
    with memadvisor.profile(tmp_path / "run", trace_step=1) as prof:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 64)).sum().backward()
            optimizer.step()

    rank = prof.run.ranks[0]
    states = model_states(rank, None)
    notes = [note.text for note in rank.notes if note.level == "warning"]
    if is_head:
        assert states.notes == (states.forgotten.text,)
        assert (states.forgotten.num_elements, states.forgotten.units) == (72, ("1",))
        assert "got gradients, but were in no optimizer" in states.forgotten.text
        assert not notes
    else:
        assert states.notes == ()
        assert ["the step updates nothing" in text for text in notes] == [True]


def test_a_parameter_whose_optimizer_is_made_at_its_turn_is_not_forgotten():
    """As by pyro, one for each parameter: by the traced step there is a state."""
    parameters = (_parameter("used"), _parameter("later", in_optimizer=False))
    state = OptimizerState("later", "exp_avg", "float32", 10, 40)
    rank = dataclasses.replace(make_run(num_ranks=1).ranks[0], parameters=parameters)

    without, with_state = (
        model_states(dataclasses.replace(rank, optimizer_states=states), None).forgotten
        for states in ((), (state,))
    )
    assert without.units == ("later",)
    assert with_state is None


def test_masters_are_no_strangers():
    """As with DeepSpeed: an optimizer's parameters are none of the model's, and have gradients or a state."""
    model, masters = torch.nn.Linear(4, 4), torch.nn.Parameter(torch.zeros(20))
    rows = [_parameter("weight", in_optimizer=False)]
    optimizer = torch.optim.Adam([masters])
    assert stranger_note(rows, [optimizer]) is not None

    masters.grad = torch.ones(20)
    assert stranger_note(rows, [optimizer]) is None
    optimizer.step()
    masters.grad = None
    assert stranger_note(rows, [optimizer]) is None
    assert stranger_note(rows, []) is None
    assert (
        stranger_note([_parameter("weight", in_optimizer=None)], [torch.optim.Adam(model.parameters())])
        is None
    )


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("stage", "whole", "shared"), [(0, 16, 0), (1, 8, 8), (2, 4, 12), (3, 0, 16)])
def test_a_zero_stage_divides_what_it_shards(stage, whole, shared, num_ranks):
    """arXiv:1910.02054 with float32 throughout: 8P + 8P/n, 4P + 12P/n, 16P/n."""
    rank = make_run(num_ranks=num_ranks).ranks[0]
    states = model_states(rank, plan(stage, num_ranks=num_ranks))

    assert states.expected_bytes == whole * P + shared * P // num_ranks
    assert states.zero_stages == (stage,)


def test_stages_may_differ_by_unit():
    """The head (512 x 64) at stage 3 and the rest at stage 0, on two ranks."""
    mixed = plan(0, units=(UnitPlan(name="head", zero_stage=3, recompute=False),))
    states = model_states(make_run().ranks[0], mixed)

    head = 512 * 64
    assert states.expected_bytes == 16 * (P - head) + 16 * head // 2
    assert states.zero_stages == (0, 3)


def test_state_on_another_tier_is_none_of_the_devices():
    """The head's (512 x 64) two moments are on the disk."""
    away = plan(0, units=(UnitPlan(name="head", zero_stage=0, recompute=False, optimizer_tier="disk"),))
    states = model_states(make_run(num_ranks=2).ranks[0], away)

    assert states.expected_bytes == 16 * P - 8 * 512 * 64
    moments = [row for row in states.components if row.component in ("exp_avg", "exp_avg_sq")]
    assert [row.recorded_bytes for row in moments] == [4 * (P - 512 * 64)] * 2

    units = tuple(
        dataclasses.replace(unit, optimizer_tier="disk")
        for unit in resolve_units(plan(0), make_run().ranks[0].units)
    )
    states = model_states(make_run(num_ranks=2).ranks[0], plan(0, units=units))
    assert {row.component for row in states.components} == {"parameter", "gradient", "step"}


def test_state_in_eight_bits_is_its_codes():
    """The head's (512 x 64) two moments: a byte for each element, and a scale for each 256."""
    coded = plan(0, units=(UnitPlan(name="head", zero_stage=0, recompute=False, optimizer_bits=8),))
    states = model_states(make_run(num_ranks=2).ranks[0], coded)

    size_bytes = 512 * 64 + 4 * 128
    assert states.expected_bytes == 16 * P - 2 * (4 * 512 * 64 - size_bytes)
    moments = [row for row in states.components if row.component in ("exp_avg", "exp_avg_sq")]
    assert [row.recorded_bytes for row in moments] == [4 * (P - 512 * 64) + size_bytes] * 2


def test_a_plan_shards_nothing_on_a_single_rank():
    assert model_states(make_run(num_ranks=1).ranks[0], plan(3)).expected_bytes == 16 * P


@pytest.mark.parametrize(("num_ranks", "share"), [(4, 4), (4, 2)])
def test_what_the_script_itself_shards_is_expected_in_shards(num_ranks, share):
    """FSDP2, among all ranks, and among the ranks of a group: 16P/n without any plan."""
    rank = make_run(num_ranks=num_ranks).ranks[0]
    group = ShardGroup("", share, num_ranks // share, True, None, None, False, True)
    units = tuple(dataclasses.replace(unit, shard_group="") for unit in rank.units)
    states = model_states(dataclasses.replace(rank, units=units, shard_groups=(group,)), None)

    assert states.expected_bytes == 16 * P // share
    assert (states.zero_stages, states.num_ranks) == ((3,), share)


def test_an_odd_share_is_rounded_up_once():
    rank = make_run(num_ranks=4).ranks[0]
    odd = Parameter("w", "head", "(7,)", "bfloat16", 7, 14, True, "")
    rank = dataclasses.replace(rank, parameters=(odd,), optimizer_states=())
    states = model_states(rank, plan(3, num_ranks=4))

    assert states.expected_parameter_bytes == 4  # 14 / 4 = 3.5


def test_tied_parameters_count_once_and_frozen_ones_have_no_gradient():
    rank = make_run(num_ranks=1).ranks[0]
    parameters = (
        Parameter("a", "head", "(10,)", "float32", 10, 40, True, ""),
        Parameter("b", "head", "(10,)", "float32", 10, 40, True, "a"),
        Parameter("c", "head", "(5,)", "float32", 5, 20, False, ""),
    )
    states = model_states(dataclasses.replace(rank, parameters=parameters, optimizer_states=()), None)

    assert (states.num_params, states.num_trainable) == (15, 10)
    assert (states.expected_parameter_bytes, states.expected_gradient_bytes) == (60, 40)


def test_components_show_theory_beside_the_tensors_recorded():
    """Mixed precision: bfloat16 parameters and gradients, float32 moments and master copy: 2 + 2 + 12."""
    rank = make_run(num_ranks=1).ranks[0]
    parameters = (Parameter("w", "head", "(1000,)", "bfloat16", 1000, 2000, True, ""),)
    components = ("exp_avg", "exp_avg_sq", "master")
    optimizer_states = (
        *(OptimizerState("w", name, "float32", 1000, 4000) for name in components),
        OptimizerState("w", "step", "float32", 1, 4),
        OptimizerState("w", "row_sums", "float32", 50, 200),  # a factored state: theory is silent
    )
    rank = dataclasses.replace(rank, parameters=parameters, optimizer_states=optimizer_states)
    states = model_states(rank, None)
    rows = {row.component: row for row in states.components}

    assert states.expected_bytes == 16 * 1000
    assert [rows[name].expected_bytes for name in components] == [4000, 4000, 4000]
    assert (rows["step"].expected_bytes, rows["step"].recorded_bytes) == (0, 4)
    assert (rows["row_sums"].expected_bytes, rows["row_sums"].recorded_bytes) == (None, 200)
    # What theory says nothing of makes no sum of it known.
    assert states.by_kind[2][1] is None and states.theory_bytes is None
    known = model_states(dataclasses.replace(rank, optimizer_states=optimizer_states[:-1]), None)
    assert known.theory_bytes == known.expected_bytes == 16 * 1000


def test_states_in_another_form_are_told_apart_from_those_that_theory_knows():
    """As torchao's AdamW8bit has them: small parameters' in float32, large ones' as codes with scales."""
    rank = make_run(num_ranks=1).ranks[0]
    parameters = tuple(
        Parameter(name, "head", f"({n},)", "float32", n, 4 * n, True, "")
        for name, n in (("a", 65_536), ("b", 64))
    )
    states = (
        OptimizerState("a", "exp_avg", "float32", 66_048, 67_584),
        OptimizerState("b", "exp_avg", "float32", 64, 256),
    )
    states = model_states(dataclasses.replace(rank, parameters=parameters, optimizer_states=states), None)

    found = [
        (row.expected_bytes, row.recorded_bytes) for row in states.components if row.component == "exp_avg"
    ]
    assert found == [(None, 67_584), (256, 256)]
    assert states.expected_optimizer_state_bytes == 256


def test_states_in_another_form_stay_unknown_where_ranks_own_whole_parameters():
    """Of an optimizer that needs whole parameters an owner's state is as large as without a plan: theory had a share of
    float32 moments for codes with scales."""
    rank = make_run(num_ranks=2).ranks[0]
    parameters = tuple(
        Parameter(name, "head", f"({n},)", "float32", n, 4 * n, True, "")
        for name, n in (("a", 65_536), ("b", 64))
    )
    states = (
        OptimizerState("a", "exp_avg", "float32", 66_048, 67_584, "torchao.optim.adam.AdamW8bit"),
        OptimizerState("b", "exp_avg", "float32", 64, 256, "torchao.optim.adam.AdamW8bit"),
    )
    found = model_states(dataclasses.replace(rank, parameters=parameters, optimizer_states=states), plan(2))

    rows = [
        (row.expected_bytes, row.recorded_bytes) for row in found.components if row.component == "exp_avg"
    ]
    assert rows[0] == (None, 67_584)
    assert found.theory_bytes is None


def test_state_of_parameters_that_are_one_number_is_no_counter():
    """As those of a Gaussian process: nothing but the name tells a moment from a step counter."""
    rank = make_run(num_ranks=1).ranks[0]
    parameters = (Parameter("noise", "head", "(1,)", "float32", 1, 4, True, ""),)
    names = ("step", "exp_avg", "exp_avg_sq")
    states = tuple(OptimizerState("noise", name, "float32", 1, 4) for name in names)
    states = model_states(dataclasses.replace(rank, parameters=parameters, optimizer_states=states), None)

    found = {row.component: row.expected_bytes for row in states.components if row.component in names}
    assert found == {"step": 0, "exp_avg": 4, "exp_avg_sq": 4}


def test_gradients_count_when_the_optimizer_step_begins_not_before():
    """At the beginning of the step the old gradients are alive, then the new ones; never both count."""
    assert model_states(make_run().ranks[0], None).gradient_bytes == 4 * P


def test_without_a_traced_step_nothing_is_known():
    assert model_states(make_run(traced_step=None).ranks[0], None) is None


def test_on_an_accelerator_the_optimizer_begins_when_the_host_says():
    """Its spans lie behind the host's time, in which storages are born: here by a whole step."""
    rank = make_run(device="cuda:0").ranks[0]
    early = tuple(
        dataclasses.replace(span, start_s=span.start_s - 0.3, end_s=span.end_s - 0.3) for span in rank.spans
    )

    assert model_states(dataclasses.replace(rank, spans=early), None).gradient_bytes == 4 * P
