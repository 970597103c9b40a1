"""What a person sees while a local run works: one live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from headframe_api.plan import Plan
from headframe_worker.meter import Meter

_PLAIN_EVERY_SECONDS = 10.0


class ExtractDisplay:
    """Progress of all workers together. Use it as a context manager and call `update` a few times a second."""

    def __init__(self, console: Console, plan: Plan, *, quiet: bool) -> None:
        self._console, self._plan, self._quiet = console, plan, quiet
        self._live = console.is_terminal and not quiet
        self._last_plain = time.monotonic()
        self._progress = Progress(
            TextColumn("[bold]extract[/]"),
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not self._live,
            transient=True,
        )
        self._task = self._progress.add_task("extract", total=max(plan.tokens, 1), detail="starting workers")

    def __enter__(self) -> ExtractDisplay:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, *, done_samples: int, done_tokens: int, meters: Sequence[Meter]) -> None:
        """Show committed shards plus what running workers have of theirs."""
        rates = [meter.rates() for meter in meters]
        samples_per_second, tokens_per_second = sum(rate[0] for rate in rates), sum(rate[1] for rate in rates)
        tokens = done_tokens + sum(meter.shard_tokens for meter in meters if meter.state == "running")
        samples = done_samples + sum(meter.shard_samples for meter in meters if meter.state == "running")
        detail = _detail(samples, self._plan, samples_per_second, tokens_per_second, tokens, meters)
        self._progress.update(self._task, completed=min(tokens, self._plan.tokens), detail=detail)
        if not self._live and not self._quiet and time.monotonic() - self._last_plain > _PLAIN_EVERY_SECONDS:
            self._last_plain = time.monotonic()
            self._console.print(f"extract {tokens / max(self._plan.tokens, 1):.0%}  {detail}")


def _detail(
    samples: int, plan: Plan, samples_per_second: float, tokens_per_second: float, tokens: int, meters: Sequence[Meter]
) -> str:
    waiting = next((meter.message for meter in meters if meter.state == "waiting"), None)
    if waiting:
        return f"waiting: {waiting}"
    if tokens_per_second <= 0:
        states = sorted({meter.state for meter in meters})
        return f"{samples:,}/{plan.samples:,} samples  {', '.join(states)}"
    left = (plan.tokens - tokens) / tokens_per_second
    workers = f"  {len(meters)} workers" if len(meters) > 1 else ""
    return (
        f"{samples:,}/{plan.samples:,} samples  {samples_per_second:,.1f} samples/s  "
        f"{tokens_per_second:,.0f} tokens/s  {duration(left)} left{workers}"
    )


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3.4 h`, `2.1 d`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} d"
