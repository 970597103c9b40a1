"""What holds for every sequence of events: a small Kubernetes is played, in any order, and the outcome is the same."""

from datetime import timedelta
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes_objects import NOW, PLAN, SETTINGS, Json, extraction, job, pod

from headframe_api.status import ExtractionJobStatus
from headframe_operator.decide import decide
from headframe_operator.report import only_progress_differs
from headframe_operator.snapshot import Snapshot
from headframe_operator.views import extraction_view, job_view, pod_view

EVENTS = ("run", "succeed", "retry", "lose jobs", "lose pods", "restart", "suspend", "resume", "wait", "nothing")
FATAL = ("config", "give up")


class World:
    """One ExtractionJob in a Kubernetes of a few words: it makes what is decided, and plays what happens to it."""

    def __init__(self) -> None:
        self.now = NOW
        self.status = ExtractionJobStatus()
        self.suspended = False
        self.stages: dict[str, Json] = {}
        self.created: list[str] = []
        self.history: list[ExtractionJobStatus] = []

    def snapshot(self) -> Snapshot:
        """What the operator would see."""
        x = extraction({"suspend": self.suspended}, self.status.to_dict())
        jobs, pods = {}, []
        for stage, state in self.stages.items():
            jobs[stage] = job_view(
                job(x, stage, **{k: v for k, v in state.items() if k in ("spec", "status", "ended")})
            )
            pods += [pod_view(raw) for raw in state["pods"]]
        return Snapshot(extraction=extraction_view(x), jobs=jobs, pods=tuple(pods))

    def reconcile(self) -> None:
        """What the operator does on any event."""
        decision = decide(self.snapshot(), self.now, SETTINGS)
        for stage in decision.create:
            assert stage not in self.stages
            self.stages[stage] = {"spec": {"suspend": False}, "status": {}, "pods": []}
            self.created.append(stage)
        for update in decision.update:
            if update.suspend is not None:
                self.stages[update.stage]["spec"] = {"suspend": update.suspend}
                self.stages[update.stage]["pods"] = []
        for deletion in decision.delete:
            del self.stages[deletion.stage]
        if decision.status is not None:
            self.status = decision.status
            self.history.append(decision.status)

    def play(self, event: str) -> None:
        """Let something happen to the newest unfinished Job, or to the world around it."""
        self.now += timedelta(seconds=1)
        open_stages = [
            stage for stage, s in self.stages.items() if "ended" not in s and not s["spec"].get("suspend", False)
        ]
        if event in ("suspend", "resume"):
            self.suspended = event == "suspend"
        elif event == "lose jobs":
            self.stages.clear()
        elif event == "lose pods":
            for state in self.stages.values():
                state["pods"] = []
        elif open_stages:
            self._happen(open_stages[-1], event)

    def _happen(self, stage: str, event: str) -> None:
        state, index = self.stages[stage], 0 if stage == "extract" else None
        said: dict[str, Any] = {"plan": PLAN} if stage == "prepare" else {}
        if event == "run":
            state["pods"] = [pod(stage, index, run=True)]
        elif event == "succeed":
            state["ended"] = ("Complete", "Done")
            state["status"] = {"succeeded": 4, "completedIndexes": "0-3"} if stage == "extract" else {}
            state["pods"] = [pod(stage, index, exit=0, said=said)]
        elif event == "retry":
            state["pods"] = [pod(stage, index, exit=75, said={"reason": "StoreUnreachable"})]
        elif event == "config":
            state["ended"] = ("Failed", "PodFailurePolicy")
            state["pods"] = [pod(stage, index, exit=78, said={"reason": "Wrong", "message": "m"})]
        elif event == "give up":
            state["ended"] = ("Failed", "BackoffLimitExceeded")

    def settle(self) -> None:
        """Let everything go well from here on."""
        self.suspended = False
        for _ in range(12):
            self.reconcile()
            self.play("succeed")
        self.reconcile()


@given(st.lists(st.sampled_from(EVENTS), max_size=25), st.lists(st.booleans(), min_size=25, max_size=25))
@settings(max_examples=100, deadline=None)
def test_whatever_happens_a_job_that_can_succeed_does(events: list[str], looks: list[bool]) -> None:
    world = World()
    for event, look in zip(events, looks, strict=False):
        world.play(event)
        if look:  # the operator may be down, or see several events at once
            world.reconcile()
    world.settle()
    assert world.status.phase == "Succeeded"
    assert world.status.shards is not None
    assert world.status.shards.succeeded == 4
    assert [s.plan for s in world.history if s.plan is not None] != []


@given(st.lists(st.sampled_from(EVENTS + FATAL), max_size=25))
@settings(max_examples=100, deadline=None)
def test_a_terminal_phase_is_final(events: list[str]) -> None:
    world = World()
    ended: ExtractionJobStatus | None = None
    for event in [*events, "config"]:
        world.play(event)
        world.reconcile()
        if ended is not None:
            assert world.status == ended
        elif world.status.phase in ("Succeeded", "Failed"):
            ended = world.status
    if ended is not None:
        world.settle()
        assert world.status == ended


@given(st.lists(st.sampled_from(EVENTS + FATAL), max_size=25))
@settings(max_examples=100, deadline=None)
def test_a_decision_repeated_decides_the_same_and_changes_nothing(events: list[str]) -> None:
    world = World()
    for event in events:
        world.play(event)
        snapshot = world.snapshot()
        assert decide(snapshot, world.now, SETTINGS) == decide(snapshot, world.now, SETTINGS)
        for _ in range(4):  # a stage may lead to the next
            world.reconcile()
        status, stages = world.status, {name: dict(state) for name, state in world.stages.items()}
        world.reconcile()
        assert world.status == status
        assert {name: dict(state) for name, state in world.stages.items()} == stages


@given(st.lists(st.sampled_from(EVENTS + FATAL), max_size=25))
@settings(max_examples=60, deadline=None)
def test_conditions_keep_kubernetes_conventions(events: list[str]) -> None:
    world = World()
    for event in events:
        before = {c.type: c for c in world.status.conditions}
        world.play(event)
        world.reconcile()
        after = {c.type: c for c in world.status.conditions}
        assert len(after) == len(world.status.conditions)
        for kind, condition in after.items():
            assert condition.reason
            if kind in before and before[kind].status == condition.status:
                assert condition.last_transition_time == before[kind].last_transition_time
        assert not (after and after["Complete"].status == after["Failed"].status == "True")


def test_numbers_alone_are_no_news() -> None:
    from headframe_api.status import ProgressSummary

    world = World()
    world.reconcile()
    moved = world.status.model_copy(update={"progress": ProgressSummary(tokens=5), "quarantined": 2})
    assert only_progress_differs(world.status, moved)
    assert not only_progress_differs(world.status, moved.model_copy(update={"phase": "Failed"}))
