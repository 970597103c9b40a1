"""Whether a committed plan is the one that this manifest would give: reuse it, or say what differs."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.alias_generators import to_camel

from headframe_api.errors import ConfigError
from headframe_api.names import PLAN_KEY, TOKENS_PREFIX, tokens_key
from headframe_api.plan import ModelIdentity, Plan, StatesLayout, TokensIdentity, plan_digest
from headframe_api.spec import ExtractionJobSpec
from headframe_worker.stores.base import Store
from headframe_worker.stores.missing import MissingObjectError

_WORDS_ONLY = "format_reason"
AFRESH = "use another output, or delete what is there (`headframe run --fresh` does) and begin anew"
"""The two ways out where an output cannot be gone on with, for a manifest on a cluster too."""


def read_plan(output: Store) -> Plan | None:
    """The committed plan; None where there is none. Raises ConfigError for one that this version cannot read."""
    try:
        text = output.read(PLAN_KEY)
    except MissingObjectError:
        return None
    try:
        plan = Plan.model_validate_json(text)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(map(str, fault["loc"]))
        raise ConfigError(
            f"{output.uri}/{PLAN_KEY}: not a plan of this version: {where}: {fault['msg']}; {AFRESH}",
            reason="PlanUnreadable",
        ) from error
    if plan_digest(json.loads(text)) != plan.digest:
        raise ConfigError(
            f"{output.uri}/{PLAN_KEY}: its digest does not match its content; {AFRESH}", reason="PlanUnreadable"
        )
    return plan


def check_same_inputs(
    plan: Plan,
    output: Store,
    spec: ExtractionJobSpec,
    *,
    model: ModelIdentity,
    tokens_from: TokensIdentity,
    states: StatesLayout,
    part_target_bytes: int,
) -> None:
    """Raises ConfigError that names every field in which the committed plan differs from what would be planned now.

    An automatic number of shards stays what it was, whatever `workers` has become.
    """
    pairs: dict[str, tuple[Any, Any]] = {"partTargetBytes": (plan.part_target_bytes, part_target_bytes)}
    if spec.shards != "auto":
        pairs["shards"] = (len(plan.shards), min(spec.shards, plan.samples))
    groups: tuple[tuple[str, BaseModel, BaseModel], ...] = (
        ("model", plan.model, model),
        ("dataset", plan.tokens_from, tokens_from),
        ("states", plan.states, states),
    )
    for name, before, now in groups:
        for field in type(before).model_fields:
            if field != _WORDS_ONLY:
                pairs[f"{name}.{to_camel(field)}"] = (getattr(before, field), getattr(now, field))
    different = [f"  {name}: was {old!r}, is now {new!r}" for name, (old, new) in pairs.items() if old != new]
    if different:
        raise ConfigError(
            "\n".join(
                [
                    f"{output.uri} was prepared from other inputs:",
                    *different,
                    AFRESH,
                ]
            ),
            reason="InputsChanged",
        )
    present = {info.key for info in output.list(TOKENS_PREFIX)}
    unlisted = [key for shard in plan.shards if (key := tokens_key(shard.index)) not in present]
    missing = [key for key in unlisted if not output.exists(key)]
    if missing:
        raise ConfigError(
            f"{output.uri}: {missing[0]} is missing ({len(missing)} of {len(plan.shards)} files of tokens); {AFRESH}",
            reason="TokensMissing",
        )
