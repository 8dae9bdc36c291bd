"""What inputs tell of samples and tokens."""

import numpy as np
import pytest
import torch

import memadvisor
from memadvisor.capture import recorder
from memadvisor.capture.listening import Listening
from memadvisor.capture.module_info import ModuleInfo
from memadvisor.capture.position import Position
from memadvisor.capture.samples import batch_of
from memadvisor.capture.spans import SpanLog

FEATURES = torch.randn(30, 7)  # of 30 nodes
EDGES = torch.randint(0, 30, (2, 90))
MATRIX = torch.eye(30)


class Graph:
    num_nodes = 30


@pytest.mark.parametrize(
    "inputs",
    [
        (FEATURES, EDGES),
        (EDGES, FEATURES),
        (torch.randint(0, 9, (30, 1)), EDGES, torch.zeros(30, dtype=torch.long)),  # atoms, edges, molecules
        (FEATURES, MATRIX),
        (MATRIX, FEATURES),
        (FEATURES, MATRIX.to_sparse()),
        (Graph(), FEATURES),
    ],
)
def test_the_nodes_of_a_graph_are_no_samples(inputs):
    assert batch_of(inputs, {}) == (None, None)
    assert batch_of((), {str(number): value for number, value in enumerate(inputs)}) == (None, None)


WORDS = torch.randint(0, 9, (30, 7))


@pytest.mark.parametrize(
    ("inputs", "found"),
    [
        ((FEATURES,), (30, None)),
        ((FEATURES, torch.randint(0, 9, (30,))), (30, None)),
        ((WORDS,), (30, 210)),
        ((WORDS[:, :1], torch.randn(30, 48)), (30, None)),  # which series, and its values
        ((WORDS, torch.ones(30, 7, dtype=torch.bool)), (30, 210)),
        ((WORDS, torch.zeros(7, 7)), (30, 210)),  # a causal mask
        ((WORDS[:2], torch.arange(7), torch.zeros(7, 7)), (2, 14)),  # two sequences, positions, a mask
        ((WORDS[:2], torch.randn(7, 64)), (2, 14)),  # angles of positions
        ((WORDS[:2], WORDS[2:4]), (2, 14)),  # source and target
        ((torch.randn(30, 3, 8, 8), torch.tensor(5)), (30, None)),
        ((torch.randn(30, 9, 4), torch.randn(12, 4)), (30, None)),  # queries beside a batch
        (([WORDS, WORDS], 0), (30, 210)),  # Lightning's training_step(batch, batch_idx)
        (([FEATURES, torch.zeros(30)], 4), (30, None)),
        (([FEATURES, torch.zeros(12, 4)], 4), (None, None)),
        (([torch.randn(3, 8, 8), torch.randn(3, 8, 8)], 4), (None, None)),  # images, and how many steps
        (([WORDS, WORDS],), (None, None)),
        ((None, 3, "word"), (None, None)),
    ],
)
def test_samples_are_the_rows_of_the_first_input(inputs, found):
    assert batch_of(inputs, {}) == found


IMAGES, BOXES = torch.randn(8, 3, 16, 16), torch.randn(30, 4)


@pytest.mark.parametrize(
    ("inputs", "found"),
    [
        (({"input_ids": WORDS, "attention_mask": torch.ones(30, 7)},), (30, 210)),
        (
            ({"images": IMAGES, "labels": torch.zeros(8, dtype=torch.long), "weight": torch.tensor(1.0)},),
            (8, None),
        ),
        (({"boxes": BOXES, "images": IMAGES},), (None, None)),
        (({"names": ["a", "b"]},), (None, None)),
        ((WORDS, {"mask": torch.ones(7, 7)}), (30, 210)),
        (([{"input_ids": WORDS, "mask": torch.ones(30, 7)}, {"input_ids": WORDS[:, :5]}], None), (30, 360)),
        (([{"input_ids": WORDS}, {"input_ids": WORDS[:7]}], None), (None, None)),
        (
            ([IMAGES[0]] * 2, [{"boxes": BOXES[:1], "labels": torch.ones(1, dtype=torch.long)}] * 2),
            (2, None),
        ),
        (([IMAGES[0]] * 2, [{"boxes": BOXES}] * 3), (None, None)),
        (([torch.ones(3, 8, 16), torch.ones(3, 24, 8), torch.ones(3, 8, 8)],), (3, None)),
        (([[torch.ones(3, 8, 16)], [torch.ones(3, 24, 8), torch.ones(3, 8, 8)]],), (3, None)),
        (([torch.ones(3, 8, 16), torch.ones(3, 24, 16)],), (None, None)),  # sequences of one batch
        (([[torch.ones(3, 8, 16)], []],), (None, None)),
        ((np.ones((5, 3)), None), (5, None)),
        ((np.ones(5), None), (None, None)),  # one observation
        (([IMAGES, IMAGES],), (None, None)),  # of several scales: nobody knows
        (([{"name": "a"}, {"name": "b"}],), (None, None)),
    ],
)
def test_samples_are_the_rows_of_all_tensors_of_a_dictionary(inputs, found):
    """A batch as it comes from a loader; YOLO's has boxes of all images, and images. sentence-transformers' losses are
    given a dictionary for each side of the pairs, a detector of torchvision's one for each image."""
    assert batch_of(inputs, {}) == found


