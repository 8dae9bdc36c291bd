"""Ranks of one launch agree on a run directory without a word; nobody writes into another's run."""

import pytest

from memadvisor.errors import UsageError
from memadvisor.run.launch import take_run_directory
from memadvisor.run.store import journal_path


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Become a rank of the launch whose port this is."""
    monkeypatch.chdir(tmp_path)

    def become(rank, port=1234):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("MASTER_PORT", str(port))
        return rank

    return become


@pytest.mark.parametrize("out", ["run", None])
def test_ranks_share_a_directory_and_each_has_it_once(launched, out):
    paths = [take_run_directory(out, "train", rank=launched(rank)) for rank in (0, 1)]
    assert paths[0] == paths[1] and paths[0].is_absolute() and paths[0].is_dir()
    for rank in (0, 1):
        journal_path(paths[0], rank).touch()
    if out is None:  # a second run of the same launch
        again = [take_run_directory(None, "train", rank=launched(rank)) for rank in (0, 1)]
        assert again[0] == again[1] != paths[0]
    else:
        with pytest.raises(UsageError, match="is not empty"):
            take_run_directory(out, "train", rank=launched(0))


def test_another_launch_is_refused(launched):
    take_run_directory("run", "train", rank=launched(0))
    with pytest.raises(UsageError, match="is not empty"):
        take_run_directory("run", "train", rank=launched(1, port=99))


def test_without_a_launcher_a_directory_is_taken_once(monkeypatch, tmp_path):
    monkeypatch.delenv("RANK", raising=False)
    path = take_run_directory(tmp_path / "run", "train", rank=0)
    (path / "file").touch()
    with pytest.raises(UsageError, match="is not empty"):
        take_run_directory(tmp_path / "run", "train", rank=0)
