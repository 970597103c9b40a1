"""What spec.worker means where it says nothing: the cluster's defaults, which the chart sets, field by field."""

from __future__ import annotations

from headframe_api.spec import ExtractionJobSpec
from headframe_api.worker_spec import WorkerSpec


def with_worker_defaults(spec: ExtractionJobSpec, defaults: WorkerSpec) -> ExtractionJobSpec:
    """The spec with every field of `worker` that it leaves empty taken from the defaults. A field is taken whole or not."""
    given = spec.worker
    silent = {name: getattr(defaults, name) for name in WorkerSpec.model_fields if not getattr(given, name)}
    return spec.model_copy(update={"worker": given.model_copy(update=silent)})
