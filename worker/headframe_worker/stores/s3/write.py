"""One write: to which key, under which condition, with which checksum, in parts of which size."""

from __future__ import annotations

import secrets
from base64 import b64encode
from dataclasses import dataclass, field
from typing import Any

MINIMUM_PART_BYTES = 5 << 20
MAXIMUM_PARTS = 10_000
_MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Capabilities:
    """What the server was seen to do."""

    conditional_writes: bool
    """If-None-Match: * is honoured by PutObject and by CompleteMultipartUpload."""
    crc64nvme: bool
    """CRC-64/NVME checksums are verified."""


def part_bytes_for(size_bytes: int, preferred_bytes: int) -> int:
    """The size of an upload's parts: the preferred one, or as much more as 10,000 parts need."""
    needed = -(-size_bytes // MAXIMUM_PARTS)
    return max(MINIMUM_PART_BYTES, preferred_bytes, -(-needed // _MEBIBYTE) * _MEBIBYTE)


def header_text(checksum: int) -> str:
    """A CRC-64/NVME as S3's headers spell it."""
    return b64encode(checksum.to_bytes(8, "big")).decode()


@dataclass
class Write:
    """One write under way."""

    key: str
    where: str
    """URI, for errors."""
    capabilities: Capabilities
    conditional: bool
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    checksum: int | None = None
    """Of the whole object, once it was computed."""

    @property
    def condition(self) -> dict[str, Any]:
        """The request parameter that refuses a key which is taken."""
        return {"IfNoneMatch": "*"} if self.conditional else {}

    def checksum_header(self, checksum: int) -> dict[str, Any]:
        """The request parameter that lets the server verify what it got."""
        return {"ChecksumCRC64NVME": header_text(checksum)} if self.capabilities.crc64nvme else {}
