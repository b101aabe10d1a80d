"""How many threads the kernels get by default: the cores of the process, less what a container may not use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fast.cores import available_cores

CORES = len(os.sched_getaffinity(0))
MANY = 10**6  # more than any machine has


@pytest.fixture
def cgroups(tmp_path: Path) -> Path:
    return tmp_path / "cgroup"


def limit(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def cores_of(cgroups: Path, membership: str, monkeypatch: pytest.MonkeyPatch, affinity: int = MANY) -> int:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(affinity))
    file = cgroups.parent / "membership"
    file.write_text(membership)
    return available_cores(cgroups, file)


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("max 100000", MANY),
        ("200000 100000", 2),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("nonsense", MANY),
    ],
)
def test_version_2_grants_whole_cores_of_its_quota(
    cgroups: Path, monkeypatch: pytest.MonkeyPatch, quota: str, expected: int
) -> None:
    limit(cgroups / "service", cpu__max=quota)
    assert cores_of(cgroups, "0::/service\n", monkeypatch) == expected


def test_the_tightest_group_above_counts(cgroups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(cgroups / "a", cpu__max="300000 100000")
    limit(cgroups / "a" / "b", cpu__max="max 100000")
    limit(cgroups / "a" / "b" / "c", cpu__max="700000 100000")
    assert cores_of(cgroups, "0::/a/b/c\n", monkeypatch) == 3


@pytest.mark.parametrize(("quota", "expected"), [("400000", 4), ("-1", MANY)])
def test_version_1_has_quota_and_period_in_files_of_their_own(
    cgroups: Path, monkeypatch: pytest.MonkeyPatch, quota: str, expected: int
) -> None:
    limit(cgroups / "cpu,cpuacct" / "x", cpu__cfs_quota_us=quota, cpu__cfs_period_us="100000")
    limit(
        cgroups / "memory" / "x", cpu__cfs_quota_us="100000", cpu__cfs_period_us="100000"
    )  # not about cores
    assert cores_of(cgroups, "7:memory:/x\n4:cpu,cpuacct:/x\n", monkeypatch) == expected


def test_a_container_that_sees_the_path_of_its_host_finds_its_own_group(
    cgroups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(cgroups, cpu__max="200000 100000")
    assert cores_of(cgroups, "0::/docker/1a2b3c\n", monkeypatch) == 2


def test_the_affinity_is_never_exceeded(cgroups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(cgroups, cpu__max="800000 100000")
    assert cores_of(cgroups, "0::/\n", monkeypatch, affinity=3) == 3
    assert available_cores(cgroups / "missing", cgroups / "missing") == 3


def test_kernels_start_with_as_many_threads_unless_told_otherwise(repository: Path) -> None:
    code = "import fast.kernels, torch; print(torch.get_num_threads())"
    unset = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    for environment, expected in ((unset, available_cores()), ({**unset, "OMP_NUM_THREADS": "1"}, 1)):
        result = subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            cwd=repository,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert int(result.stdout) == expected
