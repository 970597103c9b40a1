"""The digest of objects and of parts: CRC-64/NVME, which S3 verifies for whole objects and which runs at memory speed."""

from __future__ import annotations

from collections.abc import Iterable

from awscrt.checksums import crc64nvme

_CHUNK_BYTES = 16 << 20  # small enough that other threads get the interpreter between chunks


def crc64(buffers: Iterable[memoryview], checksum: int = 0) -> int:
    """CRC-64/NVME of the concatenation of buffers; `checksum` is that of what came before them."""
    for buffer in buffers:
        flat = buffer.cast("B")
        for start in range(0, len(flat), _CHUNK_BYTES):
            checksum = crc64nvme(flat[start : start + _CHUNK_BYTES], checksum)
    return checksum


def digest_text(checksum: int) -> str:
    """As manifests spell it: `crc64nvme:` and 16 hex digits."""
    return f"crc64nvme:{checksum:016x}"
