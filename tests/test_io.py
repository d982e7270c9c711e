"""The I/O layer: memory, files, the gate, both engines on disk and in memory, and the siblings that misbehave.

The bulk is the public conformance suite; what is here beside it needs the inside of one implementation.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import select
import shutil
import struct
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from perdure import limits
from perdure.errors import InvalidArgument, StoreClosed, StorePathError
from perdure.io.aio import AioEngine, default_engine
from perdure.io.aio_context import AioContext
from perdure.io.api import Engine, File, Files, IOClass, IOState, Request, ShortTransfer
from perdure.io.engine import ThreadEngine
from perdure.io.files import TEMPORARY_SUFFIX, PosixFiles
from perdure.io.gate import DeviceGate, Ticket
from perdure.io.memory import Scratch, address, aligned_buffer, is_aligned
from perdure.io.siblings import FaultWhile, FaultyFiles, NoopFiles, NthFault, ThrottledFiles
from perdure.testing.io import PATIENCE_S, SOON_S, Calls, EngineConformance, FilesConformance, wait_for, write_durably
from perdure.testing.io_files import PAGE, filled, pattern

RESTORE, WRITE_BACK = IOClass.RESTORE, IOClass.WRITE_BACK
SHM = Path("/dev/shm")

needs_aio = pytest.mark.skipif(not AioEngine.available(), reason="no native AIO in this kernel or sandbox")


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    if not os.access(SHM, os.W_OK):
        pytest.skip("no writable /dev/shm")
    directory = Path(tempfile.mkdtemp(prefix="test-io-", dir=SHM))  # not `perdure`: a test beside this one may look now
    yield directory
    shutil.rmtree(directory)


# --- conformance ------------------------------------------------------------------------------------------------


class InSharedMemory:
    @pytest.fixture
    def directory(self, shared_memory: Path) -> Path:
        return shared_memory


class TestThreadsDirect(EngineConformance):
    def make_engine(self, gate: DeviceGate) -> Engine:
        return ThreadEngine(gate)


class TestThreadsBuffered(TestThreadsDirect):
    direct = False


class TestThreadsInMemory(InSharedMemory, TestThreadsDirect):
    pass


@needs_aio
class TestAioDirect(EngineConformance):
    def make_engine(self, gate: DeviceGate) -> Engine:
        return AioEngine(gate)


class TestAioBuffered(TestAioDirect):
    direct = False


class TestAioInMemory(InSharedMemory, TestAioDirect):
    pass


class TestPosixDirect(FilesConformance):
    def make(self, directory: Path) -> Files:
        return PosixFiles(directory)


class TestPosixBuffered(TestPosixDirect):
    direct = False


class TestPosixInMemory(InSharedMemory, TestPosixDirect):
    pass


class TestNoop(FilesConformance):
    keeps_data = False

    def make(self, directory: Path) -> Files:
        return NoopFiles()


class TestThrottled(FilesConformance):
    def make(self, directory: Path) -> Files:
        return ThrottledFiles(PosixFiles(directory), 1e12, 1e12)


class TestFaultyWithoutFaults(FilesConformance):
    def make(self, directory: Path) -> Files:
        return FaultyFiles(PosixFiles(directory), NthFault(0, "eio"))


# --- memory -----------------------------------------------------------------------------------------------------


class TestMemory:
    @pytest.mark.parametrize("nbytes", [0, 1, 511, PAGE, PAGE + 1, limits.MIB])
    def test_buffers_are_page_aligned_zeroed_and_writable(self, nbytes: int) -> None:
        memory = aligned_buffer(nbytes)
        assert memory.shape == (nbytes,)
        assert memory.dtype == np.uint8
        assert not memory.any()
        assert memory.ctypes.data % PAGE == 0
        memory[:] = 255

    def test_a_forked_child_does_not_share_it(self) -> None:
        memory = aligned_buffer(PAGE)
        child = os.fork()
        if not child:
            memory[:] = 7
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert not memory.any()

    def test_negative_size(self) -> None:
        with pytest.raises(InvalidArgument):
            aligned_buffer(-1)
        with pytest.raises(InvalidArgument):
            Scratch().take(-1)

    @pytest.mark.parametrize("readonly", [False, True])
    def test_address_and_alignment(self, readonly: bool) -> None:
        memory = aligned_buffer(4 * PAGE)
        view = memory.data.toreadonly() if readonly else memory.data
        start = memory.ctypes.data
        for first, last, by_512, by_4096 in [
            (0, PAGE, True, True),
            (512, 1024, True, False),
            (0, 512, True, False),
            (1, 513, False, False),
            (PAGE, PAGE + 1, False, False),
        ]:
            assert address(view[first:last]) == start + first
            assert is_aligned(view[first:last], 512) is by_512
            assert is_aligned(view[first:last], 4096) is by_4096
        assert is_aligned(view[1:1], 4096)


class TestScratch:
    def test_buffers_are_reused_by_size_class(self) -> None:
        scratch = Scratch()
        first = scratch.take(PAGE + 1)
        assert first.view.nbytes == PAGE + 1
        assert address(first.view) % PAGE == 0
        at = address(first.view)
        first.give_back()
        assert scratch.idle_bytes == 2 * PAGE
        second = scratch.take(2 * PAGE)
        assert address(second.view) == at
        assert scratch.take(2 * PAGE).view.nbytes == 2 * PAGE
        assert (scratch.allocated, scratch.taken, scratch.idle_bytes) == (2, 2, 0)

    def test_giving_back_twice_does_not_hand_it_out_twice(self) -> None:
        scratch = Scratch()
        lease = scratch.take(10)
        lease.give_back()
        lease.give_back()
        assert scratch.taken == 0
        first, second = scratch.take(10), scratch.take(10)
        assert address(first.view) != address(second.view)

    def test_view_is_dead_after_give_back(self) -> None:
        lease = Scratch().take(10)
        view = lease.view
        lease.give_back()
        with pytest.raises(ValueError, match="released"):
            view[0] = 1

    def test_memory_someone_still_uses_is_not_reused(self) -> None:
        scratch = Scratch()
        lease = scratch.take(PAGE)
        kept = struct.iter_unpack("<Q", lease.view)
        lease.give_back()
        assert (scratch.taken, scratch.idle_bytes) == (0, 0)
        other = scratch.take(PAGE)
        other.view[:] = b"\x01" * PAGE
        assert not any(number for (number,) in kept)

    def test_idle_bytes_are_bounded(self) -> None:
        scratch = Scratch(idle_bytes_max=3 * PAGE)
        leases = [scratch.take(PAGE) for _ in range(5)] + [scratch.take(2 * PAGE)]
        for lease in leases:
            lease.give_back()
        assert scratch.idle_bytes == 3 * PAGE

    def test_threads_never_share_a_buffer(self) -> None:
        scratch = Scratch()

        def work(mark: int) -> None:
            for _ in range(300):
                lease = scratch.take(64)
                lease.view[:] = bytes([mark]) * 64
                time.sleep(0)
                assert bytes(lease.view) == bytes([mark]) * 64
                lease.give_back()

        with ThreadPoolExecutor(8) as pool:
            for future in [pool.submit(work, mark) for mark in range(8)]:
                future.result()
        assert scratch.taken == 0
        assert scratch.allocated <= 8


# --- files ------------------------------------------------------------------------------------------------------


class TestPosixFiles:
    @pytest.mark.parametrize("kind", ["missing", "file"])
    def test_unusable_root(self, tmp_path: Path, kind: str) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(StorePathError, match=kind):
            PosixFiles(tmp_path / kind)

    def test_probing_leaves_nothing(self, tmp_path: Path) -> None:
        files = PosixFiles(tmp_path)
        assert files.memory_alignment in (512, 4096)
        assert list(tmp_path.iterdir()) == []

    def test_read_only_root_opens_files(self) -> None:
        """A file system that allows nothing and refuses O_DIRECT at open: /proc."""
        files = PosixFiles("/proc/self")
        file = files.open("status")
        assert not file.direct
        memory = aligned_buffer(PAGE)
        assert file.preadv([memory.data], 0) > 0
        assert memory[:5].tobytes() == b"Name:"
        file.close()

    def test_refused_direct_io_falls_back_to_buffered(self, tmp_path: Path) -> None:
        def opener(path: str, flags: int, mode: int) -> int:
            if flags & os.O_DIRECT and not flags & os.O_TMPFILE:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return os.open(path, flags, mode)

        files = PosixFiles(tmp_path, opener=opener)
        file = files.create("one")
        assert not file.direct
        assert file.pwritev([memoryview(b"abc")], 1) == 3
        file.close()
        assert files.read("one") == b"\0abc"

    def test_direct_io_that_is_taken_at_open_and_refused_later(self, tmp_path: Path) -> None:
        calls = []
        refuses_transfers = select.epoll()

        def opener(path: str, flags: int, mode: int) -> int:
            calls.append(flags)
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                return os.dup(refuses_transfers.fileno())
            return os.open(path, flags, mode)

        files = PosixFiles(tmp_path, opener=opener)
        assert not files.direct
        file = files.create("one")
        assert not file.direct
        assert not any(flags & os.O_DIRECT for flags in calls[1:])
        file.close()

    def test_write_of_an_odd_length_leaves_direct_io(self, tmp_path: Path) -> None:
        files = PosixFiles(tmp_path)
        file = files.create("one")
        if not file.direct:
            pytest.skip("no direct I/O here")
        memory = filled(2 * PAGE)
        assert file.pwritev([memory.data[:PAGE]], 0) == PAGE
        assert file.direct
        file.pwritev([memory.data[PAGE : PAGE + 100]], PAGE)
        if os.statvfs(tmp_path).f_bsize and files.memory_alignment == 512 and file.direct:
            pytest.skip("a file system that takes any direct write")
        assert not file.direct
        file.close()
        assert files.read("one") == memory[: PAGE + 100].tobytes()

    def test_symbolic_links_are_not_followed_out(self, tmp_path: Path) -> None:
        (tmp_path / "root").mkdir()
        (tmp_path / "secret").write_bytes(b"secret")
        (tmp_path / "root" / "link").symlink_to(tmp_path / "secret")
        files = PosixFiles(tmp_path / "root")
        for use in (lambda: files.open("link"), lambda: files.read("link"), lambda: files.create("link")):
            with pytest.raises(OSError, match=r"symbolic|exists"):
                use()
        assert not files.write_once("link", b"other")
        assert (tmp_path / "secret").read_bytes() == b"secret"

    @pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP])
    def test_write_once_without_hard_links(self, tmp_path: Path, code: int) -> None:
        def linker(source: str, target: str) -> None:
            raise OSError(code, os.strerror(code))

        files = PosixFiles(tmp_path, linker=linker)
        assert files.write_once("index", b"first")
        assert not files.write_once("index", b"second")
        assert files.read("index") == b"first"
        assert files.list("") == ["index"]

    def test_write_once_that_fails_leaves_nothing(self, tmp_path: Path) -> None:
        def linker(source: str, target: str) -> None:
            assert source.startswith(f"{target}.")
            assert source.endswith(TEMPORARY_SUFFIX)
            assert Path(source).read_bytes() == b"data"
            raise OSError(errno.EIO, "link")

        files = PosixFiles(tmp_path, linker=linker)
        with pytest.raises(OSError, match="link"):
            files.write_once("index", b"data")
        assert files.list("") == []

    def test_closed_file_never_reaches_another_one(self, tmp_path: Path) -> None:
        """A transfer that comes after close fails, even when a file opened since could have got the same number."""
        files = PosixFiles(tmp_path)
        first = files.create("first")
        descriptor = first.fileno()
        first.close()
        first.close()
        others = [files.create(f"other{index}") for index in range(8)]
        assert descriptor not in [file.fileno() for file in others]
        page = filled(PAGE).data
        for transfer in (first.pwritev, first.preadv):
            with pytest.raises(OSError, match="Bad file descriptor"):
                transfer([page], 0)
        assert all(file.size() == 0 for file in others)
        request = Request(first, 0, [page])
        engine = default_engine()
        engine.run([request], io_class=RESTORE)
        assert request.error is not None
        assert request.error.errno == errno.EBADF
        engine.close()
        for file in others:
            file.close()

    def test_descriptors_end_with_their_files(self, tmp_path: Path) -> None:
        files = PosixFiles(tmp_path)
        numbers = []
        for name in "abc":
            file = files.create(name)
            numbers.append(file.fileno())
            file.close()
        numbers.append(files.create("d").fileno())  # forgotten, not closed
        del file
        for number in numbers:
            with contextlib.suppress(OSError):
                assert not os.readlink(f"/proc/self/fd/{number}").startswith(str(tmp_path))
        assert len(set(numbers)) < len(numbers)  # the numbers of files that are gone were used again

    def test_descriptors_are_not_inherited(self, tmp_path: Path) -> None:
        file = PosixFiles(tmp_path).create("one")
        assert not os.get_inheritable(file.fileno())
        file.close()
        assert not os.get_inheritable(file.fileno())

    def test_allocation_beyond_the_disk_is_refused_at_once(self, tmp_path: Path) -> None:
        files = PosixFiles(tmp_path)
        file = files.create("one")
        with pytest.raises(OSError) as caught:  # noqa: PT011 - which one depends on the file system
            file.allocate(0, 1 << 60)
        assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
        file.close()


# --- the gate ---------------------------------------------------------------------------------------------------


class Wish(Ticket):
    def __init__(self, gate: DeviceGate, io_class: IOClass, log: list[Wish], accepts: bool = True):
        super().__init__(1, io_class)
        self.log, self.accepts = log, accepts
        gate.submit(self)

    def granted(self) -> bool:
        self.log.append(self)
        return self.accepts


class TestGate:
    def test_order_and_cap(self) -> None:
        gate, log = DeviceGate(2), list[Wish]()
        classes = [WRITE_BACK, WRITE_BACK, WRITE_BACK, RESTORE, WRITE_BACK, RESTORE]
        wishes = [Wish(gate, io_class, log) for io_class in classes]
        assert log == wishes[:2]
        assert gate.waiting(1) == 4
        for _ in range(6):
            gate.release(1)
        assert [wishes.index(wish) for wish in log] == [0, 1, 3, 5, 2, 4]
        assert (gate.inflight(1), gate.peak(1), gate.waiting(1)) == (0, 2, 0)

    def test_devices_do_not_share_places(self) -> None:
        gate = DeviceGate(1)
        assert gate.try_acquire(1)
        assert not gate.try_acquire(1)
        assert gate.try_acquire(2)

    def test_withdrawn_and_refusing_tickets_lose_no_place(self) -> None:
        gate, log = DeviceGate(1), list[Wish]()
        assert gate.try_acquire(1)
        withdrawn = Wish(gate, RESTORE, log)
        refusing = [Wish(gate, RESTORE, log, accepts=False) for _ in range(3000)]  # too many for recursion
        last = Wish(gate, WRITE_BACK, log)
        assert gate.withdraw(withdrawn)
        assert not gate.withdraw(withdrawn)
        gate.release(1)
        assert log == [*refusing, last]
        assert not gate.withdraw(last)
        gate.release(1)
        assert gate.inflight(1) == 0
        assert Wish(gate, RESTORE, log, accepts=False) is log[-1]
        assert gate.inflight(1) == 0

    def test_acquire_waits_in_turn_and_gives_up(self) -> None:
        gate = DeviceGate(1)
        assert gate.acquire(1, RESTORE)
        assert not gate.acquire(1, RESTORE, time.monotonic() + SOON_S)
        assert gate.waiting(1) == 0
        with ThreadPoolExecutor(1) as pool:
            came = pool.submit(gate.acquire, 1, WRITE_BACK, time.monotonic() + PATIENCE_S)
            wait_for(lambda: gate.waiting(1) == 1)
            assert gate.must_pass_on(1, WRITE_BACK)
            assert not gate.must_pass_on(1, RESTORE)
            gate.release(1)
            assert came.result()
        assert gate.inflight(1) == 1

    def test_cap_is_positive(self) -> None:
        with pytest.raises(InvalidArgument):
            DeviceGate(0)


# --- engines ----------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Iterator[File]:
    write_durably(tmp_path / "data", pattern(64 * PAGE))
    file = PosixFiles(tmp_path).open("data")
    yield file
    file.close()


def reads(file: File, count: int, pages: int = 1) -> list[Request]:
    return [Request(file, at * pages * PAGE, [aligned_buffer(pages * PAGE).data]) for at in range(count)]


def assert_right(requests: list[Request]) -> None:
    content = pattern(64 * PAGE)
    for request in requests:
        assert request.state is IOState.DONE, request.error
        assert b"".join(request.buffers) == content[request.offset : request.offset + request.nbytes]


class TestThreadEngine:
    def test_all_threads_hang_and_nothing_piles_up(self, tmp_path: Path, file: File) -> None:
        plan = FaultWhile("hang", ops=["preadv"])
        slow = FaultyFiles(PosixFiles(tmp_path), plan).open("data")
        gate = DeviceGate(100)  # the threads are what runs out
        engine = ThreadEngine(gate, threads=2)
        engine.run(reads(slow, 2), io_class=RESTORE, deadline=time.monotonic() + 5 * SOON_S)
        for _ in range(20):
            settled: list[int] = []
            batch = reads(file, 5)
            for request in batch:
                request.settle = lambda settled=settled: settled.append(1)  # type: ignore[misc]
            engine.run(batch, io_class=RESTORE, deadline=time.monotonic() + 0.002)
            assert {request.state for request in batch} == {IOState.LATE}
            assert len(settled) == 5
        assert gate.inflight(file.device) == 2
        assert sum(map(len, engine._ready)) == 0
        plan.resume()
        batch = reads(file, 5)
        engine.run(batch, io_class=RESTORE)
        assert_right(batch)
        assert plan.count == 2
        wait_for(lambda: engine.unsettled() == 0)
        engine.close()
        slow.close()

    def test_idle_threads_keep_nothing_alive(self, tmp_path: Path, file: File) -> None:
        engine = ThreadEngine()
        memory = aligned_buffer(PAGE)
        alive = weakref.ref(memory)
        requests = [Request(file, 0, [memory.data])]
        engine.run(requests, io_class=RESTORE)
        del memory
        requests.clear()
        wait_for(lambda: alive() is None)
        engine.close()

    def test_a_broken_file_fails_its_request_and_is_raised(self, file: File) -> None:
        class Broken(type(file)):  # type: ignore[misc]
            native = False

            def preadv(self, buffers: object, offset: int) -> int:
                raise ZeroDivisionError

        file.__class__ = Broken
        request = reads(file, 1)[0]
        engine = ThreadEngine()
        with pytest.raises(ZeroDivisionError):
            engine.run([request], io_class=RESTORE)
        assert request.state is IOState.FAILED
        engine.close()

    def test_eagain_and_eintr_are_retried(self, tmp_path: Path) -> None:
        write_durably(tmp_path / "data", pattern(64 * PAGE))
        failures = [BlockingIOError(errno.EAGAIN, "again"), InterruptedError(errno.EINTR, "signal")]

        class Moody(NoopFiles):
            pass

        files = Moody()
        noop = files.create("one")
        files.grow("one", PAGE)
        plain = noop.preadv

        def preadv(buffers: list[memoryview], offset: int) -> int:
            if failures:
                raise failures.pop()
            return plain(buffers, offset)

        noop.preadv = preadv  # type: ignore[method-assign, assignment]
        engine = ThreadEngine()
        request = Request(noop, 0, [aligned_buffer(PAGE).data])
        engine.run([request], io_class=RESTORE)
        assert request.state is IOState.DONE
        assert not failures
        engine.close()


@pytest.mark.parametrize("make", [ThreadEngine, AioEngine])
def test_forked_child_gets_a_clear_error(make: Callable[[], Engine], file: File) -> None:
    engine = make()
    engine.run(reads(file, 1), io_class=RESTORE)
    child = os.fork()
    if not child:
        code = 1
        try:
            engine.run(reads(file, 1), io_class=RESTORE)
        except StoreClosed:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    batch = reads(file, 4)
    engine.run(batch, io_class=RESTORE)
    assert_right(batch)
    engine.close()


class Kernel:
    """What the contexts of one test do that kernels seldom do, and what they have done."""

    def __init__(self) -> None:
        self.stall: threading.Event | None = None  # completions are kept back until it is set
        self.results: list[Callable[[int], int]] = []  # what to make of the next results
        self.refusals: list[int] = []  # errno of the next submissions
        self.interrupt: list[BaseException] = []  # raised by the next harvest
        self.seen = 0  # events harvested
        self.made: list[weakref.ref[OddContext]] = []

    def new_context(self) -> OddContext:
        context = OddContext(self)
        self.made.append(weakref.ref(context))
        return context


class OddContext(AioContext):
    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.kernel = kernel

    def submit(self) -> int:
        return self.kernel.refusals.pop(0) if self.kernel.refusals else super().submit()

    def harvest(self, timeout_s: float | None) -> list[tuple[int, int]]:
        kernel = self.kernel
        if kernel.interrupt:
            raise kernel.interrupt.pop()
        if kernel.stall is not None and not kernel.stall.wait(timeout_s):
            return []
        events = []
        for slot, result in super().harvest(timeout_s):
            kernel.seen += 1
            if kernel.results:
                assert result > 0
                result = self._undo(slot, kernel.results.pop(0)(result))
            events.append((slot, result))
        return events

    def _undo(self, slot: int, result: int) -> int:
        """Take back what the kernel moved beyond the result, so that only a real continuation makes the bytes right."""
        request = self.requests[slot]
        assert request is not None
        keep = self.moved[slot] + max(result, 0)
        for buffer in request.buffers:
            kept = min(keep, buffer.nbytes)
            buffer[kept:] = bytes(buffer.nbytes - kept)
            keep -= kept
        return result


@needs_aio
class TestAioEngine:
    @pytest.fixture(autouse=True)
    def _only_where_reads_are_native(self, file: File) -> None:
        context = AioContext()
        request = reads(file, 1)[0]
        if not file.direct or not context.load(request) or context.submit():
            pytest.skip("no direct I/O, or none without blocking, in the temporary folder")
        if context.harvest(PATIENCE_S)[0][1] != PAGE:
            pytest.skip("direct reads block in the temporary folder")

    @pytest.fixture
    def kernel(self) -> Kernel:
        return Kernel()

    @pytest.fixture
    def engine(self, kernel: Kernel) -> Iterator[AioEngine]:
        engine = AioEngine(DeviceGate(3), new_context=kernel.new_context)
        yield engine
        wait_for(lambda: engine.unsettled() == 0)
        engine.close()

    @pytest.fixture
    def threads(self, engine: AioEngine) -> Callable[[], int]:
        """How many requests the fallback has been given so far."""
        given: list[int] = []
        begin = engine.fallback.begin

        def counting(requests: list[Request], **options: object) -> object:
            given.append(len(requests))
            return begin(requests, **options)  # type: ignore[arg-type]

        engine.fallback.begin = counting  # type: ignore[method-assign, assignment]
        return lambda: sum(given)

    @pytest.mark.parametrize("count", [1, 9])
    def test_aligned_direct_reads_use_no_thread(
        self, engine: AioEngine, kernel: Kernel, threads: Callable[[], int], file: File, count: int
    ) -> None:
        batch = reads(file, count, pages=4)
        caller = threading.get_ident()
        done_by = []
        engine.run(batch, io_class=RESTORE, done=lambda request: done_by.append(threading.get_ident()))
        assert_right(batch)
        assert done_by == [caller] * count
        assert kernel.seen == count
        assert threads() == 0

    def test_what_aio_cannot_do_goes_to_threads(
        self, tmp_path: Path, engine: AioEngine, kernel: Kernel, threads: Callable[[], int], file: File
    ) -> None:
        files = PosixFiles(tmp_path)
        buffered = files.open("data", direct=False)
        wrapped = ThrottledFiles(files, 1e12, 1e12).open("data")
        writable = files.open("data", write=True)
        page = pattern(64 * PAGE)[:PAGE]
        writes = [Request(writable, 0, [memoryview(page)], write=True)]
        odd = [Request(file, 0, [aligned_buffer(PAGE).data[1:]]), Request(file, 1, [aligned_buffer(PAGE).data])]
        native = reads(file, 4)
        batch = [*writes, *reads(buffered, 2), *native, *reads(wrapped, 2), *odd]
        engine.run(batch, io_class=RESTORE)
        assert threads() == 7
        assert kernel.seen == 4
        assert_right([request for request in batch if not request.write])
        for opened in (buffered, wrapped, writable):
            opened.close()

    @pytest.mark.parametrize("count", [1, 5])
    @pytest.mark.parametrize("first", [1, 2])
    def test_short_results_are_continued(
        self,
        engine: AioEngine,
        kernel: Kernel,
        threads: Callable[[], int],
        file: File,
        count: int,
        first: int,
    ) -> None:
        kernel.results[:] = [lambda result: result] * (first - 1) + [lambda result: PAGE, lambda result: result // 2]
        batch = [
            Request(file, 8 * PAGE * at, [filled(PAGE).data, filled(3 * PAGE, 1).data, filled(4 * PAGE, 2).data])
            for at in range(count)
        ]
        engine.run(batch, io_class=RESTORE)
        assert_right(batch)
        assert threads() == 0

    def test_short_result_inside_a_sector(
        self, engine: AioEngine, kernel: Kernel, threads: Callable[[], int], file: File
    ) -> None:
        kernel.results[:] = [lambda result: 100]
        batch = reads(file, 3, pages=2)
        engine.run(batch, io_class=RESTORE)
        assert_right(batch)
        assert threads() == 1

    def test_zero_bytes_is_the_end_of_the_file(self, engine: AioEngine, kernel: Kernel, file: File) -> None:
        kernel.results[:] = [lambda result: 0]
        batch = reads(file, 3)
        engine.run(batch, io_class=RESTORE)
        assert [isinstance(request.error, ShortTransfer) for request in batch].count(True) == 1

    @pytest.mark.parametrize("count", [1, 5])
    @pytest.mark.parametrize("code", [errno.EIO, errno.ENXIO])
    def test_errors_of_the_device(self, engine: AioEngine, kernel: Kernel, file: File, code: int, count: int) -> None:
        kernel.results[:] = [lambda result: -code] * 2  # the single read is tried again the general way
        batch = reads(file, count)
        engine.run(batch, io_class=RESTORE)
        errors = [request.error for request in batch if request.state is IOState.FAILED]
        assert errors
        assert {error.errno for error in errors if error} == {code}
        assert_right([request for request in batch if request.state is not IOState.FAILED])

    @pytest.mark.parametrize("count", [1, 5])
    @pytest.mark.parametrize("code", [errno.EAGAIN, errno.EINVAL, errno.EOPNOTSUPP])
    def test_what_the_kernel_would_block_on_goes_to_threads(
        self,
        engine: AioEngine,
        kernel: Kernel,
        threads: Callable[[], int],
        file: File,
        code: int,
        count: int,
    ) -> None:
        kernel.results[:] = [lambda result: -code] * 2
        batch = reads(file, count)
        engine.run(batch, io_class=RESTORE)
        assert_right(batch)
        assert threads() >= 1

    @pytest.mark.parametrize("count", [1, 5])
    @pytest.mark.parametrize("code", [errno.EAGAIN, errno.EINVAL, errno.EOPNOTSUPP])
    def test_refused_submissions(
        self,
        engine: AioEngine,
        kernel: Kernel,
        threads: Callable[[], int],
        file: File,
        code: int,
        count: int,
    ) -> None:
        kernel.refusals[:] = [code] * 2
        batch = reads(file, count)
        engine.run(batch, io_class=RESTORE)
        assert_right(batch)
        assert threads() >= 1
        before = threads()
        engine.run(reads(file, 3), io_class=RESTORE)
        assert threads() - before == (3 if code == errno.EOPNOTSUPP else 0)
        assert engine.gate.inflight(file.device) == 0

    def test_a_submission_error_fails_its_request(self, engine: AioEngine, kernel: Kernel, file: File) -> None:
        kernel.refusals[:] = [errno.EPERM]
        batch = reads(file, 5)
        engine.run(batch, io_class=RESTORE)
        assert [request.error.errno for request in batch if request.error] == [errno.EPERM]
        assert_right([request for request in batch if not request.error])

    @pytest.mark.parametrize("count", [1, 7])
    def test_hung_device(self, engine: AioEngine, kernel: Kernel, file: File, count: int) -> None:
        """Late requests keep their memory, their places and their context until the kernel is done with them."""
        kernel.stall = threading.Event()
        calls = Calls()
        batch = reads(file, count)
        inflight = min(count, 3)
        for at, request in enumerate(batch):
            request.context, request.settle = at, calls.settle(at)
        memory = [weakref.ref(request.buffers[0].obj) for request in batch]
        engine.run(batch, io_class=RESTORE, deadline=time.monotonic() + SOON_S, done=calls.done)
        assert {request.state for request in batch} == {IOState.LATE}
        assert sorted(calls.seen, key=str) == [("settle", at) for at in range(inflight, count)]
        assert engine.unsettled() == inflight
        batch.clear()
        del request
        gc.collect()
        assert sum(reference() is not None for reference in memory) == inflight
        if count == 7:  # all places are taken: the next call cannot even start
            blocked = reads(file, 2)
            engine.run(blocked, io_class=RESTORE, deadline=time.monotonic() + SOON_S)
            assert {each.state for each in blocked} == {IOState.LATE}
        kernel.stall.set()
        wait_for(lambda: engine.unsettled() == 0)
        assert sorted(calls.seen, key=str) == [("settle", at) for at in range(count)]
        wait_for(lambda: engine.gate.inflight(file.device) == 0)
        again = reads(file, 5)
        engine.run(again, io_class=RESTORE)
        assert_right(again)

    @pytest.mark.parametrize("count", [1, 7])
    def test_interrupted_call_leaves_no_transfer_unwatched(
        self, engine: AioEngine, kernel: Kernel, file: File, count: int
    ) -> None:
        kernel.interrupt[:] = [KeyboardInterrupt()]
        calls = Calls()
        batch = reads(file, count)
        for at, request in enumerate(batch):
            request.settle = calls.settle(at)
        with pytest.raises(KeyboardInterrupt):
            engine.run(batch, io_class=RESTORE, done=calls.done)
        assert {request.state for request in batch} == {IOState.LATE}
        wait_for(lambda: engine.unsettled() == 0)
        assert sorted(calls.seen, key=str) == [("settle", at) for at in range(count)]
        wait_for(lambda: engine.gate.inflight(file.device) == 0)

    def test_exhausted_contexts(self, file: File) -> None:
        def none_left() -> AioContext:
            raise OSError(errno.EAGAIN, "fs.aio-max-nr")

        engine = AioEngine(new_context=none_left)
        for count in (1, 5):
            batch = reads(file, count)
            engine.run(batch, io_class=RESTORE)
            assert_right(batch)
        assert engine.gate.inflight(file.device) == 0
        engine.close()

    def test_contexts_are_reused_and_destroyed(self, engine: AioEngine, kernel: Kernel, file: File) -> None:
        for count in (1, 5, 1, 5):
            engine.run(reads(file, count), io_class=RESTORE)
        assert len(kernel.made) == 1
        engine.close()
        gc.collect()
        assert kernel.made[0]() is None

    def test_verification_overlaps_io(self, engine: AioEngine, kernel: Kernel, file: File) -> None:
        """The queue is refilled before `done` is called: while one request is verified, the device has work."""
        inflight = []
        engine.run(
            reads(file, 8), io_class=RESTORE, done=lambda request: inflight.append(engine.gate.inflight(file.device))
        )
        assert inflight[0] == 3
        assert inflight[-1] == 0

    def test_a_place_passes_on_to_a_waiting_caller(self, engine: AioEngine, kernel: Kernel, file: File) -> None:
        """A long batch does not keep its places: another call gets one with the next completion."""
        gate = engine.gate
        order: list[str] = []
        kernel.stall = threading.Event()
        with ThreadPoolExecutor(2) as pool:
            long = pool.submit(engine.run, reads(file, 30), io_class=RESTORE, done=lambda request: order.append("long"))
            wait_for(lambda: gate.inflight(file.device) == 3)
            short = pool.submit(
                engine.run, reads(file, 1), io_class=RESTORE, done=lambda request: order.append("short")
            )
            wait_for(lambda: gate.waiting(file.device) == 1)
            assert order == []
            kernel.stall.set()
            short.result(PATIENCE_S)
            long.result(PATIENCE_S)
        assert sorted(order) == ["long"] * 30 + ["short"]
        assert gate.peak(file.device) == 3

    def test_the_fallback_must_share_the_gate(self) -> None:
        with pytest.raises(InvalidArgument):
            AioEngine(DeviceGate(), ThreadEngine())
        fallback = ThreadEngine()
        assert AioEngine(fallback=fallback).gate is fallback.gate


def test_default_engine_is_the_fastest_available() -> None:
    engine = default_engine()
    assert type(engine) is (AioEngine if AioEngine.available() else ThreadEngine)
    engine.close()


# --- siblings ---------------------------------------------------------------------------------------------------


class FakeTime:
    """Time that passes only by sleeping; several sleepers wake in the order of their time."""

    def __init__(self) -> None:
        self._now = 100.0
        self._lock = threading.Lock()

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float, /) -> None:
        with self._lock:
            self._now += seconds


class TestThrottledRate:
    @pytest.mark.parametrize("write", [False, True])
    def test_one_after_the_other(self, write: bool) -> None:
        clock = FakeTime()
        files = ThrottledFiles(NoopFiles(), 1000.0, 500.0, 0.25, clock=clock)
        file = files.create("one")
        file.allocate(0, 4000)
        engine = ThreadEngine()
        for _ in range(4):
            request = Request(file, 0, [aligned_buffer(1000).data], write=write)
            engine.run([request], io_class=RESTORE)
        assert clock.monotonic() - 100.0 == pytest.approx(4 * ((2.0 if write else 1.0) + 0.25))
        engine.close()

    def test_concurrent_transfers_share_the_rate(self) -> None:
        """Each transfer gets the device for itself in turn: the last of n ends no earlier than n times its time."""
        clock = FakeTime()
        files = ThrottledFiles(NoopFiles(), 1000.0, 500.0, clock=clock)
        ends = [files.occupy(100, write=False) for _ in range(5)] + [files.occupy(100, write=True)]
        assert ends == pytest.approx([100.1, 100.2, 100.3, 100.4, 100.5, 100.7])
        files.sleep_until(ends[-1])
        clock.sleep(10.0)  # idle time is not saved up
        assert files.occupy(100, write=False) == pytest.approx(110.8)

    def test_small_files_count_too(self, tmp_path: Path) -> None:
        clock = FakeTime()
        files = ThrottledFiles(PosixFiles(tmp_path), 1000.0, 500.0, clock=clock)
        assert files.write_once("one", bytes(1000))
        assert len(files.read("one")) == 1000
        assert clock.monotonic() - 100.0 == pytest.approx(2.0 + 1.0)

    def test_unusable_rates(self) -> None:
        with pytest.raises(InvalidArgument):
            ThrottledFiles(NoopFiles(), 0, 1)


class TestFaults:
    def work(self, files: Files) -> None:
        """One of each operation; a short or torn transfer is not noticed here."""
        memory = filled(4 * PAGE)
        file = files.create("a/one")
        try:
            file.allocate(0, 4 * PAGE)
            file.pwritev([memory.data], 0)
            file.datasync()
            file.preadv([memory.data], 0)
            file.truncate(PAGE)
        finally:
            file.close()
        files.open("a/one").close()
        files.write_once("index", b"data")
        files.read("index")
        files.list("")
        files.sync_directory("a")
        files.unlink("a/one")

    @pytest.mark.parametrize("kind", ["eio", "enospc", "edquot", "estale"])
    def test_sweep_reaches_every_operation_once(self, tmp_path: Path, kind: str) -> None:
        failed = []
        for n in range(1, 100):
            root = tmp_path / str(n)
            root.mkdir()
            plan = NthFault(n, kind)  # type: ignore[arg-type]
            caught: OSError | None = None
            try:
                self.work(FaultyFiles(PosixFiles(root), plan))
            except OSError as error:
                caught = error
            if plan.count < n:
                assert caught is None
                break
            assert caught is not None
            assert caught.errno == getattr(errno, kind.upper())
            failed.append(plan.log[-1][0])
        expected = (
            "create allocate pwritev datasync preadv truncate open write_once link read list sync_directory unlink"
        )
        assert failed == expected.split()

    def test_for_good_means_all_later_ones(self) -> None:
        plan = NthFault(2, "eio", once=False)
        file = FaultyFiles(NoopFiles(), plan).create("one")
        for _ in range(3):
            with pytest.raises(OSError, match="Input/output"):
                file.datasync()
        assert (plan.count, plan.fired) == (4, 3)

    def test_torn_write_lies(self, tmp_path: Path) -> None:
        plan = FaultWhile("torn", ops=["pwritev"])
        files = FaultyFiles(PosixFiles(tmp_path), plan)
        file = files.create("one")
        memory = filled(4 * PAGE)
        engine = default_engine()
        request = Request(file, 0, [memory.data[:PAGE], memory.data[PAGE:]], write=True)
        engine.run([request], io_class=WRITE_BACK)
        assert request.state is IOState.DONE
        assert files.read("one") == memory[: 2 * PAGE].tobytes()
        engine.close()
        file.close()

    def test_torn_small_file_and_torn_read(self) -> None:
        files = FaultyFiles(NoopFiles(), FaultWhile("torn", ops=["write_once"]))
        assert files.write_once("index", b"12345678")
        assert files.read("index") == b"1234"
        torn = FaultyFiles(files.inner, FaultWhile("torn", ops=["read"]))
        assert torn.read("index") == b"12"

    def test_failed_link_leaves_the_outcome_unknown(self, tmp_path: Path) -> None:
        files = FaultyFiles(PosixFiles(tmp_path), NthFault(1, "eio", ops=["link"]))
        with pytest.raises(OSError, match="Input/output"):
            files.write_once("index", b"data")
        assert not files.write_once("index", b"data")

    def test_a_disk_that_fills_and_recovers(self, tmp_path: Path) -> None:
        plan = FaultWhile("enospc", ops=["pwritev", "allocate", "create"], path="segments/")
        files = FaultyFiles(PosixFiles(tmp_path), plan)
        with pytest.raises(OSError, match="No space"):
            files.create("segments/one")
        files.create("other").close()
        plan.armed = False
        files.create("segments/one").close()
        assert plan.fired == 1

    def test_hang_waits_and_then_does_its_work(self) -> None:
        plan = FaultWhile("hang", ops=["write_once"])
        files = FaultyFiles(NoopFiles(), plan)
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(files.write_once, "index", b"data")
            plan.wait_until_hanging()
            assert files.list("") == []
            plan.resume()
            assert result.result()
        assert files.read("index") == b"data"

    def test_siblings_are_not_native(self, tmp_path: Path) -> None:
        inner = PosixFiles(tmp_path)
        for files in (ThrottledFiles(inner, 1e9, 1e9), FaultyFiles(inner, NthFault(0, "eio")), NoopFiles()):
            assert not files.create(f"{type(files).__name__}").native  # type: ignore[attr-defined]
        plain = inner.create("plain")
        assert plain.native

    def test_unknown_operation(self) -> None:
        with pytest.raises(InvalidArgument, match="pread"):
            NthFault(1, "eio", ops=["pread"])
