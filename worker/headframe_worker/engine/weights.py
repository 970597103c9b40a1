"""Safetensors checkpoints onto a device at the speed of the medium.

On a GPU the way is: threads read ranges of the file into a bounded ring of pinned buffers, each buffer is copied to its tensor's
place on the device by a stream of its own, and the reader is one buffer ahead of the copy. No byte is held twice in host memory.
On the CPU a tensor is a view of the mapped file.
"""

import json
import math
import os
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headframe_api.errors import ConfigError, TemporaryError

_CHUNK_BYTES = 8 << 20
_AHEAD_BYTES = 4 << 30  # read but not yet taken by the caller; bounds the device memory above what the caller keeps
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit

# https://github.com/huggingface/safetensors: names of the format's dtypes
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its bytes are [start, end) of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def size_bytes(self) -> int:
        """How many bytes the tensor holds."""
        return self.end - self.start


def load_safetensors(
    files: Sequence[Path],
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    threads: int = 8,
    wanted: Callable[[str], bool] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor on `device`) for the tensors that `wanted` accepts, file by file, in the order of their bytes.

    Floating tensors are cast to `dtype` unless it is None; float8 and integers keep their own. On a GPU each tensor is an allocation
    of its own, ready for work on the caller's current stream, and nothing here waits for the device but for a buffer to come free.

    Raises ConfigError for a file that is truncated, malformed or of an unknown dtype, naming it.
    """
    select = wanted or (lambda _name: True)
    tensors = (
        _read_on_gpu(files, device, threads, select) if device.type == "cuda" else _map_on_cpu(files, device, select)
    )
    for name, tensor in tensors:
        yield name, tensor.to(dtype) if dtype is not None and _is_castable(tensor.dtype) else tensor


def read_entries(file: Path) -> list[Entry]:
    """The tensors of a safetensors file in the order of their bytes, checked against the file's size."""
    try:
        size = file.stat().st_size
        with file.open("rb") as handle:
            length = struct.unpack("<Q", handle.read(8))[0] if size >= 8 else _MAX_HEADER_BYTES
            if length > min(_MAX_HEADER_BYTES, size - 8):
                raise ConfigError(
                    f"{file}: {size} bytes hold no safetensors header: the file is truncated or of another format"
                )
            header: dict[str, Any] = json.loads(handle.read(length))
        entries = [_entry(name, fields, 8 + length) for name, fields in header.items() if name != "__metadata__"]
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}: malformed safetensors header: {error}") from error
    entries.sort(key=lambda entry: (entry.start, entry.end))
    end = entries[-1].end if entries else 8 + length
    if end != size:
        raise ConfigError(f"{file}: the header promises {end} bytes, the file has {size}: fetch it again")
    return entries


def _entry(name: str, fields: dict[str, Any], base: int) -> Entry:
    if fields["dtype"] not in _DTYPES:
        raise ValueError(f"{name} has dtype {fields['dtype']}, which this version cannot read")
    dtype, shape = _DTYPES[fields["dtype"]], tuple(int(n) for n in fields["shape"])
    start, end = (base + int(offset) for offset in fields["data_offsets"])
    if end - start != math.prod(shape) * dtype.itemsize or start < base:
        raise ValueError(f"{name} of shape {list(shape)} does not fill bytes {start} to {end}")
    return Entry(name, dtype, shape, start, end)


def _is_castable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1


def _map_on_cpu(
    files: Sequence[Path], device: torch.device, select: Callable[[str], bool]
) -> Iterator[tuple[str, Tensor]]:
    for file in files:
        names = [entry.name for entry in read_entries(file) if select(entry.name)]
        try:
            with safe_open(file, framework="pt", device=str(device)) as mapped:
                for name in names:
                    yield name, mapped.get_tensor(name)
        except SafetensorError as error:
            raise ConfigError(f"{file}: {error}") from error


@dataclass(frozen=True)
class _Ahead:
    """A tensor whose bytes are on their way."""

    entry: Entry
    target: Tensor
    moves: list["Future[torch.cuda.Event]"]

    def finish(self, device: torch.device) -> tuple[str, Tensor]:
        """Wait until all is read, and let the caller's stream wait until all is copied."""
        stream = torch.cuda.current_stream(device)
        for move in self.moves:
            stream.wait_event(move.result())
        return self.entry.name, self.target.view(self.entry.dtype).view(self.entry.shape)


class _Lane:
    """Two pinned buffers and the stream that empties them: one is read into while the other is copied from."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._buffers = [torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0

    def move(
        self, file: Path, descriptor: int, position: int, target: Tensor, ready: torch.cuda.Event
    ) -> torch.cuda.Event:
        """Read target.numel() bytes at `position`, and start their copy into `target` once `ready` has passed."""
        buffer, copied = self._buffers[self._turn], self._copied[self._turn]
        self._turn ^= 1
        copied.synchronize()
        view, count = buffer.numpy().data, target.numel()
        done = 0
        while done < count:
            read = os.preadv(descriptor, [view[done:count]], position + done)
            if read == 0:
                raise TemporaryError(f"{file}: ends at byte {position + done}: it was cut while it was read")
            done += read
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(ready)
            target.copy_(buffer[:count], non_blocking=True)
            copied.record(self.stream)
            moved = torch.cuda.Event()
            moved.record(self.stream)
        return moved


def _read_on_gpu(
    files: Sequence[Path], device: torch.device, threads: int, select: Callable[[str], bool]
) -> Iterator[tuple[str, Tensor]]:
    lanes: SimpleQueue[_Lane] = SimpleQueue()
    for _ in range(threads):
        lanes.put(_Lane(device))

    def move(file: Path, descriptor: int, position: int, target: Tensor, ready: torch.cuda.Event) -> torch.cuda.Event:
        lane = lanes.get()
        try:
            return lane.move(file, descriptor, position, target, ready)
        finally:
            lanes.put(lane)

    with ExitStack() as stack:
        opened = [(file, os.open(file, os.O_RDONLY), read_entries(file)) for file in files]
        for _, descriptor, _ in opened:
            stack.callback(os.close, descriptor)
        stack.callback(torch.cuda.synchronize, device)  # a caller that stops early leaves copies under way
        pool = stack.enter_context(ThreadPoolExecutor(threads, thread_name_prefix="weights"))
        stack.callback(pool.shutdown, cancel_futures=True)
        ahead: deque[_Ahead] = deque()
        ahead_bytes = 0
        for file, descriptor, entries in opened:
            for entry in filter(lambda entry: select(entry.name), entries):
                while ahead and ahead_bytes + entry.size_bytes > _AHEAD_BYTES:
                    ahead_bytes -= ahead[0].entry.size_bytes
                    yield ahead.popleft().finish(device)
                target = torch.empty(entry.size_bytes, dtype=torch.uint8, device=device)
                ready = torch.cuda.current_stream(device).record_event()  # the memory may serve earlier work until here
                moves = [
                    pool.submit(move, file, descriptor, entry.start + at, target[at : at + _CHUNK_BYTES], ready)
                    for at in range(0, entry.size_bytes, _CHUNK_BYTES)
                ]
                ahead.append(_Ahead(entry, target, moves))
                ahead_bytes += entry.size_bytes
        while ahead:
            yield ahead.popleft().finish(device)
