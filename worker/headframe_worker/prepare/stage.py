"""prepare: from a manifest and text to tokens/, quarantine/ and plan.json.

Two passes, so that memory does not grow with the dataset: all samples are tokenised into one scratch file and counted; then,
when the totals are known, they are cut into shards. plan.json is written last: its presence commits the stage.
"""

from __future__ import annotations

import json
import math
import os
import platform
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from headframe_api import names
from headframe_api.errors import TemporaryError
from headframe_api.job import ExtractionJob
from headframe_api.layers import hugging_face_indexes, resolve_layers
from headframe_api.plan import PART_TARGET_BYTES, ModelIdentity, Plan, StatesLayout
from headframe_api.spec import ExtractionJobSpec
from headframe_worker.engine.gguf_files import gguf_read_once
from headframe_worker.meter import Meter
from headframe_worker.model_source import locate_model
from headframe_worker.prepare.model_structure import describe_model
from headframe_worker.prepare.reading import Reading, open_reading
from headframe_worker.prepare.resume import AFRESH, check_same_inputs, read_plan
from headframe_worker.prepare.scratch_space import scratch_space
from headframe_worker.prepare.shards import count_shards
from headframe_worker.prepare.spool import Spool
from headframe_worker.prepare.tokens_file import DATASET_INFO_KEY, STATE_KEY, directory_files
from headframe_worker.prepare.writing import Totals, check_quarantine, tokenise, write_shards
from headframe_worker.stores.base import Store
from headframe_worker.stores.observer import tell

_CGROUP_CPU = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class Prepared:
    """What prepare made, or found."""

    plan: Plan
    reused: bool
    """True: an earlier run had made it, from the same inputs and spec."""
    notes: tuple[str, ...]
    """What a user should know: what `auto` decided, what was left out of masks."""


def prepare(
    job: ExtractionJob,
    output: Store,
    *,
    scratch: Path,
    meter: Meter,
    processes: int | None = None,
    fresh: bool = False,
    part_target_bytes: int = PART_TARGET_BYTES,
    stop: threading.Event | None = None,
) -> Prepared:
    """Tokenise the dataset of a job and commit its plan; reuse what an earlier run of the same inputs made.

    `processes` tokenise; None takes as many as there are CPUs for this process. `fresh` first deletes what Headframe wrote to
    the output. `stop` ends it between two blocks with a StoppedError. Raises ConfigError for whatever must change in the
    manifest, the model or the dataset before any GPU is taken.
    """
    spec = job.spec
    meter.set_state("running", "looking at the model and the dataset")
    with scratch_space(scratch) as space:
        observer = tell(meter, stop or threading.Event())
        files = locate_model(spec.model, spec.s3, scratch=scratch, weights=False, observer=observer)
        with gguf_read_once(files.gguf_file):
            model, size = describe_model(files, spec.model)
            states = _layout(spec, model)
            reading = open_reading(spec, files, model, scratch=space, observer=observer)
        if fresh:
            delete_output(output)
        plan = read_plan(output)
        if plan is not None:
            check_same_inputs(
                plan,
                output,
                spec,
                model=model,
                tokens_from=reading.identity,
                states=states,
                part_target_bytes=part_target_bytes,
            )
            return Prepared(plan, reused=True, notes=())
        output.check_writable()
        meter.set_state("running", "tokenising")
        spool = Spool(space / "spool.arrow")
        quarantine = space / "quarantine.jsonl"
        totals = tokenise(reading, spool, quarantine, meter, processes=processes or available_cpus(), stop=stop)
        _publish_quarantine(output, quarantine, totals, spec)
        shards = count_shards(spec, size, samples=totals.samples, tokens=totals.tokens)
        meter.set_state("running", "writing tokens")
        plans = write_shards(
            spool,
            totals,
            output,
            meter,
            shards=shards,
            states=states,
            hidden_size=model.hidden_size,
            part_target_bytes=part_target_bytes,
            scratch=space,
        )
    bytes_per_sample = 16  # a row number and an offset
    plan = Plan(
        digest="",
        created_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        versions=_versions(),
        model=model,
        tokens_from=reading.identity,
        states=states,
        rows_in=totals.rows_in,
        samples=totals.samples,
        tokens=totals.tokens,
        loss_tokens=totals.loss_tokens,
        quarantined=dict(sorted(totals.quarantined.items())),
        lengths=totals.lengths(),
        part_target_bytes=part_target_bytes,
        bytes=totals.tokens * states.bytes_per_token(model.hidden_size)
        + totals.samples * bytes_per_sample
        + 8 * sum(shard.parts for shard in plans),
        shards=plans,
    ).sealed()
    return Prepared(_commit(job, plan, output), reused=False, notes=tuple(_notes(reading, totals, spec, plan)))


