"""Stores on the real S3 server, straight and through a proxy that misbehaves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from s3_content import TUNING

from headframe_api.spec import S3Spec
from headframe_worker.stores.s3.store import S3Store
from testbed.faulty_proxy import FaultyProxy
from testbed.s3 import S3Server


@pytest.fixture(autouse=True)
def _credentials(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_server.environment.items():
        if name != "AWS_ENDPOINT_URL":
            monkeypatch.setenv(name, value)


@pytest.fixture
def uri(s3_server: S3Server) -> str:
    return f"s3://{s3_server.new_bucket()}/some/output"


@pytest.fixture
def store(s3_server: S3Server, uri: str) -> Iterator[S3Store]:
    opened = S3Store(uri, S3Spec(endpoint=s3_server.endpoint), tuning=TUNING)
    yield opened
    opened.close()


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3_server) as made:
        yield made


@pytest.fixture
def proxied(proxy: FaultyProxy, uri: str) -> Iterator[S3Store]:
    """A store behind the faulty proxy that has already found out what the server can do."""
    opened = S3Store(uri, S3Spec(endpoint=proxy.endpoint), tuning=TUNING)
    opened.check_writable()
    proxy.requests.clear()
    yield opened
    opened.close()
