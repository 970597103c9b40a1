"""What the watches have told: every ExtractionJob, and its Jobs and pods, by namespace and job label.

kopf keeps the indexes. Two things they cannot know are kept beside them: objects that vanished while a watch was
interrupted for too long to be told so (the audit finds them), and our own writes that the watch has yet to repeat.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from headframe_operator.child_names import child_name, job_label
from headframe_operator.snapshot import STAGES, Snapshot
from headframe_operator.views import ExtractionView, JobView, job_view

Key = tuple[str, str]
"""Namespace and job label."""
_TOMBSTONES = 10_000
_REST_SECONDS_PER_POD = 50e-6
"""About ten times what a pod adds to a look: events never keep the operator busier than a tenth of its time."""
_LONGEST_ECHO_SECONDS = 30.0
"""A Job that we made and that no watch tells of for so long is not there any more."""


class Mirror:
    """The cluster as far as it concerns Headframe. Indexes map a Key to a collection of views."""

    def __init__(self, extractions: Mapping[Key, Any], jobs: Mapping[Key, Any], pods: Mapping[Key, Any]) -> None:
        self._extractions = extractions
        self._jobs = jobs
        self._pods = pods
        self._gone: dict[str, None] = {}
        self._written: dict[str, tuple[float, JobView]] = {}

    def extractions(self) -> Iterator[ExtractionView]:
        """Every ExtractionJob."""
        for key in list(self._extractions):
            found = self.extraction(key)
            if found is not None:
                yield found

    def extraction(self, key: Key) -> ExtractionView | None:
        """The ExtractionJob of a key. Of two of the same name, of which one is a memory, the newer."""
        found: list[ExtractionView] = [x for x in self._extractions.get(key, ()) if x.uid not in self._gone]
        return max(found, key=lambda x: x.created, default=None)

    def snapshot(self, key: Key) -> Snapshot | None:
        """What is known about the ExtractionJob of a key; None where there is none."""
        x = self.extraction(key)
        if x is None:
            return None
        jobs = {job.uid: job for job in self._known_jobs(key)}
        own = {job.stage: job for job in jobs.values() if job.owner_uid == x.uid}
        names = {child_name(x.name, stage): stage for stage in STAGES}
        taken = {
            names[job.name]: f"the Job {job.name} of an ExtractionJob before this one is still being deleted"
            for job in jobs.values()
            if job.owner_uid != x.uid and job.name in names
        }
        pods = tuple(pod for pod in self._pods.get(key, ()) if pod.uid not in self._gone and pod.job_uid in jobs)
        return Snapshot(extraction=x, jobs=own, taken=taken, pods=pods)

    def jobs(self) -> Iterator[JobView]:
        """Every Job that the watch has told of."""
        for key in list(self._jobs):
            yield from (job for job in self._jobs.get(key, ()) if job.uid not in self._gone)

    def rest_seconds(self, key: Key) -> float:
        """How long to let a key rest: a look at it takes time in proportion to its pods, of which events come in plenty."""
        return len(self._pods.get(key, ())) * _REST_SECONDS_PER_POD

    def wrote_job(self, answer: Mapping[str, Any]) -> None:
        """Remember a Job that we made, until the watch tells of it: else it would be made a second time."""
        view = job_view(answer)
        self._written[view.uid] = (time.monotonic(), view)

    def forget(self, uid: str) -> None:
        """An object is gone, whatever the indexes still hold."""
        self._gone[uid] = None
        self._written.pop(uid, None)
        while len(self._gone) > _TOMBSTONES:
            del self._gone[next(iter(self._gone))]

    def _known_jobs(self, key: Key) -> Iterator[JobView]:
        told = {job.uid: job for job in self._jobs.get(key, ()) if job.uid not in self._gone}
        for uid, (since, job) in list(self._written.items()):
            known = told.get(uid)
            overtaken = known is not None and known.version >= job.version
            if overtaken or time.monotonic() - since > _LONGEST_ECHO_SECONDS:
                del self._written[uid]
            elif (job.namespace, job.job_label) == key:
                told[uid] = job
        yield from told.values()


def key_of_extraction(namespace: str, name: str) -> Key:
    """The key under which an ExtractionJob and its children are kept."""
    return namespace, job_label(name)
