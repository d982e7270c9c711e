"""Metrics and logs of the service: what is counted under which name, and the HTTP endpoint."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from perdure import limits
from perdure.errors import ConfigError
from perdure.observe import logs
from perdure.observe.endpoint import Endpoint
from perdure.observe.metrics import COUNTERS, GAUGES, Metrics

STATUS: dict[str, Any] = {
    "boot": "00" * 16,
    "clients": [{"pid": 1}, {"pid": 2}],
    "queue": 3,
    "memory": {"budget_bytes": 1000, "mapped_bytes": 640, "stranded_bytes": 64, "evictions": 5},
    "store": {
        "capacity_bytes": 5000,
        "used_bytes": 4000,
        "healthy": True,
        "expiry_paused": False,
        "counters": {"catalog_errors": 2},
        "tenants": {"acme": {"stored_bytes": 77}},
    },
}


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_hits_and_misses_by_tier_tenant_and_reason() -> None:
    metrics = Metrics()
    metrics.blocks("read", "acme", "memory", "found", 3, 300)
    metrics.blocks("view", "acme", "memory", "found", 1, 100)
    metrics.blocks("read", "acme", "disk", "found", 2, 200)
    metrics.blocks("read", "acme", "none", "missing", 4, 0)
    metrics.blocks("read", "other-co", "disk", "corrupt", 1, 0)
    assert value(metrics, "perdure_hit_blocks_total", tenant="acme", tier="memory") == 4
    assert value(metrics, "perdure_hit_blocks_total", tenant="acme", tier="disk") == 2
    assert value(metrics, "perdure_delivered_bytes_total", tenant="acme", tier="memory") == 400
    assert value(metrics, "perdure_missed_blocks_total", tenant="acme", reason="missing") == 4
    assert value(metrics, "perdure_missed_blocks_total", tenant="other-co", reason="corrupt") == 1
    assert value(metrics, "perdure_hit_blocks_total", tenant="other-co", tier="disk") is None


def test_writes_and_lookups() -> None:
    metrics = Metrics()
    metrics.blocks("write", "acme", "disk", "stored", 2, 200)
    metrics.blocks("write", "acme", "none", "exists", 5, 500)
    metrics.lookups("acme", 10, 7)
    assert value(metrics, "perdure_written_blocks_total", tenant="acme", status="stored") == 2
    assert value(metrics, "perdure_written_blocks_total", tenant="acme", status="exists") == 5
    assert value(metrics, "perdure_stored_bytes_total", tenant="acme") == 200, "only what was stored"
    assert value(metrics, "perdure_lookup_blocks_total", tenant="acme") == 10
    assert value(metrics, "perdure_lookup_found_blocks_total", tenant="acme") == 7
    assert value(metrics, "perdure_hit_blocks_total", tenant="acme", tier="disk") is None


def test_latencies_are_histograms_by_verb_and_outcome() -> None:
    metrics = Metrics()
    for seconds in (0.00002, 0.002, 0.2):
        metrics.call("read", "ok", seconds)
    metrics.call("read", "late", 1.0)
    assert value(metrics, "perdure_call_seconds_count", verb="read", outcome="ok") == 3
    assert value(metrics, "perdure_call_seconds_sum", verb="read", outcome="ok") == pytest.approx(0.20202)
    assert value(metrics, "perdure_call_seconds_bucket", verb="read", outcome="ok", le="0.0025") == 2
    assert value(metrics, "perdure_call_seconds_count", verb="read", outcome="late") == 1


def test_tenants_beyond_the_bound_share_a_label() -> None:
    metrics = Metrics()
    bound = limits.metrics_tenants_entries_max
    for number in range(bound + 50):
        metrics.lookups(f"tenant-{number}", 1, 1)
    metrics.lookups("tenant-0", 1, 1)
    assert value(metrics, "perdure_lookup_blocks_total", tenant="tenant-0") == 2
    assert value(metrics, "perdure_lookup_blocks_total", tenant="other") == 50
    assert value(metrics, "perdure_lookup_blocks_total", tenant=f"tenant-{bound}") is None
    text = metrics.render()[0].decode()
    assert text.count("perdure_lookup_blocks_total{") == bound + 1
    assert len(metrics._children) <= 2 * (bound + 1), "tenants without a label must not take memory either"


def test_counting_in_many_threads_loses_nothing() -> None:
    metrics = Metrics()

    def work(number: int) -> None:
        for step in range(500):
            metrics.call("read", "ok", 0.001)
            metrics.blocks("read", f"tenant-{(number + step) % 4}", "memory", "found", 1, 10)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert value(metrics, "perdure_call_seconds_count", verb="read", outcome="ok") == 2000
    hits = [value(metrics, "perdure_hit_blocks_total", tenant=f"tenant-{n}", tier="memory") for n in range(4)]
    assert hits == [500] * 4


def test_gauges_come_from_the_status() -> None:
    metrics = Metrics()
    assert value(metrics, "perdure_status_up") == 0
    metrics.watch(lambda: STATUS)
    assert value(metrics, "perdure_status_up") == 1
    assert value(metrics, "perdure_clients") == 2
    assert value(metrics, "perdure_memory_stranded_bytes") == 64
    assert value(metrics, "perdure_queue_calls") == 3
    assert value(metrics, "perdure_capacity_bytes") == 5000
    assert value(metrics, "perdure_healthy") == 1
    assert value(metrics, "perdure_expiry_paused") == 0
    assert value(metrics, "perdure_catalog_errors_total") == 2
    assert value(metrics, "perdure_background_errors_total") == 0, "absent from the counters is zero"
    assert value(metrics, "perdure_memory_evictions_total") == 5
    assert value(metrics, "perdure_tenant_bytes", tenant="acme") == 77
    assert value(metrics, "perdure_views") is None, "what the status does not say is not made up"


def test_a_status_that_fails_costs_only_the_gauges() -> None:
    metrics = Metrics()

    def broken() -> dict[str, Any]:
        raise OSError("disk")

    metrics.watch(broken)
    metrics.lookups("acme", 1, 1)
    text = metrics.render()[0].decode()
    assert "perdure_status_up 0.0" in text
    assert 'perdure_lookup_blocks_total{tenant="acme"} 1.0' in text


def test_names_follow_the_conventions() -> None:
    metrics = Metrics()
    metrics.watch(lambda: STATUS)
    units = ("bytes", "seconds", "blocks", "segments", "slots", "calls", "keys", "errors", "evictions")
    for family in metrics.registry.collect():
        if family.name.startswith("process_"):
            continue
        assert family.name.startswith("perdure_")
        assert family.documentation
        assert not family.name.endswith(("_ms", "_us", "_mb", "_kb"))
        if family.type == "counter":
            assert family.name.endswith(units) or family.name == "perdure_file_system_full", family.name
    assert not any(name.endswith("_total") for name in GAUGES | COUNTERS)


def test_the_manual_names_every_metric_and_no_other() -> None:
    text = (Path(__file__).parent.parent / "docs" / "operations.md").read_text()
    written = set(re.findall(r"`(perdure_[a-z_]+)`", text))
    metrics = Metrics()
    ending = {"counter": "_total", "info": "_info"}
    made = {family.name + ending.get(family.type, "") for family in metrics.registry.collect()}
    made |= {*GAUGES, *(f"{name}_total" for name in COUNTERS), "perdure_clients", "perdure_tenant_bytes"}
    assert written == {name for name in made if name.startswith("perdure_")}


def test_registries_do_not_share() -> None:
    first, second = Metrics(), Metrics()
    first.lookups("acme", 1, 1)
    assert value(second, "perdure_lookup_blocks_total", tenant="acme") is None


# --- endpoint


@contextmanager
def endpoint(not_ready: Callable[[], str | None] = lambda: None) -> Iterator[tuple[Endpoint, Metrics]]:
    metrics = Metrics()
    serving = Endpoint(metrics, "127.0.0.1", 0, not_ready)
    serving.start()
    try:
        yield serving, metrics
    finally:
        serving.stop()


def ask(serving: Endpoint, request: bytes) -> tuple[int, dict[str, str], str]:
    with socket.create_connection(serving.address, timeout=30) as connection:
        connection.sendall(request)
        raw = b""
        while piece := connection.recv(65536):
            raw += piece
    head, _, body = raw.decode().partition("\r\n\r\n")
    first, *lines = head.split("\r\n")
    return int(first.split()[1]), dict(line.split(": ", 1) for line in lines), body


def get(serving: Endpoint, path: str) -> tuple[int, dict[str, str], str]:
    return ask(serving, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())


def test_scrape() -> None:
    with endpoint() as (serving, metrics):
        metrics.call("read", "ok", 0.001)
        code, headers, body = get(serving, "/metrics?x=1")
        assert code == 200
        assert headers["Content-Type"].startswith("text/plain; version=")
        assert int(headers["Content-Length"]) == len(body.encode())
        assert 'perdure_call_seconds_count{outcome="ok",verb="read"} 1.0' in body


def test_ready_says_why_not_and_alive_does_not_depend_on_it() -> None:
    reason: list[str | None] = ["the disk hangs"]
    with endpoint(lambda: reason[0]) as (serving, _):
        assert get(serving, "/readyz")[::2] == (503, "not ready: the disk hangs\n")
        assert get(serving, "/healthz")[::2] == (200, "alive\n")
        reason[0] = None
        assert get(serving, "/readyz")[::2] == (200, "ready\n")


def test_other_requests_are_refused() -> None:
    with endpoint() as (serving, _):
        assert get(serving, "/")[0] == 404
        assert get(serving, "/metrics/../x")[0] == 404
        assert ask(serving, b"POST /metrics HTTP/1.1\r\n\r\n")[0] == 405
        assert ask(serving, b"\x00\xff\x00\n\n")[0] == 400
        assert ask(serving, b"GET /" + b"a" * (limits.metrics_request_bytes_max - 5))[0] == 431
        code, headers, body = ask(serving, b"HEAD /healthz HTTP/1.0\r\n\r\n")
        assert (code, headers["Content-Length"], body) == (200, "6", "")


def test_silent_clients_take_a_bounded_number_of_threads() -> None:
    with endpoint() as (serving, _):
        silent = [socket.create_connection(serving.address, timeout=30) for _ in range(limits.metrics_threads_max + 4)]
        try:
            assert silent[-1].recv(1) == b"", "one too many is closed at once"
            busy = [thread for thread in threading.enumerate() if thread.name == "perdure-metrics-request"]
            assert len(busy) <= limits.metrics_threads_max
        finally:
            for connection in silent:
                connection.close()
        # their threads end when they are gone: nothing waits for the time limit
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("perdure-metrics")]


def test_stop_ends_requests_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "metrics_request_s", 3600.0)  # or a stop that waits would go unnoticed
    with endpoint() as (serving, _):
        connection = socket.create_connection(serving.address, timeout=30)
        connection.sendall(b"GET /me")
    with connection, contextlib.suppress(ConnectionResetError):  # where the request had not been read yet
        assert connection.recv(1) == b""


def test_a_taken_address_is_a_typed_error() -> None:
    with endpoint() as (serving, _), pytest.raises(ConfigError, match=r"--metrics HOST:PORT"):
        _taken(serving.address[1])


def _taken(port: int) -> None:
    Endpoint(Metrics(), "127.0.0.1", port, lambda: None)


# --- logs


@contextmanager
def logged(form: str, level: str = "info") -> Iterator[io.StringIO]:
    stream = io.StringIO()
    handler = logs.set_up(level, form, stream)
    try:
        yield stream
    finally:
        logs.take_down(handler)


def test_a_json_line_per_event() -> None:
    with logged("json") as stream:
        logs.get("service").info("ready", extra=logs.fields(pid=7, path="a\nb", event="x", ok=True))
        logs.get("service").debug("not shown")
    line = json.loads(stream.getvalue())
    assert stream.getvalue().count("\n") == 1
    assert (line["event"], line["level"], line["logger"]) == ("ready", "info", "service")
    assert (line["pid"], line["path"], line["event_"], line["ok"]) == (7, "a\nb", "x", True)
    assert line["time"].endswith("Z")


def test_a_text_line_per_event() -> None:
    with logged("text") as stream:
        logs.get("service").warning("slow\x1b[31m", extra=logs.fields(why='a "b"\nc', seconds=1.5))
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert "\x1b" not in text
    assert text.rstrip().endswith(r'WARNING service: "slow\u001b[31m" why="a \"b\"\nc" seconds=1.5')


@pytest.mark.parametrize("form", ["json", "text"])
def test_keys_and_contents_are_cut(form: str) -> None:
    key = bytes(range(1, 33))
    with logged(form) as stream:
        logs.get("service").info(f"block {key.hex()}", extra=logs.fields(key=key, hexkey=key.hex(), block=b"x" * 4096))
    text = stream.getvalue()
    assert key[:8].hex() in text
    assert key[:9].hex() not in text
    assert b"x".hex() * 9 not in text
    assert "x" * 9 not in text


def test_errors_carry_their_trace_in_the_line() -> None:
    with logged("json") as stream:
        try:
            raise OSError("disk")
        except OSError:
            logs.get("service").exception("failed")
    line = json.loads(stream.getvalue())
    assert stream.getvalue().count("\n") == 1
    assert line["error"] == "OSError: disk"
    assert "Traceback" in line["trace"]


def test_taking_logs_down_restores_what_was() -> None:
    with logged("json"):
        pass
    root = logging.getLogger("perdure")
    assert not root.handlers
    assert root.propagate
