"""Encoding blocks in several processes: in order, with a bounded number in flight, and in this process where there is little to do."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from multiprocessing.connection import wait

from headframe_api.errors import TemporaryError
from headframe_worker.prepare.blocks import Block
from headframe_worker.prepare.encoder import EncodedBlock, Encoder

_IN_PROCESS_BLOCKS = 4
"""Fewer blocks than this are encoded sooner than a process starts."""
_IN_FLIGHT_PER_PROCESS = 3

_encoder: Encoder | None = None


def encode_blocks(encoder: Encoder, blocks: Iterable[Block], *, processes: int) -> Iterator[EncodedBlock]:
    """The encoded blocks, in the order of the blocks.

    Raises what the encoder or the reading of blocks raises, and TemporaryError where a process dies.
    """
    source = iter(blocks)
    first = list(islice(source, _IN_PROCESS_BLOCKS))
    if processes == 1 or len(first) < _IN_PROCESS_BLOCKS:
        yield from (encoder.encode(block) for block in chain(first, source))
        return
    # Forking this process would copy its threads' locks; a server that is forked from imports Transformers once for all.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["headframe_worker.prepare.preload"])
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(encoder,))
    try:
        yield from _in_order(pool, chain(first, source), processes * _IN_FLIGHT_PER_PROCESS)
    except BrokenProcessPool as error:
        raise TemporaryError(
            "a tokenising process died, most likely for want of memory; give prepare more memory or fewer processes",
            reason="ProcessDied",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_order(pool: ProcessPoolExecutor, blocks: Iterator[Block], in_flight: int) -> Iterator[EncodedBlock]:
    pending: deque[Future[EncodedBlock]] = deque()
    for block in blocks:
        pending.append(pool.submit(_encode, block))
        if len(pending) >= in_flight:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def _begin(encoder: Encoder) -> None:
    global _encoder  # noqa: PLW0603  (a process of a pool has no other place for what all its tasks share)
    _encoder = encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent ends us in order
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that is killed cannot end its processes, and they would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _encode(block: Block) -> EncodedBlock:
    if _encoder is None:
        raise RuntimeError("the process was not begun")
    return _encoder.encode(block)
