"""A worker's port tells Prometheus, the operator and the kubelet what its meters count."""

from __future__ import annotations

import json
import logging
import socket
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics
from prometheus_client.parser import text_string_to_metric_families

from headframe_api.errors import ConfigError
from headframe_api.progress import Progress
from headframe_worker.meter import Meter
from headframe_worker.serve.health import StallWatch
from headframe_worker.serve.server import MeterServer
from headframe_worker.stores.observer import tell
from testbed.process import wait_until


def busy_meter() -> Meter:
    meter = Meter("extract")
    meter.begin_shard(3, samples_total=100, tokens_total=5000, samples_done=10, tokens_done=500)
    meter.batch_done(samples=4, tokens=300, padded_tokens=400)
    meter.batch_done(samples=2, tokens=200, padded_tokens=70_000)
    meter.uploaded(size_bytes=1 << 20, seconds=0.3)
    meter.add_seconds("forward", 1.5)
    meter.add_seconds("waiting_write", 0.5)
    meter.quarantine("NonFinite", 2)
    meter.count_retry("out_of_memory_retries")
    meter.count_retry("upload_retries", 7)
    meter.slow_path = ("GatedDeltaNet",)
    return meter


@pytest.fixture
def meters() -> dict[str, Meter]:
    return {"0": busy_meter(), "1": Meter("extract")}


@pytest.fixture
def server(meters: dict[str, Meter]) -> Iterator[MeterServer]:
    with MeterServer(lambda: meters, port=0) as running:
        yield running


