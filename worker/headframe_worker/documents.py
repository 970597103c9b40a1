"""The JSON documents of an output, read and checked."""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError

from headframe_api.base import DiskModel
from headframe_api.errors import ConfigError, DataError
from headframe_api.manifests import DatasetManifest, ShardManifest
from headframe_api.names import MANIFEST_KEY, PLAN_KEY, shard_manifest_key
from headframe_api.plan import Plan
from headframe_worker.stores.base import Store
from headframe_worker.stores.missing import MissingObjectError

Document = TypeVar("Document", bound=DiskModel)


def read_plan(store: Store) -> Plan:
    """plan.json. Raises ConfigError where there is none, or where it was changed after it was made."""
    plan = _read(store, PLAN_KEY, Plan, "is this an output of Headframe, and has prepare run?")
    if plan.computed_digest() != plan.digest:
        raise ConfigError(
            f"{store.uri}/{PLAN_KEY}: was changed after it was made: its digest does not match; restore it, or start afresh",
            reason="PlanChanged",
        )
    return plan


def read_manifest(store: Store) -> DatasetManifest:
    """manifest.json. Raises ConfigError where there is none: the dataset is not finished."""
    return _read(store, MANIFEST_KEY, DatasetManifest, "the dataset is not finished; run `headframe finalize`")


def read_shard_manifest(store: Store, shard: int) -> ShardManifest:
    """A committed shard's manifest. Raises ConfigError where there is none."""
    return _read(store, shard_manifest_key(shard), ShardManifest, "this shard is not extracted")


def _read(store: Store, key: str, model: type[Document], hint: str) -> Document:
    try:
        return model.model_validate_json(store.read(key))
    except MissingObjectError as error:
        raise ConfigError(f"{store.uri}/{key}: does not exist: {hint}", reason="MissingObject") from error
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "JSON"
        raise DataError(f"{store.uri}/{key}: cannot be read: {where}: {problem['msg']}") from error
