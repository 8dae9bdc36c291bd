"""What is recorded of waiting for DataLoaders: exactly what their data sets take, as a clock has it that they alone advance."""

import os
import queue
import subprocess
import sys
import threading
import traceback
import types

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

import memadvisor
from memadvisor.capture import data_waits
from memadvisor.capture.clock import HostClock
from memadvisor.capture.loader_hooks import tell_of_loaders

OWN_NEXT, OWN_ITER = _BaseDataLoaderIter.__next__, DataLoader.__iter__


class Clock:
    now_s = 0.0


@pytest.fixture
def clock(monkeypatch):
    """Time passes only where a test says so, so what it is spent on is known to the bit."""
    Clock.now_s = 1000.0
    monkeypatch.setattr(HostClock, "mark", staticmethod(lambda: Clock.now_s))
    return Clock


class Slow(Dataset):
    """Each sample takes half a second of the clock's."""

    def __init__(self, size=8, sample_s=0.5):
        self.size, self.sample_s = size, sample_s

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index >= self.size:
            raise IndexError(index)
        Clock.now_s += self.sample_s
        return torch.full((4,), float(index))


class Stream(IterableDataset):
    def __init__(self, size=8):
        self.size = size

    def __iter__(self):
        for index in range(self.size):
            Clock.now_s += 0.25
            yield torch.full((4,), float(index))
        Clock.now_s += 8.0  # to find out that there is no more


