"""Which module a script's model is."""

import copy
import gc

import pytest
import torch
from torch import nn

import memadvisor
from memadvisor.analyzers.model_states import model_states
from memadvisor.analyzers.planned_models import check_trained
from memadvisor.engines.script.live import model_fingerprint
from memadvisor.errors import UsageError
from memadvisor.plan import fingerprint


class Flow(nn.Module):
    """Called by a method that is not its forward."""

    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def log_prob(self, x):
        for step in self.steps:
            x = step(x)
        return -x.square().sum()


def test_a_model_is_no_list_of_its_layers(tmp_path):
    model = Flow()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(4):
            (-model.log_prob(torch.randn(4, 8))).backward()
            optimizer.step()
    assert [unit.name for unit in prof.run.ranks[0].units] == ["steps.0", "steps.1", "steps.2"]


def test_trained_tensors_that_are_no_modules_are_parameters(tmp_path):
    weight = torch.randn(8, 64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(5):
            optimizer.zero_grad()
            (torch.randn(4, 8) @ weight).square().mean().backward()
            optimizer.step()
    rank = prof.run.ranks[0]

    assert len(rank.steps) >= 4 and rank.traced_step is not None
    assert [(row.name, row.shape) for row in rank.parameters] == [("(0)", "[8, 64]")]
    kinds = {(row.category, row.size_bytes) for row in rank.storages if row.size_bytes == 8 * 64 * 4}
    assert {"parameter", "gradient", "optimizer_state"} <= {category for category, _ in kinds}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_a_functional_call_takes_in_place_of_the_models_parameters_has_their_names(tmp_path, device):
    """What the model has itself is a copy that nothing trains; theory knew nothing of what was given."""
    model = nn.Linear(8, 64)
    weights = {name: each.detach().clone().requires_grad_() for name, each in model.named_parameters()}
    model.to(device)
    optimizer = torch.optim.Adam([weights["bias"], weights["weight"]], lr=0.1)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(5):
            optimizer.zero_grad()
            torch.func.functional_call(model, weights, (torch.randn(4, 8),)).square().mean().backward()
            optimizer.step()
    rank = prof.run.ranks[0]
    states = model_states(rank, None)

    size_bytes = (8 * 64 + 64) * 4
    assert [(row.name, row.size_bytes) for row in rank.parameters] == [("weight", 2048), ("bias", 256)]
    assert [theory for _, theory, _ in states.by_kind] == [size_bytes, size_bytes, 2 * size_bytes]
    assert states.padding_bytes == 2 * 4  # step counters
    assert states.notes == ()
    copies = [row.size_bytes for row in rank.storages if row.category == "weight_copy"]
    assert sorted(copies) == ([256, 2048] if device == "cpu" else [])
    check_trained(rank)  # a plan is for the model


def test_masters_as_large_as_the_models_parameters_leave_these_parameters(tmp_path):
    """Of a model in the same dtype that gets the gradients, which the script hands to them."""
    model = nn.Linear(8, 64)
    masters = [each.detach().clone().requires_grad_() for each in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(5):
            model(torch.randn(4, 8)).square().mean().backward()
            for master, own in zip(masters, model.parameters(), strict=True):
                master.grad = own.grad.clone()
            optimizer.step()
            for master, own in zip(masters, model.parameters(), strict=True):
                own.data.copy_(master)
                own.grad = None
    rank = prof.run.ranks[0]

    alive = [row for row in rank.storages if row.category in ("parameter", "weight_copy")]
    assert sorted((row.category, row.size_bytes) for row in alive) == sorted(
        [("parameter", 256), ("parameter", 2048)] * 2
    )


def test_what_a_sparse_gradient_holds_is_gradient(tmp_path):
    """Of an embedding: 32 rows of 64 values, and where each stands. They were temporaries."""
    embedding = nn.Embedding(1000, 64, sparse=True)
    optimizer = torch.optim.SparseAdam(embedding.parameters())
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(5):
            embedding(torch.randint(0, 1000, (32,))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    rows = prof.run.ranks[0].storages
    made = [row.size_bytes for row in rows if row.category == "gradient" and row.phase != "baseline"]
    assert sorted(made) == [32 * 8, 32 * 64 * 4]


def test_theory_of_an_ensemble_is_of_what_is_trained_and_not_of_the_model_without_memory_that_it_is_called_by(
    tmp_path,
):
    """As in torch.func's tutorial: parameters of three models, stacked, for a copy of one on the meta device."""
    models = [nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)) for _ in range(3)]
    weights, buffers = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    size_bytes = 3 * sum(each.nbytes for each in models[0].parameters())
    del models
    optimizer = torch.optim.Adam(weights.values(), lr=0.1)
    call = torch.vmap(lambda *state: torch.func.functional_call(base, state[:2], state[2:]), (0, 0, None))
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(5):
            optimizer.zero_grad()
            call(weights, buffers, torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    rank = prof.run.ranks[0]
    states = model_states(rank, None)

    assert [theory for _, theory, _ in states.by_kind] == [size_bytes, size_bytes, 2 * size_bytes]
    assert states.padding_bytes == 4 * 4  # step counters
    assert states.notes == ()
    assert {unit.parameter_bytes for unit in rank.units} == {0}
    with pytest.raises(UsageError, match="functional_call"):
        check_trained(rank)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(self.norm(x))


@pytest.mark.parametrize("lives", [False, True])
@pytest.mark.parametrize("made_of", [torch.jit.script, torch.fx.symbolic_trace])
def test_what_is_made_of_a_model_has_its_names(tmp_path, made_of, lives):
    """Of a traced model the parts have been called by themselves, by the tracing; whether they still live tells nothing."""
    original = nn.Sequential(nn.Linear(8, 8), Block(), Block())
    with memadvisor.profile(tmp_path / "run") as prof:
        model = made_of(original)
        if not lives:
            del original
            gc.collect()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(4):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
    rank = prof.run.ranks[0]
    assert rank.traced_step is not None
    assert {unit.name for unit in rank.units} == {"0", "1", "2"}


class Acting(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), act, nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


def test_a_module_that_blocks_share_works_for_the_one_that_calls_it(tmp_path):
    """As an activation that is a default argument of all blocks."""
    act = nn.SiLU()
    model = nn.Sequential(Acting(act), Acting(act), Acting(act))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(4):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
    rank = prof.run.ranks[0]
    saved = dict.fromkeys(("0", "1", "2"), 0)
    for row in rank.saved:
        saved[row.unit] += row.shape == "[4, 16]"
    assert saved == {"0": 2, "1": 2, "2": 2}  # what it took, and what it gave


class Growing(nn.Module):
    """Makes a module in its first call, as speechbrain's blocks do once they see an input."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        if not hasattr(self, "norm"):
            self.norm = nn.LayerNorm(8, elementwise_affine=False)
        return self.norm(self.linear(x))


def test_parts_that_have_made_modules_since_are_joined(tmp_path):
    parts = nn.ModuleDict({"encoder": Growing(), "decoder": Growing()})
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.01)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(4):
            parts["decoder"](parts["encoder"](torch.randn(4, 8))).square().sum().backward()
            optimizer.step()
    rank = prof.run.ranks[0]
    assert [row.name for row in rank.parameters] == [name for name, _ in parts.named_parameters()]
    assert rank.traced_step is not None


def test_parts_that_are_called_without_gradients_first_are_one_model(tmp_path):
    """As of PPO, whose rollouts come before its updates: an agent's actor and critic were two models."""
    model = nn.ModuleDict({"actor": nn.Linear(8, 2), "critic": nn.Linear(8, 1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(4):
            x = torch.randn(4, 8)
            with torch.no_grad():
                values = model["actor"](x), model["critic"](x)
            loss = sum(
                (model[name](x) - value - 1).square().mean()
                for name, value in zip(model, values, strict=True)
            )
            loss.backward()
            optimizer.step()
    rank = prof.run.ranks[0]

    assert [row.name for row in rank.parameters] == [name for name, _ in model.named_parameters()]
    assert {(step.num_micro_batches, step.num_samples) for step in rank.steps} == {(1, 4)}


@pytest.mark.parametrize("has_gradients", [True, False])
def test_a_frozen_model_of_which_the_script_calls_a_part_is_one_model(has_gradients, tmp_path):
    """A VAE's encoder and what follows it were two models, and its decoder was none: its weights counted as other."""
    parts = {"encoder": nn.Linear(8, 8), "quant": nn.Linear(8, 4), "decoder": nn.Linear(4, 64)}
    vae, model = nn.ModuleDict(parts).requires_grad_(False), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(4):
            with torch.set_grad_enabled(has_gradients):
                latent = vae["quant"](vae["encoder"](torch.randn(2, 8)))
            model(latent).square().sum().backward()
            optimizer.step()
    rank = prof.run.ranks[0]

    assert {row.model for row in rank.units} == {"", "model1"}
    assert [row.name for row in rank.parameters if row.name.startswith("decoder")] == [
        "decoder.weight",
        "decoder.bias",
    ]
    frozen_bytes = sum(parameter.nbytes for parameter in vae.parameters())
    named_bytes = sum(row.size_bytes for row in rank.storages if row.category == "parameter")
    assert named_bytes == frozen_bytes + sum(parameter.nbytes for parameter in model.parameters())


def test_a_generator_that_is_frozen_while_the_discriminator_steps_is_trained(tmp_path):
    """The first step ends with the discriminator's second update (its penalty): theory had no gradients of the other."""
    generator, discriminator = nn.Linear(8, 16), nn.Linear(16, 1)
    optimizers = [torch.optim.Adam(model.parameters()) for model in (generator, discriminator)]
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(3):
            generator.requires_grad_(False)
            for _ in range(2):
                optimizers[1].zero_grad()
                discriminator(generator(torch.randn(4, 8))).square().sum().backward()
                optimizers[1].step()
            generator.requires_grad_(True)
            optimizers[0].zero_grad()
            discriminator(generator(torch.randn(4, 8))).sum().backward()
            optimizers[0].step()

    assert {row.name for row in prof.run.ranks[0].parameters if not row.requires_grad} == set()


class Around(nn.Module):
    """Has the script's wrapper inside, and the model once more, as Lightning's Fabric."""

    def __init__(self, model):
        super().__init__()
        self.wrapped, self.original = nn.DataParallel(model), model

    def forward(self, x):
        return self.wrapped(x)


def test_the_model_of_a_wrapper_around_a_wrapper_is_the_innermost(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    outer = Around(model)
    optimizer = torch.optim.SGD(outer.parameters(), lr=0.01)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(4):
            outer(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
    rank = prof.run.ranks[0]
    assert [row.name for row in rank.parameters] == [name for name, _ in model.named_parameters()]
    assert {(step.num_micro_batches, step.num_samples) for step in rank.steps} == {(1, 4)}


class Functional(nn.Module):
    """Hides some of its parameters, by a method with torch's first two arguments alone, as torchrl's losses do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.target = nn.Linear(8, 8).requires_grad_(False)

    def named_parameters(self, prefix="", recurse=True):
        for name, parameter in super().named_parameters(prefix, recurse):
            if not name.startswith("target"):
                yield name, parameter

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x - self.target(x)


def test_a_model_that_lists_its_parameters_in_its_own_way(tmp_path):
    model = Functional()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()

    rows = prof.run.ranks[0].parameters
    assert len(prof.run.ranks[0].steps) == 4
    assert [row.name for row in rows if row.name.startswith("target")] == ["target.weight", "target.bias"]
    assert model_fingerprint(model) == fingerprint((row.name, row.shape, row.dtype) for row in rows)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.policy, self.value = nn.Linear(6, 16), nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, x):
        x = self.body(x).tanh()
        return self.policy(x), self.value(x)


class Advantages(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.net = model

    @torch.no_grad()
    def forward(self, observed):
        value = self.net(observed)[1]
        return value - value.mean()


class Loss(nn.Module):
    """Trains what it holds."""

    def __init__(self, model):
        super().__init__()
        self.net = model

    def forward(self, x):
        return sum(each.square().mean() for each in self.net(x))


def _units_of(tmp_path, around, model, call):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(3):
            observed = torch.randn(32, 6)
            around(observed)
            for rows in observed.split(8):
                call(rows).backward()
                optimizer.step()
                optimizer.zero_grad()
    return [unit.name for unit in prof.run.ranks[0].units], prof.analysis


@pytest.mark.parametrize("is_first", [True, False])
def test_an_estimator_that_holds_the_model_is_not_the_model(tmp_path, is_first):
    """It was, and all names began with its own for it. The steps in which it is called seemed to be larger ones, too."""
    model = ActorCritic()
    estimator = Advantages(model)

    def ask(observed):
        if not is_first:
            with torch.no_grad():
                model(observed)  # a rollout
        estimator(observed)

    def loss(x):
        policy, value = model(x)
        return policy.square().mean() + value.square().mean()

    units, analysis = _units_of(tmp_path, ask, model, loss)
    assert units == ["body", "policy", "value"]
    assert analysis.larger_steps is None


def test_a_loss_through_which_the_model_is_trained_stays_the_model(tmp_path):
    model = ActorCritic()
    around = Loss(model)

    def evaluate(observed):
        with torch.no_grad():
            around(observed)

    units, _ = _units_of(tmp_path, evaluate, model, around)
    assert units == ["net.body", "net.policy", "net.value"]


def test_a_model_whose_only_part_is_called_beside_it_stays_the_model(tmp_path):
    model = ActorCritic()
    around = Loss(model)
    units, _ = _units_of(tmp_path, lambda observed: around(observed), model, lambda x: model(x)[0].mean())
    assert units == ["net.body", "net.policy", "net.value"]


def test_what_an_optimizer_trains_beside_known_models_joins_none_of_them(tmp_path):
    """An agent holds its actor, its critic and a temperature, whose own optimizer steps behind the first step's end."""

    class Temperature(nn.Module):
        def __init__(self):
            super().__init__()
            self.log = nn.Parameter(torch.zeros(1))

    agent = nn.Module()
    agent.actor, agent.critic, agent.temperature = nn.Linear(4, 4), nn.Linear(4, 1), Temperature()
    optimizers = [torch.optim.Adam(part.parameters(), lr=0.1) for part in agent.children()]
    agent.spare = nn.Linear(4, 4)  # nobody trains it, so that the agent is no model

    def update(optimizer, loss):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(5):
            action = agent.actor(torch.ones(2, 4))
            update(optimizers[1], agent.critic(action.detach()).sum())
            update(optimizers[0], agent.critic(action).sum())
            update(optimizers[2], agent.temperature.log.exp().sum())

    rank = prof.run.ranks[0]
    assert [(unit.name, unit.num_parameters) for unit in rank.units] == [
        ("", 20),
        ("model1", 5),
        ("model2", 1),
    ]
