"""Facts about the host that the doctor reads."""

from memadvisor.doctor.host import quota_cores


def test_the_tightest_quota_of_the_control_groups_counts(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/outer/inner\n")
    inner = tmp_path / "sys/fs/cgroup/outer/inner"
    inner.mkdir(parents=True)
    assert quota_cores(tmp_path) is None

    (inner / "cpu.max").write_text("max 100000\n")
    (inner.parent / "cpu.max").write_text("150000 100000\n")
    assert quota_cores(tmp_path) == 1.5