class Broken(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 6:
            raise LookupError("sample 6")
        return torch.ones(4)


class Trained:
    """A model and its optimizer."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.losses = []

    def step(self, batch):
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def epochs(self, loader, number=1):
        for _ in range(number):
            for batch in loader:
                self.step(batch)


def waits_of(prof, **wanted):
    rows = prof.run.ranks[0].data_waits
    return [row for row in rows if all(getattr(row, name) == value for name, value in wanted.items())]


def test_a_step_waits_for_what_its_samples_take(tmp_path, clock):
    """The first batch comes before the first model is called: before step 0."""
    with memadvisor.profile(tmp_path / "run") as prof:
        Trained().epochs(DataLoader(Slow(12), batch_size=2))
    rank = prof.run.ranks[0]

    assert [(row.step, row.wait_s, row.num_batches) for row in rank.data_waits] == [
        (step, 1.0, 1) for step in range(1, 6)
    ]
    assert all(row.thread_s == row.wait_s and row.start_s == 0 for row in rank.data_waits)
    assert {(row.phase, row.is_evaluation, row.num_starts) for row in rank.data_waits} == {
        ("outside", False, 0)
    }
    assert [step.duration_s for step in rank.steps] == [0.0, *[1.0] * 5]
    (loader,) = rank.data_loaders
    assert (loader.num_workers, loader.batch_size, loader.prefetch_factor) == (0, 2, None)
    assert (loader.pin_memory, loader.persistent_workers) == (False, False)


def test_the_first_batch_of_an_epoch_is_told_apart(tmp_path, clock):
    """A stream that takes long to say that it is over, so the next epoch's first step is a long one."""
    with memadvisor.profile(tmp_path / "run") as prof:
        Trained().epochs(DataLoader(Stream(4), batch_size=1), number=3)

    starts = {row.step: (row.wait_s, row.start_s, row.num_batches) for row in waits_of(prof, num_starts=1)}
    assert starts == {4: (8.25, 8.25, 1), 8: (8.25, 8.25, 1)}
    assert all(row.start_s == 0 and row.wait_s == 0.25 for row in waits_of(prof, num_starts=0))


def test_micro_batches_of_a_step_are_one_row(tmp_path, clock):
    trained, loader = Trained(), DataLoader(Slow(18), batch_size=1)
    with memadvisor.profile(tmp_path / "run") as prof:
        for number, batch in enumerate(loader):
            trained.model(batch).sum().backward()
            if number % 3 == 2:
                trained.optimizer.step()

    later = [(row.num_batches, row.wait_s) for row in waits_of(prof) if row.step > 0]
    assert later == [(3, 1.5)] * 5


def evaluate_without_gradients(trained, loader):
    with torch.no_grad():
        for batch in loader:
            trained.model(batch)


def evaluate_as_hugging_face_does(trained, loader):
    """The batches are asked for with gradients on, and nobody puts the model into training mode again but the next step."""
    trained.model.eval()
    for batch in loader:
        with torch.no_grad():
            trained.model(batch)


@pytest.mark.parametrize("evaluate", [evaluate_without_gradients, evaluate_as_hugging_face_does])
def test_a_validations_batches_are_its_own(tmp_path, clock, evaluate):
    trained, training = Trained(), DataLoader(Slow(8), batch_size=2)
    validation = DataLoader(Slow(6, sample_s=2.0), batch_size=2)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(3):
            for batch in training:
                trained.model.train()
                trained.step(batch)
            evaluate(trained, validation)
    rank = prof.run.ranks[0]

    # After epoch 0 in step 4, after epoch 1 in step 8; after the last one there is no step.
    assert [(row.step, row.num_batches, row.wait_s) for row in waits_of(prof, is_evaluation=True)] == [
        (4, 3, 12.0),
        (8, 3, 12.0),
    ]
    assert [row.step for row in waits_of(prof, is_evaluation=False)] == [*range(1, 12)]
    assert {row.wait_s for row in waits_of(prof, is_evaluation=False)} == {1.0}
    assert len(rank.data_loaders) == 2


def test_a_model_that_is_trained_in_evaluation_mode_is_trained(tmp_path, clock):
    """As where the statistics of norms are frozen."""
    trained = Trained()
    trained.model.eval()
    with memadvisor.profile(tmp_path / "run") as prof:
        trained.epochs(DataLoader(Slow(), batch_size=2))

    assert [row.is_evaluation for row in waits_of(prof)] == [False] * 3


def test_loaders_of_their_own_setup_are_apart(tmp_path, clock):
    """A GAN's two: which one is waited for can be told."""
    generator, critic = Trained(), Trained()
    images, noise = DataLoader(Slow(8), batch_size=2), DataLoader(Slow(8, sample_s=0.125), batch_size=2)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(2):
            for real, fake in zip(images, noise, strict=True):
                critic.step(real)
                generator.step(fake)
    rank = prof.run.ranks[0]

    assert [loader.loader for loader in rank.data_loaders] == [0, 1]
    for step in (2, 3, 5, 6):
        assert [(row.loader, row.wait_s) for row in waits_of(prof, step=step)] == [(0, 1.0), (1, 0.25)]


def test_how_a_loader_is_set_up_is_recorded_as_far_as_it_is_known(tmp_path, clock):
    """A sampler of batches says how large they are; a list of them does not, nor does a loader that batches nothing."""
    sampler = BatchSampler(SequentialSampler(Slow(8)), batch_size=4, drop_last=False)
    loaders = [
        DataLoader(Slow(8), batch_size=2),
        DataLoader(Slow(8), batch_sampler=sampler),
        DataLoader(Slow(8), batch_sampler=[[0, 1, 2], [3, 4, 5]]),
        DataLoader(Slow(8), batch_size=None),
    ]
    trained = Trained()
    with memadvisor.profile(tmp_path / "run") as prof:
        trained.step(torch.ones(2, 4))
        for loader in loaders:
            trained.epochs(loader)

    assert [loader.batch_size for loader in prof.run.ranks[0].data_loaders] == [2, 4, None, None]
    assert [loader.loader for loader in prof.run.ranks[0].data_loaders] == [0, 1, 2, 3]


def test_a_loader_that_is_read_already_when_the_profile_begins_is_known_by_its_iterator(tmp_path, clock):
    trained, batches = Trained(), iter(DataLoader(Slow(16), batch_size=2))
    trained.step(next(batches))
    with memadvisor.profile(tmp_path / "run") as prof:
        for batch in batches:
            trained.step(batch)

    assert [(row.num_batches, row.num_starts) for row in waits_of(prof)] == [(1, 0)] * 6
    assert [loader.batch_size for loader in prof.run.ranks[0].data_loaders] == [2]


def test_loaders_that_are_made_anew_for_each_epoch_are_one(tmp_path, clock):
    trained, samples = Trained(), Slow(4)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(3):
            trained.epochs(DataLoader(samples, batch_size=2))

    assert len(prof.run.ranks[0].data_loaders) == 1


def test_waiting_inside_an_optimizers_closure_is_the_optimizers(tmp_path, clock):
    trained, batches = Trained(), iter(DataLoader(Slow(64), batch_size=1))
    optimizer = torch.optim.LBFGS(trained.model.parameters(), max_iter=1)

    def closure():
        optimizer.zero_grad()
        loss = trained.model(next(batches)).square().mean()
        loss.backward()
        return loss

    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(5):
            optimizer.step(closure)

    assert {row.phase for row in waits_of(prof) if row.step > 0} == {"optimizer"}


def test_a_loader_that_a_data_set_reads_is_part_of_the_others_wait(tmp_path, clock):
    class Pairs(Dataset):
        def __init__(self):
            self.inner = iter(DataLoader(Slow(64), batch_size=2))

        def __len__(self):
            return 8

        def __getitem__(self, index):
            Clock.now_s += 0.25
            return next(self.inner)[0]

    with memadvisor.profile(tmp_path / "run") as prof:
        Trained().epochs(DataLoader(Pairs(), batch_size=1))

    assert {(row.loader, row.num_batches, row.wait_s) for row in waits_of(prof)} == {(0, 1, 1.25)}
    assert len(prof.run.ranks[0].data_loaders) == 1


def test_what_another_thread_fetches_is_not_waited_for(tmp_path, clock):
    """The training waits for the thread's queue, of which nothing is known."""
    ready = queue.Queue()
    trained = Trained()

    def fetch():
        for batch in DataLoader(Slow(), batch_size=2):
            ready.put(batch)
        ready.put(None)

    with memadvisor.profile(tmp_path / "run") as prof:
        trained.step(torch.ones(2, 4))
        thread = threading.Thread(target=fetch)
        thread.start()
        while (batch := ready.get(timeout=60)) is not None:
            trained.step(batch)
        thread.join()

    assert len(prof.run.ranks[0].steps) == 5
    assert prof.run.ranks[0].data_waits == prof.run.ranks[0].data_loaders == ()


class OnDevice:
    """A mark that a device passes when it has done what it was given before."""

    busy_until_s = 0.0

    def __init__(self):
        self.host_s = Clock.now_s
        self.passed_s = max(self.host_s, OnDevice.busy_until_s)

    def seconds(self):
        return self.passed_s

    @classmethod
    def work(cls, seconds):
        cls.busy_until_s = max(Clock.now_s, cls.busy_until_s) + seconds


@pytest.mark.parametrize(("work_s", "idle_s"), [(8.0, 0.0), (0.75, 0.25)])
def test_a_device_waits_only_where_it_has_nothing_left_to_do(tmp_path, monkeypatch, work_s, idle_s):
    """Batches of a second each, and the script never asks for a result: it runs ahead of a device that has much to do."""
    Clock.now_s, OnDevice.busy_until_s = 1000.0, 0.0
    monkeypatch.setattr(HostClock, "mark", staticmethod(OnDevice))
    monkeypatch.setattr(data_waits, "time", types.SimpleNamespace(monotonic=lambda: Clock.now_s))
    trained = Trained()
    with memadvisor.profile(tmp_path / "run") as prof:
        for batch in DataLoader(Slow(12), batch_size=2):
            loss = trained.model(batch).square().mean()
            OnDevice.work(work_s)
            loss.backward()
            trained.optimizer.step()

    assert [(row.wait_s, row.thread_s) for row in waits_of(prof)] == [(idle_s, 1.0)] * 5
    # Six steps of 8 s each, of which five seconds have passed; or the work of the last one alone.
    assert prof.run.ranks[0].steps[-1].device_lag_s == (6 * work_s - 5 if work_s > 1 else work_s)


def test_a_step_that_turns_out_to_have_ended_has_its_own_waits(tmp_path, clock):
    """A critic that is updated twice in a round: the first of its second updates shows that a step had ended."""
    generator, critic, batches = Trained(), Trained(), iter(DataLoader(Slow(64), batch_size=2))
    critic.step(next(batches))
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(5):
            for _ in range(2):
                critic.step(next(batches))
            generator.step(next(batches))
    rank = prof.run.ranks[0]
    waited = {step.index: 0.0 for step in rank.steps}
    for row in rank.data_waits:
        waited[row.step] += row.wait_s

    # Of 15 batches the first came before any step, and the last after the last one that is known to have ended.
    assert sum(waited.values()) == 13.0
    assert [waited[step.index] for step in rank.steps] == [step.duration_s for step in rank.steps]


@pytest.mark.parametrize(("method", "lasts"), [("fork", False), ("fork", True), ("spawn", True)])
def test_workers_are_as_they_are_without_us(tmp_path, method, lasts):
    def train():
        trained = Trained()
        loader = DataLoader(
            Samples(),
            batch_size=2,
            shuffle=True,
            num_workers=2,
            multiprocessing_context=method,
            persistent_workers=lasts,
            prefetch_factor=3,
        )
        trained.epochs(loader, number=2)
        return trained.losses, torch.rand(1)

    plain = train()
    with memadvisor.profile(tmp_path / "run") as prof:
        assert train() == plain
    rank = prof.run.ranks[0]

    assert sum(row.num_batches for row in rank.data_waits) == 7  # of 8, the first came before step 0
    assert [row.step for row in waits_of(prof, num_starts=1)] == [4]
    (loader,) = rank.data_loaders
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (2, 3, lasts)
    assert len(list((tmp_path / "run").glob("*.journal"))) == 1


class Samples(Dataset):
    """In a process of its own this is run where nothing of ours is: what it gives out says so."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        is_plain = not _BaseDataLoaderIter.__next__.__module__.startswith("memadvisor")
        return torch.full((4,), float(index + 100 * (not is_plain)))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_a_data_set_raises_is_raised(tmp_path, num_workers):
    def train():
        trained = Trained()
        trained.step(torch.ones(2, 4))
        batches = iter(DataLoader(Broken(), batch_size=2, num_workers=num_workers))
        with pytest.raises(LookupError, match="sample 6") as caught:
            for batch in batches:
                trained.step(batch)
        for worker in getattr(batches, "_workers", ()):
            worker.terminate()  # torch's own way to end them would wait for ten seconds
        return trained.losses, [frame.name for frame in traceback.extract_tb(caught.tb)]

    losses, frames = train()
    with memadvisor.profile(tmp_path / "run") as prof:
        same_losses, with_ours = train()
        Trained().step(torch.ones(2, 4))

    assert same_losses == losses
    # One frame of ours, which `profile SCRIPT` takes out where nobody catches the exception.
    assert with_ours == [name for frame in frames for name in [frame] * (2 if frame == "__next__" else 1)]
    assert [row.num_batches for row in waits_of(prof)] == [1, 1, 1, 0]


def test_an_exception_of_a_data_set_shows_no_frame_of_ours(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from torch.utils.data import DataLoader\n"
        "model = torch.nn.Linear(4, 4)\n"
        "model(torch.ones(2, 4)).sum().backward()\n"
        "for batch in DataLoader([torch.ones(4), None], batch_size=1):\n"
        "    model(batch)\n"
    )
    plain = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    command = [sys.executable, "-m", "memadvisor", "profile", "--out", str(tmp_path / "run"), str(script)]
    profiled = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert profiled.returncode == plain.returncode == 1
    assert profiled.stderr.endswith(plain.stderr[plain.stderr.index("Traceback") :])


def test_nothing_is_left_where_profiles_end(tmp_path):
    outer, inner = memadvisor.profile(tmp_path / "outer"), memadvisor.profile(tmp_path / "inner")
    outer.__enter__()
    inner.__enter__()
    Trained().epochs(DataLoader(Slow(), batch_size=2))
    outer.__exit__(None, None, None)  # the one whose wrapper is inside the other's
    Trained().epochs(DataLoader(Slow(), batch_size=2))
    inner.__exit__(None, None, None)

    assert (_BaseDataLoaderIter.__next__, DataLoader.__iter__) == (OWN_NEXT, OWN_ITER)
    assert [sum(row.num_batches for row in prof.run.ranks[0].data_waits) for prof in (outer, inner)] == [3, 7]


def test_somebody_elses_wrapper_stays_and_ours_inside_it_does_nothing(tmp_path):
    seen = []
    with memadvisor.profile(tmp_path / "run") as prof:
        trained = Trained()
        trained.step(torch.ones(2, 4))
        ours = _BaseDataLoaderIter.__next__

        def theirs(self):
            seen.append(self)
            return ours(self)

        _BaseDataLoaderIter.__next__ = theirs
        trained.epochs(DataLoader(Slow(), batch_size=2))
    try:
        num_recorded, num_seen = sum(row.num_batches for row in prof.run.ranks[0].data_waits), len(seen)
        assert _BaseDataLoaderIter.__next__ is theirs
        trained.epochs(DataLoader(Slow(), batch_size=2))
        assert len(seen) == 2 * num_seen
    finally:
        _BaseDataLoaderIter.__next__ = ours  # as they would put it back
    assert num_recorded == 4
    tell_of_loaders(Nobody())()

    assert _BaseDataLoaderIter.__next__ is OWN_NEXT


class Nobody:
    """Whose concern no wait is."""

    def begin(self):
        return None

    def end(self, begun, iterator, what):
        raise AssertionError("nothing has begun")

    def meet(self, iterator, loader):
        pass


def test_a_forked_child_of_the_scripts_own_begins_without_ours(tmp_path):
    with memadvisor.profile(tmp_path / "run"):
        Trained().step(torch.ones(2, 4))
        assert _BaseDataLoaderIter.__next__ is not OWN_NEXT
        child = os.fork()
        if child == 0:
            os._exit(int(_BaseDataLoaderIter.__next__ is not OWN_NEXT))

        assert os.waitpid(child, 0)[1] == 0


def test_a_loader_of_torchdatas_is_seen(tmp_path, clock):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    with memadvisor.profile(tmp_path / "run") as prof:
        Trained().epochs(stateful.StatefulDataLoader(Slow(), batch_size=2, num_workers=0), number=2)

    assert [row.wait_s for row in waits_of(prof)] == [1.0] * 7
    assert [loader.batch_size for loader in prof.run.ranks[0].data_loaders] == [2]


def test_a_loader_of_accelerates_is_seen(tmp_path, clock):
    """Its loader is one batch ahead, so the last batch of an epoch comes with the one before."""
    accelerate = pytest.importorskip("accelerate")
    trained = Trained()
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(
        trained.model, trained.optimizer, DataLoader(Slow(), batch_size=2, shuffle=True)
    )
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(2):
            for batch in loader:
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    assert [(row.step, row.num_batches, row.wait_s) for row in waits_of(prof)] == [
        (1, 1, 1.0),
        (2, 1, 1.0),
        (3, 0, 0.0),
        (4, 2, 2.0),
        (5, 1, 1.0),
        (6, 1, 1.0),
        (7, 0, 0.0),
    ]
    (info,) = prof.run.ranks[0].data_loaders
    assert (info.num_workers, info.batch_size) == (0, 2)


def test_a_loader_of_lightnings_is_seen(tmp_path, clock):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def training_step(self, batch, number):
            return self.layer(batch).square().mean()

        def validation_step(self, batch, number):
            self.layer(batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    with memadvisor.profile(tmp_path / "run") as prof:
        trainer.fit(
            Module(), DataLoader(Slow(12), batch_size=2), DataLoader(Slow(4, sample_s=2.0), batch_size=2)
        )
    training, validation = waits_of(prof, is_evaluation=False), waits_of(prof, is_evaluation=True)

    assert {row.step: row.wait_s for row in validation if row.step} == {6: 8.0, 12: 8.0}
    assert sum(row.wait_s for row in training if 6 <= row.step < 12) == 6.0
    assert len(prof.run.ranks[0].data_loaders) == 2
