"""The process behind `perdure serve`: settings become a store and a server; signals, readiness, exit.

Contract
- `run` returns 0 after SIGTERM or SIGINT: new calls are refused, running ones get `drain_s`, the store is closed, which
  seals its segments. A second signal ends the process at once, with nothing lost that was acknowledged.
- Ready means that a block was really put and got, at the start and every `limits.probe_period_s`. A probe that hangs
  makes the service not ready; it does not stop it.
- What cannot be started is a typed error, and nothing is left open.
- systemd is told READY=1 and STOPPING=1 where it asked for it (NOTIFY_SOCKET).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from perdure import __version__, limits
from perdure import store as stores
from perdure.admission import Gate
from perdure.errors import ConfigError, PerdureError
from perdure.governance.policy import load
from perdure.keys import KVLayout
from perdure.observe import logs
from perdure.observe.doctor import Subject, pool_bytes_advised, pool_bytes_max
from perdure.observe.endpoint import Endpoint
from perdure.observe.metrics import Metrics
from perdure.segments.landing import BlockStatus
from perdure.service.guard import Guard
from perdure.service.reloading import guard_of
from perdure.service.server import Server, shared_pool
from perdure.service.settings import Settings
from perdure.service.sockets import parse_address

PROBE_TENANT: Final = "perdure-probe"
_PROBE_BYTES: Final = 4096
_HANGUP: Final = 1024  # more than any signal's number
_log = logs.get("service")


class ServerLike(Protocol):
    """What the process needs of `perdure.service.server.Server`."""

    metrics: Metrics | None

    def start(self) -> None: ...

    def stop(self, drain_s: float = 10.0) -> None: ...

    def status(self) -> dict[str, Any]: ...

    @property
    def reload(self) -> Callable[[], Any]: ...


def build_server(store: stores.Store, settings: Settings) -> ServerLike:
    listen = parse_address(settings.listen) if settings.listen else None
    return Server(
        store, socket=settings.socket_path(), clients_max=settings.clients_max, listen=listen, tls=settings.tls_files(),
        guard=build_guard(store, settings),
    )  # fmt: skip


def build_guard(store: stores.Store, settings: Settings) -> Guard | None:
    """Raises PolicyError."""
    if settings.policy is None:
        return None
    return guard_of(store, load(settings.policy), settings.mirror)


def run(
    settings: Settings,
    build: Callable[[stores.Store, Settings], ServerLike] = build_server,
    system: Path = Path("/"),
) -> int:
    """Serve until a signal; the exit status. Call it in the main thread. Raises PerdureError if it cannot start.

    system: where /proc and /sys are."""
    data = settings.store_path()
    sys.setswitchinterval(limits.switch_interval_s)
    place(settings)
    with contextlib.ExitStack() as undo:
        undo.callback(logs.take_down, logs.set_up(settings.log_level, settings.log_format))
        check_memory(settings, system)
        signals = undo.enter_context(_signals())
        _log.info("starting", extra=logs.fields(pid=os.getpid(), data=data, version=__version__))
        store = stores.open(
            data, capacity=settings.capacity, memory=settings.memory, mirror=settings.mirror, codec=settings.codec,
            admission=settings.admission, audit=settings.audit, encryption=settings.encryption, kek=settings.kek,
            catalog=settings.catalog or None, state=settings.state_dir, roots=settings.roots or None,
            cold=settings.cold, cold_capacity=settings.cold_capacity,
            seams=stores.Seams(pool=lambda nbytes: shared_pool(nbytes, huge=settings.hugepages)),
        )  # fmt: skip
        with contextlib.ExitStack() as started:
            started.callback(store.close)
            server = build(store, settings)
            server.metrics = metrics = Metrics()
            started.callback(metrics.watch, None)
            started.callback(server.stop, 0.0)
            probe = Readiness(store, metrics)
            endpoint = _endpoint(settings, metrics, probe.not_ready)
            if endpoint is not None:
                started.callback(endpoint.stop)
            server.start()
            boot = str(server.status().get("boot", ""))
            metrics.describe_build(__version__, boot)
            metrics.watch(server.status)
            if endpoint is not None:
                endpoint.start()
            started.callback(probe.stop)
            probe.start()
            _announce(settings, probe, endpoint, boot, str(server.status().get("listen", "")))
            reason = _wait(signals, server.reload)
            started.pop_all()
        return _end(settings, store, server, metrics, probe, endpoint, reason)


def check_memory(settings: Settings, system: Path = Path("/")) -> None:
    """Refuse a pool that the kernel would end the service for. Raises ConfigError; a system that does not say what it
    has is no reason not to start."""
    try:
        most, why = pool_bytes_max(Subject(settings.store_path(), settings.memory, system=system))
    except (OSError, ValueError, LookupError) as error:
        _log.warning("memory not checked", extra=logs.fields(why=str(error)))
        return
    if settings.memory > most:
        advised = pool_bytes_advised(most) // limits.MIB
        raise ConfigError(
            f"memory={settings.memory}: the pool can have {most} bytes here at most, because {why}; "
            f"write memory={advised}MiB or less, or give the service more memory"
        )


def place(settings: Settings) -> None:
    """Apply `cpus` and `nice` to all threads, those of libraries too; new ones inherit. Raises ConfigError."""
    cpus = settings.cpu_set()
    threads = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    try:
        for thread in threads if cpus else ():
            os.sched_setaffinity(thread, cpus)
    except OSError as error:
        have = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        raise ConfigError(f"cpus={settings.cpus!r}: {error.strerror}; this process may use {have}") from error
    try:
        for thread in threads if settings.nice else ():
            os.setpriority(os.PRIO_PROCESS, thread, settings.nice)
    except OSError as error:
        raise ConfigError(
            f"nice={settings.nice}: {error.strerror}; a negative value needs CAP_SYS_NICE, write 0 or more without it"
        ) from error


def notify(state: str) -> bool:
    """Tell systemd; False where it did not ask."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    name = f"\0{address[1:]}" if address.startswith("@") else address
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as there:
        there.sendto(state.encode(), name)
        return True
    return False


