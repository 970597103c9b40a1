"""What lies beside the states of a finished dataset: the directory around the tokens, and the lists of refused samples."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from headframe_api.manifests import QuarantinedRow, ShardManifest
from headframe_api.names import quarantine_key
from headframe_api.plan import Plan
from headframe_worker.finalize.fault import Fault
from headframe_worker.prepare.tokens_file import directory_files
from headframe_worker.stores.base import Store
from headframe_worker.stores.missing import MissingObjectError


def tokens_directory_faults(plan: Plan, store: Store) -> Iterator[Fault]:
    """Whether `datasets.load_from_disk` still gets the plan's files, with their columns, from tokens/."""
    for key, wanted in directory_files(len(plan.shards), plan.digest).items():
        try:
            found = json.loads(store.read(key))
        except MissingObjectError:
            yield Fault(key, "is missing")
        except ValueError as error:
            yield Fault(key, f"is not JSON: {error}")
        else:
            if _deciding(found) != _deciding(json.loads(wanted)):
                yield Fault(key, "names other files or columns, or another format, than prepare wrote")


def prepare_quarantine_faults(plan: Plan, store: Store) -> Iterator[Fault]:
    """Whether every sample that prepare refused is still listed, by reason."""
    key = quarantine_key("prepare")
    if not plan.quarantined:
        return
    try:
        listed = Counter(row.reason for row in _read(store, key))
    except MissingObjectError:
        yield Fault(key, f"is missing; the plan counts {sum(plan.quarantined.values()):,} refused samples")
    except ValidationError as error:
        yield Fault(key, _broken_line(error))
    else:
        if listed != plan.quarantined:
            yield Fault(key, f"lists {dict(sorted(listed.items()))}, the plan counts {plan.quarantined}")


def extract_quarantine_faults(manifest: ShardManifest, store: Store) -> Iterator[Fault]:
    """Whether every sample of a shard that extract refused is still listed."""
    refused = [row for part in manifest.parts for row in part.quarantined]
    key = quarantine_key("extract", manifest.shard)
    if not refused:
        return
    try:
        listed = _read(store, key)
    except MissingObjectError:
        yield Fault(key, f"is missing; the shard's manifest names {len(refused):,} refused samples")
    except ValidationError as error:
        yield Fault(key, _broken_line(error))
    else:
        if listed != refused:
            yield Fault(key, "lists other samples than the shard's manifest")


def _deciding(document: Any) -> Any:
    """What a reader goes by; `datasets` itself may add to the rest."""
    keys = ("_data_files", "_format_type", "features")
    return [document.get(key) for key in keys] if isinstance(document, dict) else document


def _read(store: Store, key: str) -> list[QuarantinedRow]:
    return [QuarantinedRow.model_validate_json(line) for line in store.read(key).splitlines()]


def _broken_line(error: ValidationError) -> str:
    problem = error.errors()[0]
    return (
        f"holds a line that names no refused sample: {'.'.join(map(str, problem['loc'])) or 'JSON'}: {problem['msg']}"
    )
