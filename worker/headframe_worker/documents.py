"""The JSON documents of an output, read and checked."""

from __future__ import annotations

import json
from typing import TypeVar

from pydantic import ValidationError

from headframe_api.base import DiskModel
from headframe_api.errors import ConfigError, DataError
from headframe_api.manifests import DatasetManifest, ShardManifest
from headframe_api.names import MANIFEST_KEY, PLAN_KEY, shard_manifest_key
from headframe_api.plan import Plan, plan_digest
from headframe_worker.stores.base import Store
from headframe_worker.stores.missing import MissingObjectError

Document = TypeVar("Document", bound=DiskModel)


def read_plan(store: Store) -> Plan:
    """plan.json. Raises ConfigError where there is none, or where it was changed after it was made."""
    text = _fetch(store, PLAN_KEY, "is this an output of Headframe, and has prepare run?")
    plan = _parse(store, PLAN_KEY, Plan, text)
    if plan_digest(json.loads(text)) != plan.digest:
        raise ConfigError(
            f"{store.uri}/{PLAN_KEY}: was changed after it was made: its digest does not match; restore it, or start afresh",
            reason="PlanChanged",
        )
    return plan


def read_manifest(store: Store) -> DatasetManifest:
    """manifest.json. Raises ConfigError where there is none: the dataset is not finished."""
    text = _fetch(store, MANIFEST_KEY, "is this an output of Headframe? if so it is not finished: run its job again")
    return _parse(store, MANIFEST_KEY, DatasetManifest, text)


def read_shard_manifest(store: Store, shard: int) -> ShardManifest:
    """A committed shard's manifest. Raises ConfigError where there is none."""
    key = shard_manifest_key(shard)
    return _parse(store, key, ShardManifest, _fetch(store, key, "this shard is not extracted"))


def _fetch(store: Store, key: str, hint: str) -> bytes:
    try:
        return store.read(key)
    except MissingObjectError as error:
        raise ConfigError(f"{store.uri}/{key}: does not exist: {hint}", reason="MissingObject") from error


def _parse(store: Store, key: str, model: type[Document], text: bytes) -> Document:
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "JSON"
        raise DataError(f"{store.uri}/{key}: cannot be read: {where}: {problem['msg']}") from error
