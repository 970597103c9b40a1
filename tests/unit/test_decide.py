"""The decision by tables: what is observed, and what must come of it."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_objects import EARLIER, NOW, PLAN, SETTINGS, Json, event, extraction, job, pod, snapshot

from headframe_api.progress import Progress
from headframe_operator.decide import decide
from headframe_operator.snapshot import Poll, Rates, Refusal, Snapshot

_WORDS = {"PLAN": PLAN, "EARLIER": EARLIER, "T": EARLIER}
CASES: list[Json] = yaml.safe_load((Path(__file__).parents[1] / "data/operator/decisions.yaml").read_text())


def spelt_out(value: Any) -> Any:
    """The words that stand for whole objects in the tables."""
    if isinstance(value, dict):
        return {key: spelt_out(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [spelt_out(inner) for inner in value]
    return _WORDS.get(value, value) if isinstance(value, str) else value


def snapshot_of(case: Json) -> Snapshot:
    """What the operator knows in a case."""
    case = spelt_out(case)
    x = extraction(case.get("spec"), case.get("status"), case.get("metadata"))
    return snapshot(
        x,
        [job(x, **entry) for entry in case.get("jobs", ())],
        [pod(**entry) for entry in case.get("pods", ())],
        events=[event(*entry) for entry in case.get("events", ())],
        workload=case.get("workload"),
        polls={uid: Poll(at=NOW, progress=Progress.model_validate(p)) for uid, p in case.get("polls", {}).items()},
        refusals={stage: Refusal(*words) for stage, words in case.get("refusals", {}).items()},
    )


@pytest.mark.parametrize("case", CASES, ids=[case["title"] for case in CASES])
def test_decision(case: Json) -> None:
    decision, then = decide(snapshot_of(case), NOW, SETTINGS), dict(case["then"])
    actions: Json = {
        "create": list(decision.create),
        "delete": [deletion.stage for deletion in decision.delete],
        "update": {
            update.stage: {k: v for k in ("suspend", "parallelism") if (v := getattr(update, k)) is not None}
            for update in decision.update
        },
        "workload_active": decision.workload_active,
        "delete_extraction": decision.delete_extraction,
        "unchanged": decision.status is None,
    }
    for name in actions.keys() & then.keys():
        assert actions[name] == then.pop(name), name
    if "requeue" in then:
        assert (decision.requeue_seconds is not None) == then.pop("requeue")
    if "requeue_at_most" in then:
        assert decision.requeue_seconds is not None
        assert 0 < decision.requeue_seconds <= then.pop("requeue_at_most")
    if not then:
        return
    assert decision.status is not None
    status = decision.status.to_dict()
    conditions = {c["type"]: f"{c['status']} {c['reason']}" for c in status["conditions"]}
    assert {kind: conditions[kind] for kind in then.get("conditions", {})} == then.pop("conditions", {})
    assert then.pop("message", "") in status["message"]
    for name, expected in then.items():
        found = status.get(name)
        assert ({k: found[k] for k in expected} if isinstance(expected, dict) else found) == expected, name


def test_the_extract_job_is_a_work_queue_of_locked_down_pods() -> None:
    x = extraction(
        {
            "failurePolicy": {"retriesPerShard": 5, "maxFailedShards": 9},
            "s3": {"credentialsSecret": "keys", "caSecret": "ca"},
            "model": {"source": "m", "gpus": 4},
            "worker": {"tolerations": [{"operator": "Exists"}], "env": [{"name": "HF_TOKEN", "value": "t"}]},
        },
        {"phase": "Extracting", "plan": PLAN},
    )
    manifest = decide(snapshot(x), NOW, SETTINGS).create["extract"]
    spec, template = manifest["spec"], manifest["spec"]["template"]["spec"]
    container = template["containers"][0]
    assert manifest["metadata"]["ownerReferences"][0]["uid"] == "x-uid"
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 2)
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (5, 4)
    rules = [(r["action"], r.get("onExitCodes", {}).get("values")) for r in spec["podFailurePolicy"]["rules"]]
    assert rules == [("Ignore", None), ("FailJob", [78]), ("FailIndex", [65])]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert container["command"] == ["headframe", "extract"]
    assert {m["mountPath"] for m in container["volumeMounts"]} >= {"/tmp", "/cache", "/dev/shm"}
    assert template["tolerations"] == [{"operator": "Exists"}]
    assert template["automountServiceAccountToken"] is False
    assert template["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_the_pods_read_the_manifest_that_was_applied() -> None:
    from headframe_api.parse import parse_job

    x = extraction()
    container = decide(snapshot(x), NOW, SETTINGS).create["prepare"]["spec"]["template"]["spec"]["containers"][0]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    read = parse_job(yaml.safe_load(environment["HEADFRAME_JOB"]))
    assert read.spec == parse_job(x).spec
    assert "nvidia.com/gpu" not in str(container["resources"])


@pytest.mark.parametrize(("probed", "reason"), [(True, "WorkerUnreachable"), (False, "Extracting")])
def test_a_worker_that_still_starts_need_not_answer(probed: bool, reason: str) -> None:
    x = extraction(None, {"phase": "Extracting", "plan": PLAN})
    starting = pod("extract", 0, run=True, probed=probed, uid="p")
    silent = {"p": Poll(at=NOW - timedelta(seconds=60), error="refused")}
    status = decide(snapshot(x, [job(x, "extract")], [starting], polls=silent), NOW, SETTINGS).status
    assert status is not None
    assert next(c.reason for c in status.conditions if c.type == "Progressing") == reason


def test_a_new_phase_is_told_by_what_it_is_about() -> None:
    x = extraction(None, {"phase": "Preparing"})
    done = job(x, "prepare", ended=("Complete", "Done"))
    decision = decide(snapshot(x, [done], [pod("prepare", exit=0, said={"plan": PLAN})]), NOW, SETTINGS)
    assert [(note.type, note.reason, note.message) for note in decision.notes] == [
        ("Normal", "Extracting", "the plan has 80 samples with 8,000 tokens in 4 shards")
    ]


@pytest.mark.parametrize(
    ("spec", "last_pod", "rate"),
    [
        ({}, {"run": True}, 7.0),
        ({}, {}, 7.0),
        ({"suspend": True}, None, 0.0),
        ({"suspend": True}, {"run": True}, 7.0),
        ({"workers": 0}, None, 0.0),
        ({}, {"unschedulable": "0/3 nodes are available"}, 0.0),
    ],
    ids=["running", "between two shards", "suspended", "until it is suspended", "no workers", "no node"],
)
def test_a_rate_is_told_only_where_work_goes_on(spec: Json, last_pod: Json | None, rate: float) -> None:
    x = extraction(spec, {"phase": "Extracting", "plan": PLAN})
    pods = [pod("extract", 0, exit=0, said={"samples": 20, "tokens": 2000})]
    pods += [pod("extract", 1, **last_pod)] if last_pod is not None else []
    observed = replace(
        snapshot(x, [job(x, "extract", spec={"parallelism": spec.get("workers", 1)})], pods), rates=Rates(7.0, 700.0)
    )
    status = decide(observed, NOW, SETTINGS).status
    assert status is not None
    assert status.progress is not None
    assert status.progress.samples == 20
    assert (status.progress.samples_per_second, status.progress.tokens_per_second) == (rate, 100 * rate)