class Readiness:
    """Puts and gets a small block of a reserved tenant again and again, in a thread of its own."""

    def __init__(self, store: stores.Store, metrics: Metrics | None = None):
        layout = KVLayout(block_tokens=1, block_bytes=_PROBE_BYTES, dtype="float32", order="probe")
        self._space = store.keyspace(model=PROBE_TENANT, weights="probe:1", layout=layout, tenant=PROBE_TENANT)
        self._space.audited = False  # it asks itself, six times a minute
        self._space.admission = Gate()  # whether the disk works is no question of value
        self._metrics = metrics
        self._problem: str | None = "no block has been put and got yet"
        self._answered = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="perdure-probe")

    def start(self) -> None:
        """The first probe has been answered, well or badly, when this returns."""
        self.probe()
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def not_ready(self) -> str | None:
        """None if ready, else why not."""
        silent_s = time.monotonic() - self._answered
        if silent_s > limits.probe_period_s + 2 * limits.probe_late_s:
            return f"the probe has not come back for {silent_s:.0f} s"
        return self._problem

    def probe(self) -> str | None:
        """Put a block nobody has seen before, get it, compare. None, or what went wrong."""
        began = time.monotonic()
        try:
            problem = self._attempt()
        except (PerdureError, OSError) as error:
            problem = str(error)
        seconds = time.monotonic() - began
        if problem is None and seconds > 2 * limits.probe_late_s:
            problem = f"put and get took {seconds:.1f} s"
        if (problem is None) != (self._problem is None) or (problem and problem != self._problem):
            _log.log(20 if problem is None else 40, "probe", extra=logs.fields(ok=problem is None, why=problem))
        self._problem, self._answered = problem, time.monotonic()
        if self._metrics is not None:
            self._metrics.probed(problem is None, seconds)
        return problem

    def _attempt(self) -> str | None:
        keys = self._space.chain([secrets.randbelow(2**31)], parent=secrets.token_bytes(limits.key_bytes))
        block = np.frombuffer(secrets.token_bytes(_PROBE_BYTES), np.uint8)
        put = self._space.write(keys, block, ttl_s=limits.probe_ttl_s, deadline_s=limits.probe_late_s)
        if not put.durable:
            return f"a block could not be put: {put.reasons.get(0, 'late')}"
        back = np.zeros(_PROBE_BYTES, np.uint8)
        got = self._space.read(keys, back, deadline_s=limits.probe_late_s)
        if got.usable != 1:
            return f"a block just put is {BlockStatus(int(got.statuses[0])).name.lower()}: {got.problems.get(0, '')}"
        return None if np.array_equal(back, block) else "a block came back with other contents"

    def _work(self) -> None:
        while not self._stop.wait(limits.probe_period_s):
            self.probe()


