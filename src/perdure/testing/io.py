"""What every namespace of files and every I/O engine must do, as test classes to inherit.

    import pytest
    pytest.register_assert_rewrite("perdure.testing")   # for readable failures; before the import
    from perdure.testing.io import EngineConformance, FilesConformance

    class TestMyFiles(FilesConformance):
        def make(self, directory):               # a namespace whose root is the fresh folder `directory`
            return MyFiles(directory)

    class TestMyEngine(EngineConformance):
        def make_engine(self, gate):             # an engine whose transfers take their places from `gate`
            return MyEngine(gate)

Override the fixture `directory` to run on another file system, `direct` to open files buffered. The suites check what
`io.api` promises. They never assert on elapsed time; waiting is bounded by `PATIENCE_S`, reached only by a failure.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from perdure import limits
from perdure.errors import BufferMismatch, InvalidArgument, StoreClosed
from perdure.io.api import Engine, File, IOClass, IOState, Request, ShortTransfer
from perdure.io.faulty import FaultWhile, FaultyFiles, NthFault
from perdure.io.files import PosixFiles
from perdure.io.gate import DeviceGate
from perdure.io.memory import aligned_buffer
from perdure.testing.io_files import PAGE, filled, pattern
from perdure.testing.io_files import FilesConformance as FilesConformance

PATIENCE_S = 20.0
SOON_S = 0.02  # a deadline that is meant to pass
FILE_BYTES = 64 * PAGE
CAP = 3

RESTORE, WRITE_BACK = IOClass.RESTORE, IOClass.WRITE_BACK


def wait_for(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > give_up:
            pytest.fail("waited in vain")
        time.sleep(0.001)


def write_durably(path: Path, content: bytes) -> None:
    """Without dirty pages: a direct read of those would block, so native AIO leaves it to threads."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


