"""Which CPUs each worker process of one machine runs on: those near its GPU, none of them given to two.

A worker's page-locked buffers are made by its own threads, so the kernel puts them on the node of its CPUs: next to the GPU
that fills them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def divide_cores(
    near: Sequence[frozenset[int]], allowed: frozenset[int], core_of: Mapping[int, int]
) -> list[frozenset[int]]:
    """Each worker's CPUs.

    `near`: what lies near each worker's GPUs, empty where nobody knows. `core_of`: a number for each CPU that it shares with
    the other hardware threads of its core. Workers near the same CPUs divide the cores among them; too many for that share all.
    """
    wanted = [(cpus & allowed) or allowed for cpus in near]
    given = []
    for index, cpus in enumerate(wanted):
        neighbours = [other for other, theirs in enumerate(wanted) if theirs == cpus]
        cores = sorted({core_of[cpu] for cpu in cpus})
        if len(cores) < len(neighbours):
            given.append(cpus)
            continue
        turn = neighbours.index(index)
        start, end = (len(cores) * step // len(neighbours) for step in (turn, turn + 1))
        mine = set(cores[start:end])
        given.append(frozenset(cpu for cpu in cpus if core_of[cpu] in mine))
    return given


def read_cores(cpus: frozenset[int]) -> dict[int, int]:
    """For each CPU the lowest one of its core; itself where the kernel does not tell."""
    return {cpu: _lowest_sibling(cpu) for cpu in cpus}


def allowed_cpus() -> frozenset[int]:
    """The CPUs that this process may run on."""
    return frozenset(os.sched_getaffinity(0))


def _lowest_sibling(cpu: int) -> int:
    try:
        listed = Path(_TOPOLOGY.format(cpu)).read_text()
    except OSError:
        return cpu
    return int(listed.replace("-", ",").split(",")[0])
