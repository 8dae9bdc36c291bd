"""Free memory of a host, from the kernel's files."""

from pathlib import Path

from memadvisor.hardware.host_memory import free_host_bytes

KIB = 1024


def host(root, *, available_kib, groups=None, cgroup="0::/job/step\n"):
    files = {
        "proc/meminfo": f"MemTotal: 9000 kB\nMemAvailable: {available_kib} kB\n",
        "proc/self/cgroup": cgroup,
    }
    for folder, (limit, used, cached) in (groups or {}).items():
        files[f"sys/fs/cgroup/{folder}/memory.max"] = f"{limit}\n"
        files[f"sys/fs/cgroup/{folder}/memory.current"] = f"{used}\n"
        files[f"sys/fs/cgroup/{folder}/memory.stat"] = f"anon 5\ninactive_file {cached}\n"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_kernels_word_counts_where_no_group_has_a_limit(tmp_path):
    groups = {"job/step": ("max", 10, 0)}
    assert free_host_bytes(host(tmp_path, available_kib=700, groups=groups)) == 700 * KIB


def test_the_narrowest_limit_around_the_process_counts_with_its_page_cache(tmp_path):
    groups = {"job/step": (400 * KIB, 100 * KIB, 50 * KIB), "job": (390 * KIB, 100 * KIB, 0)}
    assert free_host_bytes(host(tmp_path, available_kib=700, groups=groups)) == 290 * KIB


def test_limits_of_others_and_unreadable_files_do_not_count(tmp_path):
    groups = {"other": (1, 1, 0), "job": ("a lot", 1, 0)}
    assert free_host_bytes(host(tmp_path, available_kib=700, groups=groups)) == 700 * KIB
    assert free_host_bytes(host(tmp_path / "old", available_kib=700, cgroup="4:memory:/x\n")) == 700 * KIB


def test_nothing_is_known_without_the_kernels_word(tmp_path):
    assert free_host_bytes(tmp_path) is None


def test_this_host():
    assert Path("/proc/meminfo").exists() is (free_host_bytes() is not None)
