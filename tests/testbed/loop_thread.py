"""An event loop in a thread of its own, for what serves a test while the test waits."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class LoopThread:
    """Runs from `start` to `stop`, once."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)

    def start(self) -> None:
        """From now on `do` works."""
        self._thread.start()

    def do(self, work: Coroutine[Any, Any, Result], timeout_seconds: float) -> Result:
        """What `work` returns, run there; raises what it raises."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_seconds)

    def stop(self) -> None:
        """End the loop and its thread; what still runs there is dropped."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