def available_cpus() -> int:
    """CPUs that this process may use: those it is bound to, or fewer where its cgroup has a quota, as pods do."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CGROUP_CPU.read_text().split()
        return max(1, min(bound, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        return bound


def delete_output(output: Store) -> None:
    """Delete all that Headframe writes to an output, what commits it first; other files stay."""
    output.delete([names.SUCCESS_KEY])
    output.delete([names.PLAN_KEY])
    output.delete([names.MANIFEST_KEY, names.REPORT_KEY, names.SAMPLES_KEY, names.JOB_KEY])
    for prefix in (names.STATES_PREFIX, names.TOKENS_PREFIX, names.QUARANTINE_PREFIX):
        output.delete([info.key for info in output.list(prefix)])


def _layout(spec: ExtractionJobSpec, model: ModelIdentity) -> StatesLayout:
    layers = resolve_layers(spec.states.preset, spec.states.layers, model.num_layers)
    return StatesLayout(
        layers=list(layers),
        hugging_face_indexes=list(hugging_face_indexes(layers, with_embeddings=model.embeddings_in_hidden_states)),
        last=spec.states.last,
        last_layer=model.num_layers - 1,
        dtype=spec.states.dtype,
    )


def _publish_quarantine(output: Store, path: Path, totals: Totals, spec: ExtractionJobSpec) -> None:
    """The list is written also where it is so long that the job is refused."""
    key = names.quarantine_key("prepare")
    if totals.quarantined:
        output.write_file(key, path)
    else:
        output.delete([key])
    check_quarantine(
        totals,
        allowed_fraction=spec.failure_policy.max_quarantined_fraction,
        listed_in=f"{output.uri}/{key}",
    )


def _commit(job: ExtractionJob, plan: Plan, output: Store) -> Plan:
    """Write what goes with the tokens, then the plan; the loser of a race takes the winner's plan if it is the same."""
    files = directory_files(len(plan.shards), plan.digest)
    wanted = {DATASET_INFO_KEY, STATE_KEY, *(names.tokens_key(shard.index) for shard in plan.shards)}
    output.delete([info.key for info in output.list(names.TOKENS_PREFIX) if info.key not in wanted])
    job_text = json.dumps(job.without_server_fields(), indent=2, ensure_ascii=False).encode() + b"\n"
    for key, content in {**files, names.JOB_KEY: job_text}.items():
        output.write(key, [memoryview(content)])
    if output.write(names.PLAN_KEY, [memoryview(plan.to_json())], exclusive=True).created:
        return plan
    winner = read_plan(output)
    if winner is None or winner.digest != plan.digest:
        raise TemporaryError(
            f"{output.uri}: another prepare wrote a different plan there at the same time; run one of them alone, "
            f"{AFRESH}",
            reason="PlanConflict",
        )
    return winner


def _versions() -> dict[str, str]:
    packages = {"headframe": "headframe-worker", **{name: name for name in ("transformers", "tokenizers", "datasets")}}
    return {**{name: version(package) for name, package in packages.items()}, "python": platform.python_version()}


def _notes(reading: Reading, totals: Totals, spec: ExtractionJobSpec, plan: Plan) -> list[str]:
    identity = reading.identity
    notes = []
    if spec.dataset.format == "auto":
        notes.append(f"format {identity.format}: {identity.format_reason}")
    if totals.truncated:
        notes.append(f"{totals.truncated} samples were cut at maxLength {identity.max_length}")
    if totals.uncertain_turns:
        notes.append(
            f"{totals.uncertain_turns} assistant turns are left out of the loss mask: the chat template does not render them as "
            f"their messages stand, such as earlier turns without their thinking"
        )
    if totals.without_loss:
        notes.append(f"{totals.without_loss} samples hold no token to be learned")
    if spec.shards != "auto" and len(plan.shards) < spec.shards:
        notes.append(f"{len(plan.shards)} shards instead of {spec.shards}: there are no more samples")
    return notes
