"""A signal may come between any two instructions of the thread that handles it."""

import subprocess
import sys

SCRIPT = """
import signal
from headframe_worker.signals import StopWish

wish = StopWish()
with wish.heard(), wish.event._cond:  # as inside wait(): the thread holds the event's lock
    signal.raise_signal(signal.SIGTERM)
assert wish.event.is_set() and wish.event.wait(1)
"""


def test_a_signal_that_meets_its_own_thread_inside_a_wait_does_not_block_it() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=30)
