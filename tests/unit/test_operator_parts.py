"""The operator's small parts: names, settings, index lists, rates, the work queue."""

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from kubernetes_objects import pod

from headframe_api.errors import ConfigError
from headframe_operator import index_lists
from headframe_operator.api_server import ApiError, ApiServer
from headframe_operator.child_names import child_name, job_label
from headframe_operator.lookups import Inquiry, Warnings
from headframe_operator.poller import Poller, session_for_workers
from headframe_operator.rates import RateWindow
from headframe_operator.settings import Settings, read_settings
from headframe_operator.snapshot import Poll
from headframe_operator.totals import Totals
from headframe_operator.views import pod_view
from headframe_operator.work_queue import WorkQueue
from testbed.process import free_port

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
LABEL = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
NAMES = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,60}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,60}[a-z0-9])?){0,3}", fullmatch=True)


@given(NAMES, st.sampled_from(["prepare", "extract", "finalize"]))
def test_child_names_fit_dns(name: str, stage: str) -> None:
    child, label = child_name(name, stage), job_label(name)
    assert len(f"{child}-99999") <= 63
    assert LABEL.fullmatch(child)
    assert "." not in child
    assert len(label) <= 63
    assert LABEL.fullmatch(label)


@given(NAMES, NAMES)
def test_different_jobs_have_different_children(one: str, other: str) -> None:
    assert (one == other) == (child_name(one, "extract") == child_name(other, "extract"))
    assert (one == other) == (job_label(one) == job_label(other))


def test_short_names_stay_readable() -> None:
    assert child_name("qwen3-dflash", "extract") == "qwen3-dflash-extract"
    assert child_name("a.b", "extract") != child_name("a-b", "extract")


@given(st.sets(st.integers(0, 300)))
def test_index_lists_read_kubernetes_ranges(indexes: set[int]) -> None:
    ordered, parts = sorted(indexes), []
    while ordered:
        first = last = ordered.pop(0)
        while ordered and ordered[0] == last + 1:
            last = ordered.pop(0)
        parts.append(str(first) if first == last else f"{first}-{last}")
    text = ",".join(parts)
    assert index_lists.count(text) == len(indexes)
    assert [i for i in range(301) if index_lists.contains(text, i)] == sorted(indexes)


def test_rates_span_the_window_and_start_anew_when_sums_shrink() -> None:
    window = RateWindow()
    assert window.rates() is None
    for second in range(0, 121, 10):
        window.add(second, Totals(samples=second, tokens=100 * second))
    rates = window.rates()
    assert rates is not None
    assert (rates.samples_per_second, rates.tokens_per_second) == (1.0, 100.0)
    window.add(130, Totals(tokens=5))
    assert window.rates() is None


def test_settings_come_from_the_environment() -> None:
    settings = read_settings(
        {
            "HEADFRAME_OPERATOR_NAMESPACES": "a, b",
            "HEADFRAME_OPERATOR_CPU_STAGE_RESOURCES": '{"requests": {"cpu": "1"}}',
            "HEADFRAME_OPERATOR_POD_USER_ID": "",
            "HEADFRAME_OPERATOR_POLL_INTERVAL_SECONDS": "2.5",
            "PATH": "/bin",
        }
    )
    assert settings.namespaces == ("a", "b")
    assert settings.cpu_stage_resources == {"requests": {"cpu": "1"}}
    assert settings.pod_user_id is None
    assert settings.poll_interval_seconds == 2.5


def test_every_wrong_setting_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(
            {
                "HEADFRAME_OPERATOR_PORT": "http",
                "HEADFRAME_OPERATOR_LOG_FORMAT": "xml",
                "HEADFRAME_OPERATOR_CPU_STAGE_RESOURCES": "{",
                "HEADFRAME_OPERATOR_PROT": "1",
            }
        )
    for variable in ("PORT", "LOG_FORMAT", "CPU_STAGE_RESOURCES", "PROT: unknown"):
        assert f"HEADFRAME_OPERATOR_{variable}" in caught.value.message