class Calls:
    """Records the calls of `done` and `settle`, in order: ("done" or "settle", context)."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, object]] = []

    def done(self, request: Request) -> None:
        assert request.state in (IOState.DONE, IOState.FAILED)
        self.seen.append(("done", request.context))

    def settle(self, context: object) -> Callable[[], None]:
        return lambda: self.seen.append(("settle", context))


class EngineConformance:
    """Inherit, and define `make_engine`. Files are PosixFiles, wrapped by FaultyFiles where something must fail."""

    direct = True

    def make_engine(self, gate: DeviceGate) -> Engine:
        raise NotImplementedError

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        return tmp_path

    @pytest.fixture
    def gate(self) -> DeviceGate:
        return DeviceGate(CAP)

    @pytest.fixture
    def engine(self, gate: DeviceGate) -> Iterator[Engine]:
        engine = self.make_engine(gate)
        yield engine
        wait_for(lambda: engine.unsettled() == 0)
        engine.close()

    @pytest.fixture
    def content(self) -> bytes:
        return pattern(FILE_BYTES)

    @pytest.fixture
    def files(self, directory: Path, content: bytes) -> PosixFiles:
        write_durably(directory / "data", content)
        return PosixFiles(directory)

    @pytest.fixture
    def file(self, files: PosixFiles) -> Iterator[File]:
        file = files.open("data", direct=self.direct, write=True)
        yield file
        file.close()

    def faulty(self, files: PosixFiles, plan: NthFault | FaultWhile) -> File:
        return FaultyFiles(files, plan).open("data", direct=self.direct, write=True)

    # --- bytes

    def test_empty_batch(self, engine: Engine) -> None:
        engine.run([], io_class=RESTORE)

    @pytest.mark.parametrize("count", [1, 2, 50])
    def test_reads_deliver_the_files_bytes(
        self, engine: Engine, gate: DeviceGate, file: File, content: bytes, count: int
    ) -> None:
        rng = random.Random(count)
        requests = []
        for _ in range(count):
            sizes = [PAGE * rng.randint(1, 4) for _ in range(rng.randint(1, 3))]
            memory = aligned_buffer(sum(sizes))
            memory[:] = 1
            cuts = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
            buffers = [memory.data[start:end] for start, end in pairwise(cuts)]
            offset = PAGE * rng.randint(0, (FILE_BYTES - sum(sizes)) // PAGE)
            requests.append(Request(file, offset, buffers, context=memory))
        engine.run(requests, io_class=RESTORE, deadline=time.monotonic() + PATIENCE_S)
        for request in requests:
            assert request.state is IOState.DONE
            assert request.error is None
            assert b"".join(request.buffers) == content[request.offset : request.offset + request.nbytes]
        assert gate.peak(file.device) <= CAP
        assert gate.inflight(file.device) == 0

    def test_unaligned_memory_offsets_and_lengths(self, engine: Engine, file: File, content: bytes) -> None:
        aligned = aligned_buffer(PAGE)
        odd = [bytearray(size + 1) for size in (1, 511, 513, PAGE, 3 * PAGE + 7)]
        requests = [Request(file, 37 * index, [memoryview(memory)[1:]]) for index, memory in enumerate(odd)]
        requests += [Request(file, PAGE, [aligned.data]), Request(file, 0, []), Request(file, 0, [aligned.data[:0]])]
        engine.run(requests, io_class=RESTORE)
        for request in requests:
            assert request.state is IOState.DONE
            assert b"".join(request.buffers) == content[request.offset : request.offset + request.nbytes]

    def test_writes_arrive(self, engine: Engine, files: PosixFiles, file: File) -> None:
        memory = filled(FILE_BYTES, seed=1)
        step = 2 * PAGE
        requests = [
            Request(
                file, at, [memory.data[at : at + PAGE], memory.data[at + PAGE : at + step].toreadonly()], write=True
            )
            for at in range(0, FILE_BYTES, step)
        ]
        engine.run(requests, io_class=WRITE_BACK)
        assert {request.state for request in requests} == {IOState.DONE}
        assert files.read("data") == memory.tobytes()

    # --- failures of single requests

    def test_end_of_file_is_a_failure_of_that_request(self, engine: Engine, file: File, content: bytes) -> None:
        calls = Calls()
        memory = aligned_buffer(6 * PAGE).data
        odd = memoryview(bytearray(201))
        beyond = [
            Request(file, FILE_BYTES - 100, [odd[1:]], context="unaligned across"),
            Request(file, FILE_BYTES - PAGE, [memory[: 2 * PAGE]], context="across"),
            Request(file, FILE_BYTES, [memory[2 * PAGE : 3 * PAGE]], context="at the end"),
            Request(file, FILE_BYTES + 64 * PAGE, [memory[3 * PAGE : 4 * PAGE]], context="far beyond"),
        ]
        good = Request(file, 0, [memory[4 * PAGE :]], context="inside")
        engine.run([*beyond, good], io_class=RESTORE, done=calls.done)
        for request in beyond:
            assert request.state is IOState.FAILED
            assert isinstance(request.error, ShortTransfer)
        assert good.state is IOState.DONE
        assert good.buffers[0] == content[: 2 * PAGE]
        assert len(calls.seen) == 5

    def test_single_read_past_the_end(self, engine: Engine, file: File) -> None:
        request = Request(file, FILE_BYTES - PAGE, [aligned_buffer(2 * PAGE).data])
        engine.run([request], io_class=RESTORE)
        assert isinstance(request.error, ShortTransfer)

    @pytest.mark.parametrize("n", [1, 2, 3])
    def test_short_transfers_are_continued(self, engine: Engine, files: PosixFiles, content: bytes, n: int) -> None:
        file = self.faulty(files, NthFault(n, "short"))
        memory = aligned_buffer(16 * PAGE)
        requests = [
            Request(file, 8 * PAGE * index, [memory.data[at : at + PAGE], memory.data[at + PAGE : at + 8 * PAGE]])
            for index, at in enumerate((0, 8 * PAGE))
        ]
        engine.run(requests, io_class=RESTORE)
        assert {request.state for request in requests} == {IOState.DONE}
        assert memory.tobytes() == content[: 16 * PAGE]
        file.close()

    def test_short_writes_are_continued(self, engine: Engine, files: PosixFiles) -> None:
        file = self.faulty(files, NthFault(1, "short"))
        memory = filled(8 * PAGE, seed=2)
        request = Request(file, 0, [memory.data[:PAGE], memory.data[PAGE:]], write=True)
        engine.run([request], io_class=WRITE_BACK)
        assert request.state is IOState.DONE
        assert files.read("data")[: 8 * PAGE] == memory.tobytes()
        file.close()

    @pytest.mark.parametrize("write", [False, True])
    def test_a_device_that_moves_less_and_less_is_a_failure(
        self, engine: Engine, files: PosixFiles, write: bool
    ) -> None:
        file = self.faulty(files, NthFault(1, "short", once=False))
        request = Request(file, 0, [aligned_buffer(8 * PAGE).data], write=write)
        engine.run([request], io_class=RESTORE)
        assert request.state is IOState.FAILED
        assert isinstance(request.error, ShortTransfer)
        file.close()

    def test_an_error_fails_its_request_only(self, engine: Engine, files: PosixFiles) -> None:
        plan = NthFault(4, "eio")
        file = self.faulty(files, plan)
        requests = [Request(file, index * PAGE, [aligned_buffer(PAGE).data]) for index in range(8)]
        engine.run(requests, io_class=RESTORE)
        failed = [request for request in requests if request.state is IOState.FAILED]
        assert [request.error.errno for request in failed if request.error] == [5]
        assert sum(request.state is IOState.DONE for request in requests) == 7
        file.close()

    # --- refusals

    def test_unusable_batches_are_refused_before_any_byte(self, engine: Engine, files: PosixFiles) -> None:
        plan = NthFault(0, "eio", ops=["preadv", "pwritev"])
        file = self.faulty(files, plan)
        good = Request(file, 0, [aligned_buffer(PAGE).data])
        page = aligned_buffer(PAGE).data
        ran = Request(file, 0, [page])
        ran.state = IOState.DONE
        for bad, error in [
            (Request(file, 0, [page[:1]] * (limits.io_vectors_max + 1)), InvalidArgument),
            (Request(file, -1, [page]), InvalidArgument),
            (ran, InvalidArgument),
            (Request(file, 0, [page.toreadonly()]), BufferMismatch),
            (Request(file, 0, [page[::2]]), BufferMismatch),
            (Request(file, 0, [page.cast("I")]), BufferMismatch),
        ]:
            with pytest.raises(error):
                engine.run([good, bad], io_class=RESTORE)
        assert good.state is IOState.PENDING
        assert plan.count == 0
        file.close()

    def test_as_many_buffers_as_the_system_takes(self, engine: Engine, file: File, content: bytes) -> None:
        part = 512
        memory = aligned_buffer(2 * part * limits.io_vectors_max).data
        buffers = [memory[2 * part * at : 2 * part * at + part] for at in range(FILE_BYTES // part)]
        requests = [Request(file, 0, buffers), Request(file, 0, [aligned_buffer(1).data] * limits.io_vectors_max)]
        engine.run(requests, io_class=RESTORE)
        assert [request.state for request in requests] == [IOState.DONE, IOState.DONE]
        assert b"".join(buffers) == content

    def test_closed_engine_refuses(self, gate: DeviceGate, file: File) -> None:
        engine = self.make_engine(gate)
        engine.run([Request(file, 0, [aligned_buffer(PAGE).data])], io_class=RESTORE)
        engine.close()
        engine.close()
        with pytest.raises(StoreClosed):
            engine.run([Request(file, 0, [aligned_buffer(PAGE).data])], io_class=RESTORE)

    # --- hooks

    @pytest.mark.parametrize("count", [1, 20])
    def test_done_then_settle_once_per_request(self, engine: Engine, file: File, count: int) -> None:
        calls = Calls()
        requests = [
            Request(file, at * PAGE, [aligned_buffer(PAGE).data], context=at, settle=calls.settle(at))
            for at in range(count)
        ]
        engine.run(requests, io_class=RESTORE, done=calls.done)
        for at in range(count):
            assert [what for what, context in calls.seen if context == at] == ["done", "settle"]

    @pytest.mark.parametrize("count", [1, 12])
    def test_exceptions_of_done_come_after_the_batch(self, engine: Engine, file: File, count: int) -> None:
        calls = Calls()
        requests = [
            Request(file, at * PAGE, [aligned_buffer(PAGE).data], context=at, settle=calls.settle(at))
            for at in range(count)
        ]

        def done(request: Request) -> None:
            calls.done(request)
            raise LookupError(request.context)

        with pytest.raises(LookupError):
            engine.run(requests, io_class=RESTORE, done=done)
        assert {request.state for request in requests} == {IOState.DONE}
        assert sorted(calls.seen, key=str) == sorted(
            ((what, at) for what in ("done", "settle") for at in range(count)), key=str
        )

    # --- deadlines

    def test_late_request_settles_when_the_device_lets_go(
        self, engine: Engine, gate: DeviceGate, files: PosixFiles, file: File, content: bytes
    ) -> None:
        plan = FaultWhile("hang", ops=["preadv"])
        slow = self.faulty(files, plan)
        calls = Calls()
        memory = aligned_buffer(2 * PAGE)
        memory[:] = 9
        late = Request(slow, 0, [memory.data[:PAGE]], context="late", settle=calls.settle("late"))
        good = Request(file, PAGE, [memory.data[PAGE:]], context="good", settle=calls.settle("good"))
        engine.run([late, good], io_class=RESTORE, deadline=time.monotonic() + 10 * SOON_S, done=calls.done)
        assert late.state is IOState.LATE
        assert good.state is IOState.DONE
        assert calls.seen == [("done", "good"), ("settle", "good")]
        assert memory[:PAGE].tobytes() == b"\x09" * PAGE
        assert engine.unsettled() == 1
        assert gate.inflight(slow.device) == 1
        plan.resume()
        wait_for(lambda: engine.unsettled() == 0)
        assert calls.seen[2:] == [("settle", "late")]
        assert late.state is IOState.LATE
        assert gate.inflight(slow.device) == 0
        slow.close()

    @pytest.mark.parametrize("count", [1, 5])
    def test_nothing_runs_after_its_deadline(self, engine: Engine, files: PosixFiles, count: int) -> None:
        plan = NthFault(0, "eio", ops=["preadv"])
        counted = self.faulty(files, plan)
        plain = files.open("data", direct=self.direct)
        for file in (counted, plain):
            calls = Calls()
            requests = [
                Request(file, 0, [aligned_buffer(PAGE).data], context=at, settle=calls.settle(at))
                for at in range(count)
            ]
            engine.run(requests, io_class=RESTORE, deadline=time.monotonic() - 1.0, done=calls.done)
            assert {request.state for request in requests} == {IOState.LATE}
            assert sorted(calls.seen, key=str) == [("settle", at) for at in range(count)]
            assert not any(any(request.buffers[0]) for request in requests)
            file.close()
        assert plan.count == 0
        assert engine.unsettled() == 0

    def test_queued_requests_of_an_expired_batch_are_dropped(
        self, engine: Engine, gate: DeviceGate, files: PosixFiles, file: File
    ) -> None:
        """A hung device: every later batch ends LATE in time, and nothing of it is executed or stays queued."""
        plan = FaultWhile("hang", ops=["preadv"])
        slow = self.faulty(files, plan)
        hung = [Request(slow, 0, [aligned_buffer(PAGE).data]) for _ in range(CAP)]
        engine.run(hung, io_class=RESTORE, deadline=time.monotonic() + 5 * SOON_S)
        for victim in (slow, file, slow):
            calls = Calls()
            requests = [
                Request(victim, 0, [aligned_buffer(PAGE).data], context=at, settle=calls.settle(at)) for at in range(4)
            ]
            engine.run(requests, io_class=RESTORE, deadline=time.monotonic() + SOON_S, done=calls.done)
            assert {request.state for request in requests} == {IOState.LATE}
            assert sorted(calls.seen, key=str) == [("settle", at) for at in range(4)]
            assert gate.waiting(slow.device) == 0
        plan.resume()
        wait_for(lambda: engine.unsettled() == 0)
        assert plan.count == CAP
        again = Request(file, 0, [aligned_buffer(PAGE).data])
        engine.run([again], io_class=RESTORE, deadline=time.monotonic() + PATIENCE_S)
        assert again.state is IOState.DONE
        assert gate.inflight(file.device) == 0
        slow.close()

    # --- places

    def test_restores_go_before_write_back(self, directory: Path, files: PosixFiles) -> None:
        gate = DeviceGate(1)
        engine = self.make_engine(gate)
        plan = FaultWhile("hang", ops=["preadv", "pwritev"])
        file = self.faulty(files, plan)
        with ThreadPoolExecutor(4) as pool:

            def start(nbytes: int, io_class: IOClass, waiting: int) -> None:
                request = Request(file, 0, [aligned_buffer(nbytes).data], write=io_class is WRITE_BACK)
                pool.submit(engine.run, [request], io_class=io_class)
                if waiting:
                    wait_for(lambda: gate.waiting(file.device) == waiting)
                else:
                    plan.wait_until_hanging()

            start(1 * PAGE, WRITE_BACK, 0)
            start(2 * PAGE, WRITE_BACK, 1)
            start(3 * PAGE, RESTORE, 2)
            start(4 * PAGE, RESTORE, 3)
            plan.resume()
        assert [nbytes // PAGE for _, _, nbytes in plan.log] == [1, 3, 4, 2]
        assert gate.peak(file.device) == 1
        engine.close()
        file.close()

    def test_the_cap_holds(self, engine: Engine, gate: DeviceGate, files: PosixFiles) -> None:
        plan = FaultWhile("hang", ops=["preadv"])
        file = self.faulty(files, plan)
        requests = [Request(file, at * PAGE, [aligned_buffer(PAGE).data]) for at in range(10)]
        with ThreadPoolExecutor(1) as pool:
            pool.submit(engine.run, requests, io_class=RESTORE)
            for _ in range(CAP):
                plan.wait_until_hanging()
            wait_for(lambda: gate.waiting(file.device) == 10 - CAP)
            assert plan.count == CAP
            plan.resume()
        assert {request.state for request in requests} == {IOState.DONE}
        assert gate.peak(file.device) == CAP
        file.close()

    def test_many_threads(
        self, engine: Engine, gate: DeviceGate, file: File, files: PosixFiles, content: bytes
    ) -> None:
        """Mixed batches (native, wrapped, unaligned) of eight callers at once: right bytes, one cap for all."""
        wrapped = self.faulty(files, NthFault(0, "eio"))
        barrier = threading.Barrier(8)

        def work(seed: int) -> None:
            rng = random.Random(seed)
            barrier.wait()
            for _ in range(20):
                requests = []
                for at in range(6):
                    memory = aligned_buffer(3 * PAGE).data[at % 2 : 2 * PAGE + at % 2]
                    requests.append(Request((file, wrapped)[at // 3], PAGE * rng.randint(0, 62), [memory]))
                engine.run(requests, io_class=RESTORE, deadline=time.monotonic() + PATIENCE_S)
                for request in requests:
                    assert request.state is IOState.DONE
                    assert request.buffers[0] == content[request.offset : request.offset + 2 * PAGE]

        with ThreadPoolExecutor(8) as pool:
            for future in [pool.submit(work, seed) for seed in range(8)]:
                future.result(PATIENCE_S)
        assert gate.peak(file.device) <= CAP
        assert gate.inflight(file.device) == 0
        wrapped.close()