def test_a_float_vector_is_no_batch():
    """A policy's one state, a number beside each sample."""
    assert batch_of((torch.randn(4),), {}) == (None, None)
    assert batch_of((torch.rand(30), FEATURES), {}) == (30, None)


class Tagger(torch.nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.embedding = torch.nn.Embedding(9, 8)
        self.lstm = torch.nn.LSTM(8, 8, batch_first=batch_first)

    def forward(self, words):
        return self.lstm(self.embedding(words))[0]


@pytest.mark.parametrize("batch_first", [False, True])
def test_samples_are_the_columns_where_a_layer_takes_lengths_first(tmp_path, batch_first):
    model = Tagger(batch_first)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words = torch.randint(0, 9, (12, 5))
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(5):
            model(words).sum().backward()
            optimizer.step()
    rank = prof.run.ranks[0]
    assert rank.traced_step.num_samples == rank.steps[-1].num_samples == (12 if batch_first else 5)
    assert rank.traced_step.num_tokens == 60


@pytest.mark.parametrize(("batch_first", "found"), [(True, (12, 0)), (False, (5, 2))])
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_the_first_batch_is_told_as_soon_as_its_samples_are_sure(tmp_path, batch_first, found, is_wrapped):
    """Of [length, samples] that is in the traced step. Told at once, a script that had set the micro-batch of its plan
    was warned that it had not."""
    model = Tagger(batch_first)
    called = torch.nn.DataParallel(model) if is_wrapped else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told, begun = [], []
    with memadvisor.profile(tmp_path / "run", trace_step=2) as prof:
        prof._recorder.on_first_batch = lambda num_samples: told.append((num_samples, begun[-1])) is None
        for step in range(4):
            begun.append(step)
            called(torch.randint(0, 9, (12, 5))).sum().backward()
            optimizer.step()

    assert told == [found]


def test_a_trial_before_the_training_is_not_the_first_batch(tmp_path):
    """As sbi tries its networks out: `run` warned that the plan's micro-batch was another."""
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = []
    with memadvisor.profile(tmp_path / "run") as prof:
        prof._recorder.on_first_batch = lambda num_samples: told.append(num_samples) is None
        model(torch.randn(2, 5))
        for _ in range(4):
            model(torch.randn(12, 5)).sum().backward()
            optimizer.step()

    assert told == [12]


def test_a_call_for_many_tasks_at_once_does_not_tell_its_samples():
    found = []

    def loss(weight, x):
        found.append(batch_of((x,), {}))
        return (x @ weight).sum()

    inputs = torch.randn(5, 30, 7)
    torch.func.grad(loss)(torch.ones(7), inputs[0])
    torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(torch.ones(7), inputs)
    assert found == [(30, None), (None, None)]


def test_a_batch_counts_once_and_what_comes_again_after_a_backward_is_told(tmp_path):
    """SAM looks at a batch from two places; a buffer that is filled anew holds another batch."""
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    buffer = torch.empty(4, 16)

    def run(name, passes):
        with memadvisor.profile(tmp_path / name) as prof:
            for _ in range(4):
                passes()
                optimizer.step()
        step = prof.run.ranks[0].steps[1]
        return step.num_samples, step.num_micro_batches, step.num_repeated_batches

    def sam(x):
        model(x).sum().backward()
        model(x).sum().backward()

    def filled():
        for _ in range(2):
            model(buffer.normal_()).sum().backward()

    def pair(x):
        (model(x) - model(x + 1)).sum().backward()

    def twice(x):
        (model(x) * model(x)).sum().backward()

    assert run("sam", lambda: sam(torch.randn(4, 16))) == (4, 2, 1)
    assert run("filled", filled) == (8, 2, 0)
    assert run("twice", lambda: twice(torch.randn(4, 16))) == (4, 1, 0)
    assert run("pair", lambda: pair(torch.randn(4, 16))) == (8, 1, 0)


def test_a_part_that_is_called_beside_the_whole_model_tells_no_samples(tmp_path):
    """A generator runs over pieces of the output, a row for each word: a batch of 4 was told as 28 samples."""
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(16, 16), "generator": torch.nn.Linear(16, 9)})
    model.forward = lambda x: model["body"](x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(4):
            output = model(torch.randn(4, 7, 16))
            model["generator"](output.flatten(0, 1)).sum().backward()
            optimizer.step()

    assert prof.run.ranks[0].steps[1].num_samples == 4


@pytest.mark.parametrize("is_generator_first", [True, False])
def test_samples_of_a_gan_do_not_depend_on_which_model_is_called_first(is_generator_first, tmp_path):
    """The discriminator is given 4 rows three times a step: this was told as 4 where the generator was called first."""
    generator, discriminator = torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, discriminator)]

    def step():
        if not is_generator_first:
            discriminator(torch.randn(4, 16)).sum().backward()
        fake = generator(torch.randn(4, 8))
        discriminator(fake.detach()).sum().backward()
        if is_generator_first:
            discriminator(torch.randn(4, 16)).sum().backward()
        discriminator(fake).sum().backward()
        for optimizer in optimizers:
            optimizer.step()

    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(4):
            step()

    assert prof.run.ranks[0].steps[1].num_samples == 3 * 4


