"""How many threads can run at a time. A kernel with more of them waits for the one that has no core."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def available_cores(
    cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int:
    """Cores this process may run on, or fewer where its control group (a container's limit) grants less time.

    Of a limit of 2.5 cores it is 2: a third thread would be stopped for half of the time, and the others would wait.

    Args:
        cgroups: where control groups are mounted, version 1 or 2.
        membership: the file that names the groups of this process.
    """
    # Before Python 3.13 only Linux tells the affinity; elsewhere there are no control groups either.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(int(limit) for limit in _limits(cgroups, membership))]))


def _limits(cgroups: Path, membership: Path) -> Iterator[float]:
    """Cores granted by the group of this process and by each one above it, where they are limited."""
    for folder in _own_groups(cgroups, membership):
        try:
            if (folder / "cpu.max").is_file():  # version 2: quota and period in us, or "max"
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if quota != "max" and int(quota) > 0:  # -1 in version 1: no limit
                yield int(quota) / int(period)
        except (OSError, ValueError, ZeroDivisionError):
            continue  # no file, or none that can be read: no limit that is known


def _own_groups(cgroups: Path, membership: Path) -> Iterator[Path]:
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")  # such as 4:cpu,cpuacct:/docker/1a2b; version 2 names none
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = cgroups / controllers
        group = root / path.lstrip("/")
        # Inside a container the path may be that of the host; its own group is then what is mounted.
        yield from (folder for folder in (group, *group.parents) if folder == root or root in folder.parents)