def test_the_queue_looks_once_at_many_events_and_again_at_one_meanwhile() -> None:
    looks: list[str] = []

    async def scenario() -> None:
        looking, go_on, twice = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def handle(key: tuple[str, str]) -> None:
            looks.append(key[1])
            looking.set()
            if len(looks) == 2:
                twice.set()
            await go_on.wait()

        queue = WorkQueue(handle, concurrency=2)
        for _ in range(50):
            queue.add(("ns", "job"))
        await asyncio.wait_for(looking.wait(), 5)
        assert looks == ["job"]
        queue.add(("ns", "job"))
        go_on.set()
        await asyncio.wait_for(twice.wait(), 5)
        await queue.stop()

    asyncio.run(scenario())
    assert looks == ["job", "job"]


def test_the_queue_tries_again_what_failed_and_keeps_the_others_going() -> None:
    looks: list[str] = []

    async def scenario() -> None:
        done = asyncio.Event()

        async def handle(key: tuple[str, str]) -> None:
            looks.append(key[1])
            if looks.count("bad") == 2 and "good" in looks:
                done.set()
            if key[1] == "bad":
                raise ConnectionError("no answer")

        queue = WorkQueue(handle, concurrency=1)
        queue.add(("ns", "bad"))
        queue.add(("ns", "good"))
        await asyncio.wait_for(done.wait(), 10)
        await queue.stop()

    asyncio.run(scenario())
    assert looks[:2] == ["bad", "good"]


def questions(gaps: list[tuple[int, int]], until: int) -> list[int]:
    """At which seconds Events are asked for, of one look a second, where pods are missing in these spans of time."""
    inquiry, start = Inquiry(), datetime(2026, 11, 30, tzinfo=UTC)
    return [
        second
        for second in range(until)
        if inquiry.note(
            ("job",) if any(first <= second < last for first, last in gaps) else (),
            (),
            start + timedelta(seconds=second),
        )
    ]


def test_events_are_asked_for_only_where_pods_stay_missing_and_ever_more_seldom() -> None:
    assert questions([(first, first + 3) for first in range(0, 100, 4)], 100) == []
    lasting = questions([(0, 600)], 600)
    assert lasting[:5] == [3, 6, 12, 24, 48]
    assert all(later - earlier <= 60 for earlier, later in itertools.pairwise(lasting))
    assert questions([(0, 50), (300, 310)], 400)[-2:] == [303, 306]  # a new gap much later is explained at once


def test_something_else_that_is_odd_is_asked_about_soon_and_more_of_the_same_is_not() -> None:
    inquiry, now = Inquiry(), datetime(2026, 11, 30, tzinfo=UTC)
    assert inquiry.note((), ("pod-1",), now)
    assert not inquiry.note((), ("pod-2",), now + timedelta(seconds=2))
    assert inquiry.note((), ("pod-2",), now + timedelta(seconds=3))
    assert not inquiry.note((), ("pod-3",), now + timedelta(seconds=6))
    inquiry.note(("job",), ("pod-3",), now + timedelta(seconds=4))
    assert inquiry.note(("job",), ("pod-3",), now + timedelta(seconds=7))
    assert inquiry.about == ("job", "pod-3")


def test_the_events_of_a_namespace_are_listed_once_for_all_who_ask_at_the_same_time() -> None:
    class Api:
        asked: ClassVar[list[str]] = []

        async def list(self, path: str, **_: str) -> list[dict[str, Any]]:
            self.asked.append(path)
            await asyncio.sleep(0.01)
            if len(self.asked) == 3:
                raise ApiError(503, "ServiceUnavailable", "for a moment")
            about = {"involvedObject": {"uid": f"pod-{len(self.asked)}"}, "reason": "FailedScheduling"}
            return [{**about, "metadata": {"creationTimestamp": "2026-11-30T00:00:00Z"}}]

    async def scenario() -> None:
        warnings = Warnings(cast("ApiServer", Api()))
        answers = await asyncio.gather(*(warnings.about("one", (f"pod-{number}",)) for number in range(100)))
        assert [len(answer) for answer in answers] == [0, 1, *[0] * 98]
        assert len(await warnings.about("one", ("pod-1",))) == 1, "still fresh"
        assert len(await warnings.about("two", ("pod-2",))) == 1
        with pytest.raises(ApiError):
            await warnings.about("three", ("pod-3",))
        assert len(await warnings.about("three", ("pod-4",))) == 1, "a failure is not kept"

    asyncio.run(scenario())
    assert [path.split("/")[4] for path in Api.asked] == ["one", "two", "three", "three"]