def get(server: MeterServer, path: str, accept: str = "*/*") -> tuple[int, str, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read().decode()


def sample(families: dict[str, Metric], name: str, **labels: str) -> float:
    [value] = [
        sample.value
        for family in families.values()
        for sample in family.samples
        if (sample.name, sample.labels) == (name, labels)
    ]
    return value


def test_metrics_are_what_the_meters_count(server: MeterServer) -> None:
    status, content_type, text = get(server, "/metrics")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert (status, content_type.split(";")[0]) == (200, "text/plain")
    for name, value in (
        ("samples_total", 6),
        ("tokens_total", 500),
        ("padded_tokens_total", 70_400),
        ("written_bytes_total", 1 << 20),
        ("out_of_memory_retries_total", 1),
        ("non_finite_samples_total", 0),
        ("upload_retries_total", 7),
        ("slow_path", 1),
        ("stalled", 0),
        ("batch_tokens_count", 2),
        ("batch_tokens_sum", 70_400),
        ("upload_seconds_count", 1),
        ("model_load_seconds", 0),
        ("upload_backlog_bytes", 0),
    ):
        assert sample(families, f"headframe_{name}", worker="0") == value, name
        assert sample(families, f"headframe_{name}", worker="1") == 0, name
    assert sample(families, "headframe_stage_seconds_total", worker="0", stage="forward") == 1.5
    assert sample(families, "headframe_waiting_seconds_total", worker="0", **{"for": "write"}) == 0.5
    assert sample(families, "headframe_quarantined_samples_total", worker="0", reason="NonFinite") == 2
    assert sample(families, "headframe_batch_tokens_bucket", worker="0", le="512.0") == 1
    assert sample(families, "headframe_batch_tokens_bucket", worker="0", le="+Inf") == 2
    assert sample(families, "headframe_state", worker="0", state="running") == 1
    assert sample(families, "headframe_state", worker="1", state="starting") == 1
    assert families["headframe_samples"].type == "counter"
    assert all(family.documentation for family in families.values())


def test_the_backlog_is_what_is_being_written(server: MeterServer, meters: dict[str, Meter]) -> None:
    def backlog() -> float:
        families = {family.name: family for family in text_string_to_metric_families(get(server, "/metrics")[2])}
        return sample(families, "headframe_upload_backlog_bytes", worker="0")

    with meters["0"].writing(1000), meters["0"].writing(234):
        assert backlog() == 1234
    assert backlog() == 0


def test_open_metrics_are_well_formed_too(server: MeterServer) -> None:
    _, content_type, text = get(server, "/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert "headframe_samples" in {family.name for family in parse_open_metrics(text)}


def test_progress_of_one_worker_is_the_meters(meters: dict[str, Meter]) -> None:
    with MeterServer(lambda: {"0": meters["0"]}, port=0) as server:
        _, content_type, text = get(server, "/progress")
    progress = Progress.model_validate_json(text)
    assert content_type == "application/json"
    assert json.loads(text)["samplesTotal"] == 100
    assert (progress.shard, progress.samples, progress.tokens, progress.bytes) == (3, 16, 1000, 1 << 20)


def test_progress_of_several_workers_is_their_sum(server: MeterServer, meters: dict[str, Meter]) -> None:
    meters["1"].begin_shard(4, samples_total=50, tokens_total=900)
    meters["1"].set_state("waiting", "s3://bucket: down")
    progress = Progress.model_validate_json(get(server, "/progress")[2])
    assert (progress.shard, progress.samples, progress.samples_total) == (None, 16, 150)
    assert (progress.state, progress.message) == ("waiting", "s3://bucket: down")


@pytest.mark.parametrize(
    ("state", "ready"),
    [("starting", 503), ("loading", 503), ("warming", 503), ("running", 200), ("waiting", 200), ("done", 200)],
)
def test_ready_means_that_every_worker_is(
    server: MeterServer, meters: dict[str, Meter], state: str, ready: int
) -> None:
    meters["1"].set_state(state)  # type: ignore[arg-type]
    assert get(server, "/readyz")[0] == ready


def test_a_server_without_workers_is_alive_and_not_ready() -> None:
    with MeterServer(dict, port=0) as server:
        assert get(server, "/healthz")[0] == 200
        assert get(server, "/readyz")[0] == 503
        assert get(server, "/metrics")[0] == 200
        assert get(server, "/progress")[0] == 200
        assert get(server, "/elsewhere")[0] == 404


def test_a_stall_fails_health_and_is_written_down_once(caplog: pytest.LogCaptureFixture) -> None:
    meter = busy_meter()
    watch = StallWatch(meter, stalled_after_seconds=100)
    with MeterServer(lambda: {"0": meter}, port=0, stalled_after_seconds=100) as server:
        watch.look()
        assert get(server, "/healthz")[0] == 200
        meter.moved_at -= 101
        for _ in range(3):
            watch.look()
        assert get(server, "/healthz")[0] == 503
        assert Progress.model_validate_json(get(server, "/progress")[2]).stalled
        meter.set_state("waiting", "the store is down")
        assert get(server, "/healthz")[0] == 200
    stalls = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(stalls) == 1
    assert "test_a_stall_fails_health" in stalls[0]
    assert f"thread {threading.main_thread().name}" in stalls[0]


def test_a_port_in_use_says_so(server: MeterServer) -> None:
    with pytest.raises(ConfigError, match=f"port {server.port}: cannot listen"):
        MeterServer(dict, port=server.port)


def test_a_waiting_store_is_the_meters_state_until_it_answers() -> None:
    meter = busy_meter()
    observer = tell(meter, threading.Event())
    observer.waiting("s3://bucket/k: PutObject: down")
    observer.retried()
    assert (meter.state, meter.message, meter.upload_retries) == ("waiting", "s3://bucket/k: PutObject: down", 8)
    observer.waiting(None)
    assert (meter.state, meter.message) == ("running", "")
    observer.waiting("again")
    meter.set_state("done")
    observer.waiting(None)
    assert meter.state == "done"


def test_a_client_that_hangs_up_is_not_news(capfd: pytest.CaptureFixture[str]) -> None:
    """A probe or a poll whose time is over resets the connection before the answer is written."""
    gone = threading.Event()

    def meters() -> dict[str, Meter]:
        gone.wait(10)
        return {"0": busy_meter()}

    def answering() -> bool:
        return any("process_request_thread" in thread.name for thread in threading.enumerate())

    with MeterServer(meters, port=0) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: worker\r\n\r\n")
            wait_until(answering)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close resets
        gone.set()
        wait_until(lambda: not answering())
    assert capfd.readouterr().err == ""
