"""The number of cores that a process may use: those that it is bound to, within its container's quota."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from functools import cache
from pathlib import Path


@cache
def usable_cores(own: Path = Path("/proc/self/cgroup"), mounts: Path = Path("/proc/self/mountinfo")) -> int:
    """The number of cores that this process may use: those that it is bound to, and within its container's quota. A
    part of a core counts as one."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(bound, _quota(own, mounts))))


def _quota(own: Path, mounts: Path) -> float:
    """The seconds of processor time a second that the control groups of this process allow (cgroup v2, `cpu.max`; v1,
    `cpu.cfs_quota_us`); infinity if they set no limit, or none that can be read.

    `own`, `mounts`: the kernel's lists of this process's groups, and of mounted folders.
    """
    quota = math.inf
    with suppress(OSError, ValueError):  # not there, not for us to read, or not as the kernel writes it
        roots = _roots(mounts)
        for line in own.read_text(errors="surrogateescape").splitlines():
            _, controllers, path = line.split(":", 2)
            version = 2 if not controllers else 1 if "cpu" in controllers.split(",") else 0
            if version not in roots:
                continue
            root, top = roots[version]
            group = root / path.removeprefix(top).lstrip("/")
            for folder in (group, *group.parents):
                quota = min(quota, _quota_of(folder))
                if folder == root:
                    break
    return quota


def _roots(mounts: Path) -> dict[int, tuple[Path, str]]:
    """The folder of the control groups that limit processor time, and the group that this folder is, for each version
    of control groups that is mounted: 1 or 2. (In version 1 it is named "cpu", "cpu,cpuacct", or otherwise.)"""
    roots: dict[int, tuple[Path, str]] = {}
    for line in mounts.read_text(errors="surrogateescape").splitlines():
        mount, _, system = line.partition(" - ")
        kind, *_, options = system.split(" ")
        if kind == "cgroup2" or (kind == "cgroup" and "cpu" in options.split(",")):
            _, _, _, top, folder, *_ = mount.split(" ")
            roots.setdefault(2 if kind == "cgroup2" else 1, (Path(folder), top))
    return roots


def _quota_of(folder: Path) -> float:
    """The quota of one control group; infinity if it sets none, or none that can be read."""
    try:
        if (folder / "cpu.max").exists():
            allowed, period = map(int, (folder / "cpu.max").read_text().split())  # no limit: the word "max"
        else:
            allowed, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    except (OSError, ValueError):
        return math.inf
    return allowed / period if allowed > 0 and period > 0 else math.inf  # no limit in v1: -1
