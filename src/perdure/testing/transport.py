"""What every way to a service must do as its users see it, as a test class to inherit; and a service to try it on.

    class TestMine(TransportConformance):
        def connect(self, service):
            return perdure.connect(service.address("tcp"))

Contract
- The service is a process of its own (`perdure serve`), which the tests stop, kill and replace.
- The verbs' own meaning is the matter of `testing.store.StoreConformance`; here it is bytes, deadlines and ends.
- Nothing is asserted about durations but that calls come back at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from perdure import limits
from perdure.errors import StoreClosed
from perdure.service.client import RemoteStore
from perdure.testing.store import (
    FAILED,
    FOUND,
    LATE,
    MISSING,
    STORED,
    UNTOUCHED,
    WRITE_LATE,
    block_of,
    blocks_of,
    chain,
    keyspace,
    read,
    write,
)

_SERVE = "import sys; from perdure.cli import main; main(['serve', *sys.argv[1:]])"
_WAIT_S = 60.0


class ServiceProcess:
    """`perdure serve` of a directory, ready when made. flags: settings as keyword arguments."""

    def __init__(self, data: Path, **flags: str):
        chosen = {"capacity": "256MiB", "memory": "192MiB", "metrics": ""} | flags
        arguments = [part for key, value in chosen.items() for part in (f"--{key.replace('_', '-')}", value)]
        self.data = data
        self._log = (data.parent / f"{data.name}.log").open("a+")
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, "--data", str(data), *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, stderr=self._log, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        self._start = self._log.tell()
        try:
            self.ready = self._until("ready")
        except BaseException:
            self.end()
            raise

    def _until(self, event: str) -> dict[str, Any]:
        give_up = time.monotonic() + _WAIT_S
        while True:
            self._log.seek(self._start)
            lines = self._log.read().splitlines()
            for line in lines:
                if line.startswith("{") and (found := json.loads(line))["event"] == event:
                    return dict(found)
            if self.process.poll() is not None or time.monotonic() > give_up:
                pytest.fail(f"perdure serve is not {event}: {lines[-1:] or 'it said nothing'}")
            time.sleep(0.01)

    def address(self, kind: str) -> str:
        return f"tcp://{self.ready['listen']}" if kind == "tcp" else f"unix://{self.ready['socket']}"

    def stop(self) -> None:
        """SIGSTOP, and until every thread has."""
        self.process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        until(lambda: {one.read_text().rpartition(")")[2].split()[0] for one in tasks.glob("*/stat")} == {"T"})

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        self.kill()
        self._log.close()

    def __enter__(self) -> ServiceProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def until(condition: Callable[[], bool], seconds: float = _WAIT_S) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > give_up:
            pytest.fail("it did not happen")
        time.sleep(0.01)


class TransportConformance:
    """Override `connect`, and what differs of the rest."""

    flags: ClassVar[dict[str, str]] = {}
    """Settings of the service beyond the suite's own."""
    reads_in_messages = 0
    """How many messages it takes to read blocks that lie in the service's memory."""

    def connect(self, service: ServiceProcess) -> RemoteStore:
        raise NotImplementedError

    # --- what the tests use
    def serve(self, directory: Path) -> ServiceProcess:
        return ServiceProcess(directory, **self.flags)

    @pytest.fixture
    def service(self, tmp_path: Path) -> Iterator[ServiceProcess]:
        with self.serve(tmp_path / "store") as service:
            yield service

    @pytest.fixture
    def client(self, service: ServiceProcess) -> Iterator[RemoteStore]:
        with self.connect(service) as client:
            yield client

    # --- bytes
    @pytest.mark.parametrize("block_bytes", [1, 1000, 4096, 300_000, 3 * limits.MIB + 5])
    def test_blocks_of_every_size_come_back(self, client: RemoteStore, block_bytes: int) -> None:
        space = keyspace(client, block_bytes=block_bytes)
        keys = chain(space, 1, 9)
        assert write(space, keys) == [STORED] * 9
        assert space.lookup(keys) == 9
        assert read(space, keys) == [FOUND] * 9

    def test_a_batch_longer_than_a_message_comes_back(self, client: RemoteStore) -> None:
        count = limits.message_keys_max + 300
        space = keyspace(client, block_bytes=64)
        keys = chain(space, 1, count)
        assert write(space, keys) == [STORED] * count
        assert space.lookup(chain(space, 1, count + 7)) == count
        assert read(space, keys) == [FOUND] * count

    def test_blocks_in_parts_come_back(self, client: RemoteStore) -> None:
        space = keyspace(client, block_bytes=9000)
        keys = chain(space, 1, 5)
        blocks = blocks_of(keys, 9000)
        cuts = [[0, 1, 9000], [0, 4096, 8192, 9000], [0, 9000], [0, 4500, 9000], list(range(0, 9001, 9))]

        def cut_up(rows: Any, cuts: list[list[int]]) -> list[list[Any]]:
            return [[row[a:b] for a, b in pairwise(cut)] for row, cut in zip(rows, cuts, strict=True)]

        assert space.write(keys, cut_up(blocks, cuts)).durable
        target = np.full_like(blocks, UNTOUCHED)
        assert space.read(keys, into=cut_up(target, cuts[::-1])).usable == 5
        assert np.array_equal(target, blocks)

    def test_compressed_blocks_come_back_from_the_disk_and_from_memory(self, tmp_path: Path) -> None:
        with self.serve(tmp_path / "store") as service, self.connect(service) as client:
            space = keyspace(client, block_bytes=65_536, codec="on")
            keys = chain(space, 1, 8)
            blocks = np.repeat(np.arange(8 * 1024, dtype=np.uint8), 64).reshape(8, 65_536)
            report = space.write(keys, blocks)
            assert report.durable
            assert report.stored_bytes < report.bytes / 2
            client.sync()
        with self.serve(tmp_path / "store") as service, self.connect(service) as client:
            space = keyspace(client, block_bytes=65_536, codec="on")
            for from_memory in (0, 8):
                target = np.full_like(blocks, UNTOUCHED)
                until(lambda: space.lookup(keys) == 8)
                read_back = space.read(keys, into=target)
                assert read_back.usable == 8
                assert read_back.from_memory == from_memory
                assert np.array_equal(target, blocks)

    def test_every_block_has_a_status_of_its_own(self, client: RemoteStore) -> None:
        space = keyspace(client)
        keys = chain(space, 1, 8)
        kept = [0, 1, 4, 7]
        write(space, keys[kept])
        expected = [FOUND if at in kept else MISSING for at in range(8)]
        assert read(space, keys) == expected
        assert read(keyspace(client, tenant="another"), keys) != expected
        assert space.lookup(keys) == 2

    def test_what_lies_in_memory_is_read_with_few_messages(self, client: RemoteStore) -> None:
        space = keyspace(client)
        keys = chain(space, 1, 40)
        write(space, keys)
        assert read(space, keys) == [FOUND] * 40
        before = client.transport.messages
        assert read(space, keys) == [FOUND] * 40
        assert client.transport.messages - before == self.reads_in_messages

    def test_many_threads_share_a_client(self, client: RemoteStore) -> None:
        space = keyspace(client)

        def work(number: int) -> None:
            for turn in range(6):
                keys = chain(space, 10 * number + turn, 5)
                assert write(space, keys) == [STORED] * 5
                assert read(space, keys) == [FOUND] * 5
                assert space.lookup(keys) == 5

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(work, range(8)))

    # --- deadlines
    def test_a_stopped_service_makes_calls_late(self, service: ServiceProcess, client: RemoteStore) -> None:
        space = keyspace(client)
        known, unknown = chain(space, 1, 4), chain(space, 2, 3)
        assert write(space, known) == [STORED] * 4
        assert read(space, known) == [FOUND] * 4
        target = np.full((3, 8192), UNTOUCHED, np.uint8)
        service.stop()
        report = space.read(unknown, into=target, deadline_s=0.2)
        assert report.statuses.tolist() == [LATE] * 3
        late = space.write(unknown, blocks_of(unknown), deadline_s=0.2)
        assert late.statuses.tolist() == [WRITE_LATE] * 3
        service.go_on()
        until(lambda: space.write(unknown, blocks_of(unknown)).durable)
        assert report.wait_settled(_WAIT_S)
        assert (target == UNTOUCHED).all()
        assert read(space, known) == [FOUND] * 4
        assert read(space, unknown) == [FOUND] * 3

    def test_a_deadline_that_is_over_delivers_nothing(self, client: RemoteStore) -> None:
        space = keyspace(client)
        keys = chain(space, 1, 3)
        assert space.write(keys, blocks_of(keys), deadline_s=0.0).statuses.tolist() == [WRITE_LATE] * 3
        assert read(space, keys) == [MISSING] * 3

    # --- ends
    def test_a_service_that_was_killed_and_replaced_is_found_again(self, tmp_path: Path) -> None:
        """What was acknowledged is there; the client goes on without being made anew."""
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(self.serve(tmp_path / "store"))
            client = stack.enter_context(self.connect(first))
            space = keyspace(client)
            keys = chain(space, 1, 6)
            assert write(space, keys) == [STORED] * 6
            pin = space.pin(keys, ttl_s=60)
            first.kill()
            target = np.full((6, 8192), UNTOUCHED, np.uint8)
            gone = chain(space, 2, 6)
            begun = space.read(gone, into=target, deadline_s=0.3)
            assert set(begun.statuses.tolist()) <= {MISSING, LATE}
            assert set(space.write(gone, blocks_of(gone), deadline_s=0.3).statuses.tolist()) <= {FAILED, WRITE_LATE}
            assert space.lookup(gone) == 0
            second = stack.enter_context(self.again(first))
            assert second.process.pid != first.process.pid
            assert read(space, keys) == [FOUND] * 6
            assert not pin.release(), "it ended with the service that gave it"

    def again(self, service: ServiceProcess) -> ServiceProcess:
        """A service in the place of one that was killed, at the same address."""
        listen = service.ready["listen"]
        return ServiceProcess(service.data, **(self.flags | ({"listen": listen} if listen else {})))

    def test_pins_and_leases_end_with_the_client(self, service: ServiceProcess, client: RemoteStore) -> None:
        mine = keyspace(client)
        with self.connect(service) as other:
            theirs = keyspace(other)
            theirs.pin(chain(theirs, 1, 4), ttl_s=600)
            lease = theirs.reserve(chain(theirs, 2, 1))
            assert lease is not None
            assert mine.reserve(chain(mine, 2, 1)) is None
            assert client.status()["pins"] == 1
        until(lambda: client.status()["pins"] == 0)
        until(lambda: mine.reserve(chain(mine, 2, 1)) is not None)

    def test_a_pin_ends_at_its_time_while_its_client_stays(self, client: RemoteStore) -> None:
        space = keyspace(client)
        space.pin(chain(space, 1, 4), ttl_s=0.2)
        lasting = space.pin(chain(space, 2, 4), ttl_s=600)
        until(lambda: [one["pins"] for one in client.service_status()["clients"]] == [1])
        until(lambda: client.status()["pins"] == 1)  # released a moment after the client lost it
        assert lasting.release()

    def test_a_forked_child_is_told_to_connect_by_itself(self, client: RemoteStore) -> None:
        space = keyspace(client)
        keys = chain(space, 1, 2)
        write(space, keys)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                space.read(keys, into=bytearray(2 * 8192))
            except StoreClosed:
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert read(space, keys) == [FOUND] * 2

    def test_a_closed_client_says_so(self, service: ServiceProcess) -> None:
        client = self.connect(service)
        space = keyspace(client)
        client.close()
        with pytest.raises(StoreClosed, match="closed"):
            space.read(chain(space, 1, 1), into=bytearray(8192))

    def test_a_damaged_block_is_not_delivered(self, tmp_path: Path) -> None:
        with self.serve(tmp_path / "store") as service, self.connect(service) as client:
            space = keyspace(client)
            keys = chain(space, 1, 5)
            write(space, keys)
            client.sync()
            where = client.explain(keys[2].tobytes())
            path = service.data / where["file"]
        with path.open("r+b") as file:
            file.seek(where["record"]["offset"] + limits.page_bytes + 100)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        with self.serve(tmp_path / "store") as service, self.connect(service) as client:
            space = keyspace(client)
            until(lambda: space.lookup(keys) == 5)
            target = np.full((5, 8192), UNTOUCHED, np.uint8)
            report = space.read(keys, into=target)
            assert [at for at, status in enumerate(report.statuses.tolist()) if status != FOUND] == [2]
            assert report.problems[2]
            assert report.usable == 2
            for at in (0, 1, 3, 4):
                assert target[at].tobytes() == block_of(keys[at].tobytes(), 8192)
            assert (target[2] == UNTOUCHED).all()
