"""The few requests that the operator makes, on plain dicts: models of whole objects would cost more than they tell.

The official client brings the connection: addresses, certificates, and tokens that are read again as they rotate.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import load_incluster_config, load_kube_config

from headframe_operator.metrics import API_REQUESTS

Json = dict[str, Any]
FIELD_MANAGER = "headframe-operator"
_TIMEOUT_SECONDS = 20
_CONNECTIONS = 32
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


class ApiError(Exception):
    """An answer of the API server other than success; ``status`` is 0 where there was no answer at all."""

    def __init__(self, status: int, reason: str, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_seconds = retry_after_seconds

    @property
    def temporary(self) -> bool:
        """Whether the same request may succeed later: no answer, too many requests, or the server's own trouble."""
        return self.status in (0, 429) or self.status >= 500

    @property
    def gone(self) -> bool:
        """Whether the object does not exist any more, or another has its name. Any other conflict says nothing of the kind."""
        return self.status == 404 or (self.status == 409 and "uid" in self.message.lower())


class ApiServer:
    """A connection to the API server."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._versions: dict[str, str] = {}

    async def preferred_version(self, group: str) -> str:
        """The version of an API group that its server prefers; 404 where nobody serves the group."""
        if group not in self._versions:
            answer = await self._request("GET", f"/apis/{group}")
            self._versions[group] = str(answer["preferredVersion"]["version"])
        return self._versions[group]

    async def list(self, path: str, *, metadata_only: bool = False, **query: str) -> list[Json]:
        """The items of a collection, page by page."""
        items: list[Json] = []
        more: str | None = ""
        while more is not None:
            page = await self._request(
                "GET",
                path,
                query={"limit": "500", **query, **({"continue": more} if more else {})},
                accept=_METADATA_ONLY if metadata_only else "application/json",
            )
            items += page.get("items") or []  # null in an empty list of metadata
            more = page["metadata"].get("continue") or None
        return items

    async def create(self, path: str, body: Mapping[str, Any]) -> Json:
        """Create an object; 409 where one of its name exists."""
        return await self._request("POST", path, body, query={"fieldManager": FIELD_MANAGER})

    async def apply(self, path: str, body: Mapping[str, Any]) -> Json:
        """Server-side apply: our fields become what ``body`` says, and all others stay."""
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        return await self._request("PATCH", path, body, query=query, content_type=_APPLY)

    async def patch(self, path: str, body: Mapping[str, Any]) -> Json:
        """A JSON merge patch."""
        return await self._request("PATCH", path, body, query={"fieldManager": FIELD_MANAGER}, content_type=_MERGE)

    async def delete(self, path: str, uid: str) -> None:
        """Delete exactly the object of this uid, its dependents in the background."""
        await self._request("DELETE", path, {"propagationPolicy": "Background", "preconditions": {"uid": uid}})

    async def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",
    ) -> Json:
        headers = {"Accept": accept, "Content-Type": content_type}
        try:
            serialized = await self._client.param_serialize(
                method,
                path,
                query_params=list((query or {}).items()),
                header_params=headers,
                body=body,
                auth_settings=["BearerToken"],
            )
            response = await self._client.call_api(*serialized, _request_timeout=_TIMEOUT_SECONDS)
            data = await response.read()  # type: ignore[no-untyped-call]
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            API_REQUESTS.labels(method, "none").inc()
            raise ApiError(0, "Unreachable", f"{method} {path}: {error or type(error).__name__}") from error
        API_REQUESTS.labels(method, str(response.status)).inc()
        if response.status >= 400:
            raise _error(response.status, data, response.headers.get("Retry-After"))
        answer: Json = json.loads(data)
        return answer


@asynccontextmanager
async def connect() -> AsyncIterator[ApiServer]:
    """Connect as the pod's service account, or as a kubeconfig file says: KUBECONFIG where set, else ~/.kube/config."""
    configuration = Configuration()
    if "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
        load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    else:
        await load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    configuration.connection_pool_maxsize = _CONNECTIONS
    async with ApiClient(configuration) as client:
        yield ApiServer(client)


def _error(status: int, data: bytes, retry_after: str | None) -> ApiError:
    try:
        answer = json.loads(data)
        reason, message = answer.get("reason", ""), answer.get("message", "")
    except ValueError:
        reason, message = "", data.decode(errors="replace")[:500]
    return ApiError(status, reason, message, float(retry_after) if retry_after and retry_after.isdigit() else None)
