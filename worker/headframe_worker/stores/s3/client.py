"""The boto3 client: endpoint, region, addressing, certificates, and credentials by boto3's own chain."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from headframe_api.errors import ConfigError
from headframe_api.names import CA_BUNDLE_ENVIRONMENT
from headframe_api.spec import S3Spec

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

CONNECT_TIMEOUT_SECONDS = 10
READ_TIMEOUT_SECONDS = 120  # a slow link may still be draining the socket's buffers when the last byte was handed over
_CONNECTIONS = 64
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


class Connection:
    """One client of one process, used by all its threads; replaced when credentials expired and the chain has new ones."""

    def __init__(self, s3: S3Spec, *, sign_payload: bool = False) -> None:
        self._s3 = s3
        self._sign_payload = sign_payload
        self._lock = threading.Lock()
        self._session = _session()
        self.client = self._open(self._session)

    def renew(self, stale: S3Client) -> bool:
        """Ask the chain again after `stale` was told that its token expired; False where it has nothing newer."""
        with self._lock:
            if self.client is not stale:
                return True
            session = _session()
            if _secrets(session) == _secrets(self._session):
                return False
            self._session, self.client = session, self._open(session)
            return True

    def sign_payloads(self) -> None:
        """From now on let a signed SHA-256 guard each body: for servers that do not verify CRC-64/NVME."""
        with self._lock:
            self._sign_payload = True
            self.client = self._open(self._session)

    @property
    def identity(self) -> str:
        """Who the requests come from, fit for an error message: never a secret, only the end of the access key's id."""
        try:
            credentials = self._session.get_credentials()
            if credentials is None:
                return "no credentials"
            key = credentials.get_frozen_credentials().access_key or ""
        except BotoCoreError:
            return "credentials that could not be read"
        return f"access key ****{key[-4:]} (from {credentials.method})"

    @property
    def is_aws(self) -> bool:
        """Whether requests go to AWS itself: so they do where nobody names an endpoint."""
        host = urlsplit(self.client.meta.endpoint_url).hostname or ""
        return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))

    def redact(self, text: str) -> str:
        """A server's words without anything of our credentials in them."""
        for secret in _secrets(self._session):
            if secret:
                text = text.replace(secret, "****")
        return text

    def close(self) -> None:
        """Close idle connections."""
        self.client.close()

    def _open(self, session: boto3.Session) -> S3Client:
        endpoint = self._s3.endpoint or next(filter(None, map(os.environ.get, _ENDPOINT_VARIABLES)), None)
        bundle = os.environ.get(CA_BUNDLE_ENVIRONMENT)
        if bundle and not Path(bundle).is_file():
            raise ConfigError(f"{CA_BUNDLE_ENVIRONMENT}: {bundle}: no such file; it must hold the authority in PEM")
        s3_options: dict[str, Any] = {"addressing_style": self._s3.addressing}
        if self._s3.addressing == "auto" and endpoint:
            # boto3's auto would ask DNS for bucket.host, which few private servers answer to.
            s3_options["addressing_style"] = "path"
        if not self._sign_payload and (endpoint is None or endpoint.startswith("https://")):
            # Inside TLS the signed checksum header is enough; hashing every body again would cost a core per GB/s.
            s3_options["payload_signing_enabled"] = False
        try:
            return session.client(
                "s3",
                endpoint_url=endpoint,
                region_name=self._s3.region,
                config=Config(
                    s3=s3_options,  # type: ignore[arg-type]
                    connect_timeout=CONNECT_TIMEOUT_SECONDS,
                    read_timeout=READ_TIMEOUT_SECONDS,
                    max_pool_connections=_CONNECTIONS,
                    tcp_keepalive=True,
                    # One layer retries: ours, which outlives outages and knows what a repeated write means.
                    retries={"total_max_attempts": 1, "mode": "standard"},
                    request_checksum_calculation="when_required",
                    user_agent_extra="headframe",
                ),
            )
        except (BotoCoreError, ValueError) as error:
            raise ConfigError(f"spec.s3: boto3 cannot make a client of it: {error}") from error


def _session() -> boto3.Session:
    try:
        return boto3.Session()
    except BotoCoreError as error:  # a profile that is not there, a file that cannot be parsed
        raise ConfigError(f"AWS configuration: {error}; check AWS_PROFILE and the files it is read from") from error


def _secrets(session: boto3.Session) -> tuple[str | None, ...]:
    try:
        credentials = session.get_credentials()
        return tuple(credentials.get_frozen_credentials()) if credentials else ()
    except BotoCoreError:
        return ()