# --- inside


def _endpoint(settings: Settings, metrics: Metrics, not_ready: Callable[[], str | None]) -> Endpoint | None:
    if not settings.metrics:
        return None
    host, port = parse_address(settings.metrics)
    return Endpoint(metrics, host, port, not_ready)


def _announce(settings: Settings, probe: Readiness, endpoint: Endpoint | None, boot: str, listen: str) -> None:
    problem = probe.not_ready()
    where = "off" if endpoint is None else "{}:{}".format(*endpoint.address)
    place: Path = settings.socket_path()
    _log.log(
        20 if problem is None else 40,
        "ready" if problem is None else "not ready",
        extra=logs.fields(socket=place, listen=listen, metrics=where, pid=os.getpid(), boot=boot, why=problem),
    )
    notify(f"READY=1\nSTATUS={'serving' if problem is None else f'not ready: {problem}'}")


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """A descriptor that can be read when signals came: their sum. A second SIGTERM or SIGINT ends the process at once;
    each SIGHUP counts _HANGUP."""
    wake = os.eventfd(0, os.EFD_CLOEXEC)
    seen = 0

    def handle(number: int, _: Any) -> None:
        nonlocal seen
        seen += number != signal.SIGHUP
        if seen > 1:
            os._exit(128 + number)
        # an Event could be held by the very thread that was interrupted
        os.eventfd_write(wake, _HANGUP if number == signal.SIGHUP else number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield wake
    finally:
        for number, old in before.items():
            signal.signal(number, old)
        os.close(wake)


def _wait(wake: int, reload: Callable[[], Any]) -> str:
    """Until a signal that ends the service."""
    while True:
        count = int.from_bytes(os.read(wake, 8), sys.byteorder)  # goes on after an interruption, unlike eventfd_read
        if count % _HANGUP:
            return signal.Signals(count % _HANGUP).name
        try:
            reload()
        except PerdureError as error:
            _log.error("not reloaded", extra=logs.fields(why=str(error)))


def _end(
    settings: Settings,
    store: stores.Store,
    server: ServerLike,
    metrics: Metrics,
    probe: Readiness,
    endpoint: Endpoint | None,
    reason: str,
) -> int:
    """Drain and close, each step even if another fails."""
    notify("STOPPING=1")
    _log.info("draining", extra=logs.fields(reason=reason, drain_s=settings.drain_s))
    status = 0
    probe_end, endpoint_end = probe.stop, (lambda: None) if endpoint is None else endpoint.stop
    for name, step in (
        ("probe", probe_end),
        ("server", lambda: server.stop(settings.drain_s)),
        ("gauges", lambda: metrics.watch(None)),
        ("endpoint", endpoint_end),
        ("store", store.close),
    ):
        try:
            step()
        except Exception:  # noqa: BLE001 (whatever it is, the store must still be closed)
            status = 1
            _log.exception("could not be ended", extra=logs.fields(part=name))
    _log.info("stopped", extra=logs.fields(status=status))
    return status