def test_a_key_with_many_pods_rests_between_two_looks() -> None:
    looks: list[float] = []

    async def scenario() -> None:
        done = asyncio.Event()

        async def handle(key: tuple[str, str]) -> None:
            looks.append(asyncio.get_running_loop().time())
            queue.add(key)
            if len(looks) == 3:
                done.set()

        queue = WorkQueue(handle, concurrency=1, rest_seconds=lambda _: 0.2)
        queue.add(("ns", "job"))
        await asyncio.wait_for(done.wait(), 10)
        await queue.stop()

    asyncio.run(scenario())
    assert all(later - earlier >= 0.19 for earlier, later in itertools.pairwise(looks))


@asynccontextmanager
async def serving(handlers: Mapping[str, Handler], port: int) -> AsyncIterator[list[web.Server]]:
    """Workers at these addresses, all at one port; gives their servers."""
    async with AsyncExitStack() as stack:
        servers = []
        for address, handler in handlers.items():
            app = web.Application()
            app.router.add_get("/progress", handler)
            runner = web.AppRunner(app)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, address, port).start()
            assert runner.server is not None
            servers.append(runner.server)
        yield servers


async def poll_all(poller: Poller, addresses: Sequence[str]) -> list[Poll]:
    """What the workers at these addresses answer."""
    pods = [
        replace(pod_view(pod("extract", index, run=True, uid=address)), address=address)
        for index, address in enumerate(addresses)
    ]
    found = await poller.poll(pods, {})
    return [found[address] for address in addresses]


def test_a_workers_answer_may_come_in_pieces_but_lead_nowhere_else() -> None:
    port = free_port("127.7.0.1")

    async def pieces(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in (b'{"stage": "extract", "state": "running", ', b'"samples": 7, "tokens": 70}'):
            await response.write(piece)
            await asyncio.sleep(0.05)  # so that they are two pieces for the other side, too
        return response

    async def elsewhere(_: web.Request) -> web.Response:
        raise web.HTTPFound(f"http://127.7.0.1:{port}/progress")

    async def answers() -> list[Poll]:
        addresses = {"127.7.0.1": pieces, "127.7.0.2": elsewhere}
        async with session_for_workers() as session, serving(addresses, port):
            return await poll_all(Poller(session, Settings(), port), list(addresses))

    whole, led_astray = asyncio.run(answers())
    assert whole.progress is not None
    assert whole.progress.tokens == 70
    assert led_astray.progress is None


def test_no_connection_to_a_worker_stays_open() -> None:
    port, addresses = free_port("127.7.1.1"), [f"127.7.1.{number}" for number in range(1, 9)]

    async def progress(_: web.Request) -> web.Response:
        return web.json_response({"stage": "extract", "state": "running", "samples": 7, "tokens": 70})

    async def scenario() -> None:
        async with session_for_workers() as session, serving(dict.fromkeys(addresses, progress), port) as servers:
            answers = await poll_all(Poller(session, Settings(), port), addresses)
            assert all(answer.progress for answer in answers)
            async with asyncio.timeout(5):
                while any(server.connections for server in servers):  # noqa: ASYNC110  (nothing tells of their end)
                    await asyncio.sleep(0.01)

    asyncio.run(scenario())


def test_every_setting_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs/operator.md").read_text()
    for name, field in Settings.model_fields.items():
        assert f"`HEADFRAME_OPERATOR_{name.upper()}`" in page
        assert field.description is not None
        assert field.description in page