def test_a_loss_with_weights_tells_no_samples(tmp_path):
    """It is a model of its own for torch, and is called with a row for each of 28 words."""
    model, loss = torch.nn.Linear(16, 16), torch.nn.Linear(16, 9)
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(4):
            loss(model(torch.randn(4, 7, 16)).flatten(0, 1)).sum().backward()
            optimizer.step()

    assert prof.run.ranks[0].steps[1].num_samples == 4


def test_samples_are_what_most_parts_of_a_model_were_given(tmp_path):
    """stanza's parser is called by a method of its own, its loss among its parts: 120 sentences were told as the 4,320
    rows of three losses."""
    layers = {
        "words": torch.nn.Embedding(30, 16),
        "letters": torch.nn.Embedding(30, 16),
        "head": torch.nn.Linear(16, 9),
    }
    model = torch.nn.ModuleDict({**layers, "loss": torch.nn.CrossEntropyLoss()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(4):
            words, letters = torch.randint(30, (4, 7)), torch.randint(30, (28, 5))
            scores = model["head"](model["words"](words) + model["letters"](letters).mean(1).view(4, 7, 16))
            model["loss"](scores.flatten(0, 1), words.flatten() % 9).backward()
            optimizer.step()

    step = prof.run.ranks[0].steps[2]
    assert (step.num_samples, step.num_tokens) == (4, 28)


def test_how_large_the_largest_call_of_a_step_is(tmp_path):
    """By all tensors of the call, in containers too; a list that holds itself is no endless one."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, batch, scale=None):
            return (batch["x"][0] * self.weight).sum()

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    endless = [torch.zeros(3)]
    endless.append(endless)
    with memadvisor.profile(tmp_path / "run") as prof:
        for rows in (2, 5, 3):
            for each in (rows, 1):
                model({"x": [torch.ones(each, 4)]}, scale=torch.ones(7)).backward()
            with torch.no_grad():  # no part of the training
                model({"x": [torch.ones(100, 4)]})
            optimizer.step()
        model({"x": [torch.ones(2, 4)]}, scale=endless).backward()
        optimizer.step()
    sizes = [step.largest_input_elements for step in prof.run.ranks[0].steps]

    assert sizes[:3] == [4 * rows + 7 for rows in (2, 5, 3)]
    assert sizes[3] >= 8 + 3


def test_a_step_whose_end_is_known_later_keeps_its_own_largest_call():
    log = SpanLog(Position(), lambda: 0.0, lambda unit: None)
    model = ModuleInfo("model", "", is_unit=True, is_root=True)
    for elements in (5, 9):
        log._count_inputs(model, (torch.ones(elements, 1),), {}, None)
        log.note_update()
    log._count_inputs(model, (torch.ones(7, 1),), {}, None)

    assert log.step.largest_input == 9
    assert log.end_with_update(0.0).largest_input == 9
    assert log.step.largest_input == 7


def listen_to_four_steps(monkeypatch):
    monkeypatch.setattr(Listening, "wants", lambda self, index: index < 4)
    monkeypatch.setattr(recorder, "has_compiled", lambda: False)  # another test of this process may have


def test_steps_whose_modules_are_not_listened_to_tell_what_the_first_calls_were_given(tmp_path, monkeypatch):
    """By position or by name, of each micro-batch, past calls without gradients; no hook is left for the modules inside."""
    listen_to_four_steps(monkeypatch)
    num_hooks = []

    class Inner(torch.nn.Linear):
        def forward(self, x):
            num_hooks.append(len(torch.nn.modules.module._global_forward_pre_hooks))
            return super().forward(x)

    model = torch.nn.Sequential(Inner(4, 4), Inner(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = (3, 3, 3, 3, 5, 6, 9)
    with memadvisor.profile(tmp_path / "run") as prof:
        for number in rows:
            with torch.no_grad():
                model(torch.ones(50, 4))
            num_hooks.clear()
            for each in (1, number, 2):
                given = torch.ones(each, 4)
                (model(given) if number == 5 else model(input=given)).sum().backward()
            optimizer.step()
    steps = prof.run.ranks[0].steps

    assert [step.num_samples for step in steps] == [6, 6, 6, 6, None, None, None]
    assert [step.largest_input_elements for step in steps] == [4 * number for number in rows]
    assert set(num_hooks) == {0}
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_a_metric_that_is_called_between_steps_is_not_what_the_model_was_given(tmp_path, monkeypatch):
    listen_to_four_steps(monkeypatch)
    model = torch.nn.Linear(4, 1)
    metric = torch.nn.L1Loss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(7):
            model(torch.ones(2, 4)).sum().backward()
            metric(torch.ones(30), torch.ones(30))
            optimizer.step()
            metric(torch.ones(70), torch.ones(70))

    assert [step.largest_input_elements for step in prof.run.ranks[0].steps] == [8] * 7


def test_a_long_evaluation_is_not_watched_to_its_end(tmp_path, monkeypatch):
    listen_to_four_steps(monkeypatch)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    with memadvisor.profile(tmp_path / "run"):
        for _ in range(5):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        with torch.no_grad():
            assert hooks
            for _ in range(60):
                model(torch.ones(50, 4))
        assert not hooks
        model(torch.ones(2, 4)).sum().backward()
        assert hooks


def test_no_hook_comes_back_after_the_recorder_has_failed_in_a_backward(tmp_path, monkeypatch):
    listen_to_four_steps(monkeypatch)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(5):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        assert hooks
        loss = model(torch.ones(2, 4)).sum()
        loss.register_hook(lambda gradient: prof._recorder.fail(RuntimeError("planned")))
        loss.backward()
        assert not hooks


@pytest.mark.parametrize("drops", ["before the forward", "behind it"])
def test_a_batch_of_a_closure_counts_once_though_each_evaluation_makes_its_tensors_anew(tmp_path, drops):
    """And what a closure accumulates in one evaluation counts as it does outside of closures."""

    def run(name, model, optimizer, num_passes):
        def closure():
            if drops == "before the forward":
                optimizer.zero_grad()
            for number in range(num_passes):
                loss = model(torch.randn(4, 16)).square().sum()
                if drops == "behind it" and number == 0:
                    optimizer.zero_grad()
                loss.backward()
            return loss

        with memadvisor.profile(tmp_path / name) as prof:
            for _ in range(4):
                optimizer.step(closure)
        step = prof.run.ranks[0].steps[1]
        return step.num_samples, step.num_micro_batches, step.num_repeated_batches

    model = torch.nn.Linear(16, 1)
    searching = torch.optim.LBFGS(
        model.parameters(), lr=1e-3, max_iter=3, tolerance_change=0, tolerance_grad=0
    )
    assert run("lbfgs", model, searching, 1) == (4, 3, 2)
    assert run("lbfgs 2", model, searching, 2) == (8, 6, 4)
    assert run("sgd 2", model, torch.optim.SGD(model.parameters(), lr=0.1), 2) == (8, 2, 0)
