"""A container's CPU limit bounds the threads of a forward pass."""

import pytest

from sglang_ext.cpu import cgroup_limits, install
from sglang_ext.cpu.cgroup_limits import allowed_processors


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Makes the files that the kernel would show; `own` is /proc/self/cgroup."""
    mount = tmp_path / "sys" / "fs" / "cgroup"
    monkeypatch.setattr(cgroup_limits, "_MOUNT", mount)
    monkeypatch.setattr(cgroup_limits, "_OWN", tmp_path / "own")

    def make(own: str, files: dict[str, str]) -> None:
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            path = mount / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return make


def test_version_2(groups):
    groups("0::/app\n", {"app/cpu.max": "150000 100000\n"})
    assert allowed_processors() == pytest.approx(1.5)


def test_the_least_of_all_groups_above_counts(groups):
    groups(
        "0::/pod/app\n",
        {
            "cpu.max": "max 100000\n",
            "pod/cpu.max": "200000 100000\n",
            "pod/app/cpu.max": "max 100000",
        },
    )
    assert allowed_processors() == pytest.approx(2.0)


def test_version_1(groups):
    groups(
        "4:cpu,cpuacct:/box\n0::/\n",
        {"cpu/box/cpu.cfs_quota_us": "50000\n", "cpu/box/cpu.cfs_period_us": "100000\n"},
    )
    assert allowed_processors() == pytest.approx(0.5)


def test_version_1_without_a_limit(groups):
    groups(
        "4:cpu:/box\n",
        {"cpu/box/cpu.cfs_quota_us": "-1\n", "cpu/box/cpu.cfs_period_us": "100000\n"},
    )
    assert allowed_processors() is None


def test_a_container_that_sees_its_own_group_as_the_root(groups):
    # The path is the host's, what is mounted is the container's own group.
    groups("0::/kubepods/pod7/abc\n", {"cpu.max": "300000 100000\n"})
    assert allowed_processors() == pytest.approx(3.0)


def test_nothing_that_can_be_read_is_no_limit(groups):
    groups("0::/\n", {"cpu.max": "what\n"})
    assert allowed_processors() is None


@pytest.mark.parametrize(("allowed", "cores"), [(None, 8), (0.5, 1), (2.7, 2), (99.0, 8)])
def test_threads_are_whole_cores_of_the_limit(monkeypatch, allowed, cores):
    monkeypatch.setattr(install, "_physical_cores", lambda: 8)
    monkeypatch.setattr(install, "allowed_processors", lambda: allowed)
    assert install.usable_cores() == cores
