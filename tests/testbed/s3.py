"""A real S3 server (versitygw over a directory), for everything Headframe does with object storage."""

import os
import secrets
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import boto3
from botocore.config import Config

from testbed.certificates import CertificateAuthority
from testbed.process import Process, free_port, listens
from testbed.tools import go_tool

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


class S3Server:
    """An S3 server over `folder`, with path-style addresses and random credentials; a context manager.

    `stop()` and `start()` play an outage: the objects and the port stay. The folder's file system must have extended
    attributes. `host` may be the address of a bridge, so that pods reach it. With an authority it speaks TLS.
    """

    region = "us-east-1"

    def __init__(self, folder: Path, host: str = "127.0.0.1", authority: CertificateAuthority | None = None) -> None:
        self.folder = folder
        self.host = host
        self.port = free_port(host)
        self._authority = authority
        self.access_key = f"test{secrets.token_hex(8)}"
        self.secret_key = secrets.token_hex(20)
        objects = folder / "objects"
        objects.mkdir(parents=True, exist_ok=True)
        options = ["--region", self.region, "--keep-alive", "--quiet"]
        if authority:
            pair = authority.issue(f"s3-{self.port}", addresses=(host,))
            options += ["--cert", str(pair.certificate), "--key", str(pair.key)]
        self._process = Process(
            [go_tool("versitygw"), "--port", f"{host}:{self.port}", *options, "posix", objects],
            folder / "versitygw.log",
            ready=lambda: listens(host, self.port),
            environment=os.environ | {"ROOT_ACCESS_KEY": self.access_key, "ROOT_SECRET_KEY": self.secret_key},
        )

    @property
    def endpoint(self) -> str:
        """The address of the server, as `spec.s3.endpoint` takes it."""
        return f"{'https' if self._authority else 'http'}://{self.host}:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """What an AWS client needs in its environment to reach this server and no other."""
        authority = {"AWS_CA_BUNDLE": str(self._authority.certificate)} if self._authority else {}
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
            **authority,
        }

    def client(self, endpoint: str | None = None, config: Config | None = None) -> "S3Client":
        """A boto3 client with path-style addresses; `endpoint` may be a proxy before this server."""
        return boto3.client(
            "s3",
            endpoint_url=endpoint or self.endpoint,
            region_name=self.region,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            verify=str(self._authority.certificate) if self._authority else None,
            config=Config(s3={"addressing_style": "path"}, connect_timeout=5, read_timeout=10).merge(
                config or Config()
            ),
        )

    def new_bucket(self, prefix: str = "test") -> str:
        """Make a bucket of a name nobody else uses, so that tests share a server; return the name."""
        name = f"{prefix}-{secrets.token_hex(6)}"
        self.client().create_bucket(Bucket=name)
        return name

    def start(self) -> None:
        """Start the server and wait until it answers."""
        self._process.start()

    def stop(self) -> None:
        """Stop the server; its objects stay."""
        self._process.stop(kill=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
