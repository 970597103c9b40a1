"""The ExtractionJob document itself, as YAML files, job.json and the API server hold it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from headframe_api.base import KubernetesModel
from headframe_api.names import API_VERSION, KIND
from headframe_api.spec import ExtractionJobSpec
from headframe_api.status import ExtractionJobStatus


class ObjectMeta(KubernetesModel):
    """The metadata that Headframe reads; the API server's other fields are kept out of the way."""

    model_config = ConfigDict(extra="ignore")

    name: Annotated[str, Field(min_length=1, max_length=253)]
    namespace: str | None = None
    uid: str | None = None
    generation: int | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None


class ExtractionJob(KubernetesModel):
    """Lift hidden states out of a language model: which model, which data, which layers, to where."""

    api_version: Literal["headframe.dev/v1alpha1"] = API_VERSION
    kind: Literal["ExtractionJob"] = KIND
    metadata: ObjectMeta
    spec: ExtractionJobSpec
    status: ExtractionJobStatus | None = None

    def without_server_fields(self) -> dict[str, Any]:
        """The document a user would write: name, labels and spec, without status, uid and the like."""
        document = self.to_dict()
        metadata = {
            key: document["metadata"][key] for key in ("name", "namespace", "labels") if document["metadata"].get(key)
        }
        return {
            "apiVersion": document["apiVersion"],
            "kind": document["kind"],
            "metadata": metadata,
            "spec": document["spec"],
        }
