"""Bad input: a typed error that says what, where and what to do; what was stored before is still there and equal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perdure
from perdure import limits

BLOCK = 64 * 1024
LAYOUT = perdure.KVLayout(16, BLOCK, "float16", "LBHNC")
KEPT = 3


def space_of(store: perdure.Store, layout: perdure.KVLayout = LAYOUT) -> perdure.Keyspace:
    return store.keyspace(model="m", weights="sha256:00", layout=layout, tenant="acme", codec="off")


def content(count: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, count * BLOCK, dtype=np.uint8)


class Opened:
    """A store that holds KEPT blocks; `check` proves that they are still there and equal."""

    def __init__(self, path: Path):
        self.path = path
        self.store = perdure.open(path, capacity="64MiB", memory=0)
        self.space = space_of(self.store)
        self.keys = self.space.chain(np.arange(16 * KEPT))
        self.data = content(KEPT)
        assert self.space.write(self.keys, self.data).stored == KEPT

    def check(self) -> None:
        found = np.zeros_like(self.data)
        assert self.space.read(self.keys, into=found).usable == KEPT
        assert (found == self.data).all()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    one = Opened(tmp_path / "store")
    with one.store:
        yield one
        one.check()


# --- opening
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"capacity": "2MiB"}, "at least"),
        ({"capacity": "20 gigs"}, "20GiB"),
        ({"capacity": -1}, "negative"),
        ({"capacity": True}, "bytes"),
        ({"memory": "lots"}, "memory"),
        ({"capcity": "20GiB"}, "did you mean 'capacity'"),
        ({"blocksize": 1}, "unknown option"),
        ({"codec": "zip"}, "auto"),
    ],
)
def test_options(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(perdure.InvalidArgument, match=words), perdure.open(tmp_path / "s", **options) as store:
        space_of(store) if "codec" not in options else store.keyspace(
            model="m", weights="sha256:00", layout=LAYOUT, tenant="acme"
        )


def test_an_unknown_option_has_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(perdure.UnknownOption, match="capacity"):
        perdure.open(tmp_path, capasity=1)
    assert not list(tmp_path.iterdir())


def test_a_refused_open_can_be_repeated(tmp_path: Path) -> None:
    with pytest.raises(perdure.InvalidArgument):
        perdure.open(tmp_path / "s", capacity=1)
    Opened(tmp_path / "s").store.close()


def test_missing_directory_read_only(tmp_path: Path) -> None:
    with pytest.raises(perdure.StorePathError, match="no such directory"):
        perdure.open(tmp_path / "none", read_only=True)
    assert not (tmp_path / "none").exists()


def test_a_file_is_not_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(perdure.StorePathError, match="not a directory"):
        perdure.open(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "x"


def test_a_foreign_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(perdure.FormatError, match=r"thesis\.txt"):
        perdure.open(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_unwritable_directory_says_so(tmp_path: Path) -> None:
    """As another user, because root may write anywhere."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o755)
    for parent in (tmp_path, *tmp_path.parents):  # the other user must get here at all
        if parent.stat().st_uid == 0 and parent != Path("/") and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o001)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgid(65534)
        os.setuid(65534)
        try:
            perdure.open(locked)
            os.write(write, b"opened")
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    answer = os.read(read, 4096).decode()
    os.close(read)
    assert answer.startswith("StorePathError")
    assert str(locked) in answer


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda mark: mark.write_text(json.dumps(json.loads(mark.read_text()) | {"format": 99})), "upgrade"),
        (lambda mark: mark.write_text("{"), "damaged"),
        (lambda mark: mark.write_text("{}"), "damaged"),
    ],
)
def test_a_newer_or_damaged_mark(tmp_path: Path, damage: Any, words: str) -> None:
    one = Opened(tmp_path / "s")
    one.store.close()
    mark = one.path / "perdure.json"
    before = mark.read_bytes()
    damage(mark)
    for read_only in (False, True):
        with pytest.raises(perdure.FormatError, match=words):
            perdure.open(one.path, read_only=read_only)
    mark.write_bytes(before)
    with perdure.open(one.path, memory=0) as store:
        one.store, one.space = store, space_of(store)
        one.check()


def test_a_missing_or_damaged_root_secret(tmp_path: Path) -> None:
    one = Opened(tmp_path / "s")
    one.store.close()
    secret = one.path / "keystore" / "root.key"
    before = secret.read_bytes()
    secret.write_bytes(b"short")
    with pytest.raises(perdure.FormatError, match="backup"):
        perdure.open(one.path)
    secret.unlink()
    with pytest.raises(perdure.FormatError, match="missing"):
        perdure.open(one.path)
    assert not secret.exists(), "a new secret would make every stored block unusable for good"
    secret.write_bytes(before)
    with perdure.open(one.path, memory=0) as store:
        one.store, one.space = store, space_of(store)
        one.check()


def test_modes(tmp_path: Path) -> None:
    one = Opened(tmp_path / "s")
    one.store.close()
    assert one.path.stat().st_mode & 0o077 == 0
    assert (one.path / "keystore" / "root.key").stat().st_mode & 0o077 == 0


# --- a second opener
def test_a_second_writer_is_told_who_the_first_is(opened: Opened) -> None:
    code = "import sys, perdure; perdure.open(sys.argv[1])"
    second = subprocess.run([sys.executable, "-c", code, str(opened.path)], capture_output=True, text=True, check=False)
    assert "StoreLocked" in second.stderr
    assert f"pid {os.getpid()}" in second.stderr
    assert "host " in second.stderr
    assert "boot id " in second.stderr


def test_a_second_writer_in_the_same_process(opened: Opened) -> None:
    with pytest.raises(perdure.StoreLocked, match="read_only"):
        perdure.open(opened.path)


def test_the_lock_ends_with_a_killed_process(tmp_path: Path) -> None:
    code = "import sys, time, perdure; s = perdure.open(sys.argv[1]); print('open', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "s")], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "open\n"
    with pytest.raises(perdure.StoreLocked):
        perdure.open(tmp_path / "s")
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    perdure.open(tmp_path / "s").close()


def test_read_only_beside_a_writer(opened: Opened) -> None:
    with perdure.open(opened.path, read_only=True, memory=0) as reader:
        space = space_of(reader)
        assert space.lookup(opened.keys) == KEPT
        for verb in (
            lambda: space.write(opened.keys, opened.data),
            lambda: space.pin(opened.keys, ttl_s=1),
            lambda: space.reserve(opened.keys),
        ):
            with pytest.raises(perdure.ReadOnlyStore, match=r"read_only|read-only"):
                verb()
        found = np.zeros_like(opened.data)
        assert space.read(opened.keys, into=found).usable == KEPT
        assert (found == opened.data).all()


def test_use_after_close(tmp_path: Path) -> None:
    one = Opened(tmp_path / "s")
    one.store.close()
    one.store.close()
    for verb in (
        lambda: one.space.lookup(one.keys),
        lambda: one.space.read(one.keys, into=one.data),
        lambda: one.space.write(one.keys, one.data),
        lambda: one.space.submit_read(one.keys, one.data),
        lambda: one.store.status(),
        lambda: space_of(one.store),
    ):
        with pytest.raises(perdure.StoreClosed, match="closed"):
            verb()


def test_a_forked_child_is_told_and_the_parent_goes_on(opened: Opened) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            opened.space.lookup(opened.keys)
            os.write(write, b"answered")
        except perdure.StoreClosed as error:
            os.write(write, f"StoreClosed: {error}".encode())
        finally:
            opened.store.close()
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    assert b"open it again in this one" in os.read(read, 4096)
    os.close(read)
    with pytest.raises(perdure.StoreLocked):  # the child's end did not release the parent's lock
        perdure.open(opened.path)
    more = opened.space.chain(np.arange(1000, 1016))
    assert opened.space.write(more, content(1)).stored == 1


# --- keyspaces
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weights": ""}, "digest of the loaded weights"),
        ({"weights": "v1"}, "algorithm:value"),
        ({"model": ""}, "model"),
        ({"tenant": ""}, "tenant"),
        ({"tenant": "x" * 256}, "255"),
        ({"codec": "gzip"}, "auto, on, off"),
    ],
)
def test_identity(opened: Opened, change: dict[str, Any], words: str) -> None:
    good = {"model": "m", "weights": "sha256:00", "layout": LAYOUT, "tenant": "acme"}
    with pytest.raises(perdure.InvalidArgument, match=words):
        opened.store.keyspace(**(good | change))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"block_tokens": 0}, "block_tokens"),
        ({"block_bytes": 0}, "block_bytes"),
        ({"block_bytes": limits.block_bytes_max + 1}, "fewer tokens"),
        ({"dtype": "float17"}, "bfloat16"),
        ({"order": ""}, "order"),
        ({"layers": (1,)}, "first, count"),
        ({"kv_heads": (0, -1)}, "first, count"),
    ],
)
def test_layouts(fields: dict[str, Any], words: str) -> None:
    good = {"block_tokens": 16, "block_bytes": BLOCK, "dtype": "float16", "order": "LBHNC"}
    with pytest.raises(perdure.InvalidArgument, match=words):
        perdure.KVLayout(**(good | fields))


def test_a_block_larger_than_a_segment(opened: Opened) -> None:
    with pytest.raises(perdure.InvalidArgument, match="capacity of at least") as caught:
        space_of(opened.store, perdure.KVLayout(16, 8 * limits.MIB, "float16", "LBHNC"))
    assert "segment" in str(caught.value)


# --- keys
def test_zero_tokens_are_zero_blocks(opened: Opened) -> None:
    none = opened.space.chain([])
    assert opened.space.lookup(none) == 0
    assert opened.space.read(none, into=bytearray()).usable == 0
    assert opened.space.write(none, b"").stored == 0
    with pytest.raises(perdure.InvalidArgument, match="no keys"):
        opened.space.reserve(none)


@pytest.mark.parametrize(
    "keys", [[b"short"], "text", 7, np.zeros((2, 31), np.uint8), np.zeros((2, 32), np.int8), np.zeros(32, np.uint8)]
)
def test_keys(opened: Opened, keys: Any) -> None:
    for verb in (opened.space.lookup, lambda k: opened.space.read(k, into=opened.data)):
        with pytest.raises(perdure.InvalidArgument, match="keys must"):
            verb(keys)


def test_too_many_keys(opened: Opened) -> None:
    with pytest.raises(perdure.InvalidArgument, match="split"):
        opened.space.lookup(np.zeros((limits.batch_blocks_max + 1, 32), np.uint8))


def test_duplicate_keys_in_a_batch(opened: Opened) -> None:
    key = opened.space.chain(np.arange(2000, 2016))
    twice = np.concatenate([key, key])
    data = np.concatenate([content(1), content(1)])
    report = opened.space.write(twice, data)
    assert report.statuses.tolist() == [perdure.WriteStatus.STORED, perdure.WriteStatus.EXISTS]
    found = np.zeros_like(data)
    assert opened.space.read(twice, into=found).usable == 2
    assert (found == data).all()


# --- memory
def bad_buffers() -> dict[str, tuple[Any, str]]:
    whole = np.zeros(KEPT * BLOCK, np.uint8)
    readonly = whole.copy()
    readonly.flags.writeable = False
    return {
        "too small": (whole[:-1], f"{KEPT * BLOCK} are needed"),
        "too large": (np.zeros(KEPT * BLOCK + 1, np.uint8), "are needed"),
        "read-only": (readonly, "read-only"),
        "bytes": (bytes(KEPT * BLOCK), "read-only"),
        "not contiguous": (np.zeros((KEPT * BLOCK, 2), np.uint8)[:, 0], "contiguous"),
        "not memory": (object(), "buffer protocol"),
        "too few": ([whole[:BLOCK]] * 2, "one per key"),
        "overlap": ([whole[:BLOCK]] * KEPT, "overlap"),
        "parts too short": ([[whole[:100]], [whole[BLOCK : 2 * BLOCK]], [whole[2 * BLOCK :]]], r"into\[0\]"),
    }


@pytest.mark.parametrize("name", bad_buffers())
@pytest.mark.parametrize("verb", ["read", "submit_read"])
def test_read_buffers(opened: Opened, name: str, verb: str) -> None:
    buffer, words = bad_buffers()[name]

    def call() -> None:
        outcome = getattr(opened.space, verb)(opened.keys, buffer)
        outcome.result(60)

    with pytest.raises(perdure.BufferMismatch, match=words):
        call()


@pytest.mark.parametrize("name", ["too small", "too large", "not contiguous", "not memory", "too few"])
def test_write_buffers(opened: Opened, name: str) -> None:
    buffer, words = bad_buffers()[name]
    new = opened.space.chain(np.arange(3000, 3000 + 16 * KEPT))
    with pytest.raises(perdure.BufferMismatch, match=words):
        opened.space.write(new, buffer)
    assert opened.space.lookup(new) == 0


@pytest.mark.parametrize("shift", [1, 8, 512, 4095])
def test_unaligned_memory_is_fine(opened: Opened, shift: int) -> None:
    raw = perdure.aligned_buffer(KEPT * BLOCK + 4096)
    view = raw[shift : shift + KEPT * BLOCK]
    assert opened.space.read(opened.keys, into=view, direct=True).usable == KEPT
    assert (view == opened.data).all()
    new = opened.space.chain(np.arange(4000 + shift, 4000 + shift + 16 * KEPT))
    assert opened.space.write(new, view).stored == KEPT


def test_read_only_memory_can_be_written_from(opened: Opened) -> None:
    new = opened.space.chain(np.arange(5000, 5000 + 16 * KEPT))
    assert opened.space.write(new, opened.data.tobytes()).stored == KEPT


# --- terms
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"durability": "forever"}, "ephemeral, session, retained"),
        ({"durability": 7}, "durability"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"ttl_s": -1}, "ttl_s"),
        ({"ttl_s": float("nan")}, "ttl_s"),
        ({"ttl_s": 1e12}, "ttl_s"),
        ({"deadline_s": -0.1}, "deadline_s"),
        ({"deadline_s": float("nan")}, "deadline_s"),
    ],
)
def test_terms(opened: Opened, options: dict[str, Any], words: str) -> None:
    new = opened.space.chain(np.arange(6000, 6016))
    with pytest.raises(perdure.InvalidArgument, match=words):
        opened.space.write(new, content(1), **options)
    assert opened.space.lookup(new) == 0


def test_lifetimes(opened: Opened) -> None:
    for ttl_s in (0, -1, float("nan"), 1e9):
        with pytest.raises(perdure.InvalidArgument, match="ttl_s"):
            opened.space.pin(opened.keys, ttl_s=ttl_s)
        with pytest.raises(perdure.InvalidArgument, match="ttl_s"):
            opened.space.reserve(opened.keys, ttl_s=ttl_s)
    for rate in (0, -1, float("nan")):
        with pytest.raises(perdure.InvalidArgument, match="prefill_tokens_per_s"):
            opened.space.advise(opened.keys, prefill_tokens_per_s=rate)


def test_explain_needs_a_whole_key(opened: Opened) -> None:
    with pytest.raises(perdure.InvalidArgument, match="64 hex digits"):
        opened.store.explain(b"short")


# --- values of a wrong type: still a typed error, never one from the inside
@pytest.mark.parametrize("value", [None, 5, b"x", ["x"], "\udcff"])
@pytest.mark.parametrize("name", ["model", "weights", "tenant", "lora", "draft"])
def test_identity_that_is_no_text(opened: Opened, name: str, value: Any) -> None:
    good = {"model": "m", "weights": "sha256:00", "layout": LAYOUT, "tenant": "acme"}
    with pytest.raises(perdure.InvalidArgument, match=name):
        opened.store.keyspace(**(good | {name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in ("block_tokens", "block_bytes") for value in (None, "16", 1.5, True)]
    + [(name, value) for name in ("dtype", "order", "group", "scales", "isa") for value in (None, 5, b"x", "\udcff")]
    + [(name, value) for name in ("layers", "kv_heads") for value in (None, "ab", (0, 1.5), ("a", "b"), (0, 2**70))]
    + [("replicated", value) for value in (None, "no", 1)],
)
def test_layout_of_a_wrong_type(name: str, value: Any) -> None:
    good = {"block_tokens": 16, "block_bytes": BLOCK, "dtype": "float16", "order": "LBHNC"}
    with pytest.raises(perdure.InvalidArgument, match=name):
        perdure.KVLayout(**(good | {name: value}))


@pytest.mark.parametrize("layout", [None, {}, 5])
def test_no_layout(opened: Opened, layout: Any) -> None:
    with pytest.raises(perdure.InvalidArgument, match="KVLayout"):
        opened.store.keyspace(model="m", weights="sha256:00", layout=layout, tenant="acme")


@pytest.mark.parametrize("parent", ["k" * 32, b"", b"short", 5, np.zeros(32, np.uint8)])
def test_a_parent_that_is_no_key(opened: Opened, parent: Any) -> None:
    with pytest.raises(perdure.InvalidArgument, match="parent"):
        opened.space.chain(np.arange(16), parent=parent)


@pytest.mark.parametrize("extras", [5, [b"x"], {0: "x"}, {0: 5}, {"0": b"x"}, {-1: b"x"}, {3: b"x"}, {True: b"x"}])
def test_extras_that_would_get_lost(opened: Opened, extras: Any) -> None:
    """An image whose identity is not in the key would be mistaken for another one."""
    with pytest.raises(perdure.InvalidArgument, match="extras"):
        opened.space.chain(np.arange(40), extras=extras)


def test_extras_of_the_partial_block_wait_for_it(opened: Opened) -> None:
    assert (opened.space.chain(np.arange(40), extras={2: b"x"}) == opened.space.chain(np.arange(40))).all()
    longer = opened.space.chain(np.arange(48), extras={2: b"x"})
    assert (longer[2] != opened.space.chain(np.arange(48))[2]).any()


@pytest.mark.parametrize("value", [None, "5", float("nan"), float("inf"), b"1", [1]])
def test_times_of_a_wrong_type(opened: Opened, value: Any) -> None:
    calls = [
        lambda: opened.space.pin(opened.keys, ttl_s=value),
        lambda: opened.space.reserve(opened.keys, ttl_s=value),
    ]
    if value is not None:
        calls.append(lambda: opened.space.write(opened.keys, opened.data, ttl_s=value))
    if value not in (None, float("inf")):
        calls += [
            lambda: opened.space.read(opened.keys, opened.data, deadline_s=value),
            lambda: opened.space.write(opened.keys, opened.data, deadline_s=value),
            lambda: opened.space.submit_read(opened.keys, opened.data.copy(), deadline_s=value).result(),
            lambda: opened.space.advise(opened.keys, prefill_tokens_per_s=value),
        ]
    for call in calls:
        with pytest.raises(perdure.InvalidArgument, match="_s="):
            call()
    assert opened.store.status()["pins"] == 0


def test_a_submitted_call_refuses_what_the_call_refuses(opened: Opened) -> None:
    for verb in (opened.space.submit_read, opened.space.submit_write):
        with pytest.raises(perdure.InvalidArgument, match="deadline_s"):
            verb(opened.keys, opened.data.copy(), deadline_s=-1.0).result()


@pytest.mark.parametrize("deadline_s", [float("inf"), 1e300, 10**12])
def test_a_deadline_beyond_all_clocks_is_none(opened: Opened, deadline_s: Any) -> None:
    more = opened.space.chain(np.arange(1000, 1016))
    assert opened.space.write(more, content(1), deadline_s=deadline_s).stored == 1
    assert opened.space.submit_read(more, np.zeros(BLOCK, np.uint8), deadline_s=deadline_s).result().usable == 1


@pytest.mark.parametrize("value", [5, "x", b"x"])
def test_what_is_no_lease(opened: Opened, value: Any) -> None:
    for call in (
        lambda: opened.space.write(opened.keys, opened.data, lease=value),
        lambda: opened.space.end_lease(value),
    ):
        with pytest.raises(perdure.InvalidArgument, match="lease"):
            call()


@pytest.mark.parametrize("value", [None, 5, "x", [[b"x"]], [None]])
def test_memory_that_is_none(opened: Opened, value: Any) -> None:
    for verb in (opened.space.read, opened.space.write):
        with pytest.raises(perdure.BufferMismatch):
            verb(opened.keys, value)


@pytest.mark.parametrize("key", [None, "ab", b"x", 5, np.zeros(32, np.uint8)])
def test_explaining_what_is_no_key(opened: Opened, key: Any) -> None:
    with pytest.raises(perdure.InvalidArgument, match="32 bytes"):
        opened.store.explain(key)


def test_adopted_hashes_are_bytes(opened: Opened) -> None:
    for hashes in ([None], ["a"], [b""], [5]):
        with pytest.raises(perdure.InvalidArgument, match="adopt_hashes"):
            opened.space.adopt_hashes(hashes)


def test_an_admission_hook_must_be_a_function(tmp_path: Path) -> None:
    with pytest.raises(perdure.InvalidArgument, match="admission"):
        perdure.open(tmp_path / "s", admission=3)
    assert not (tmp_path / "s").exists()


def test_a_path_with_a_nul(tmp_path: Path) -> None:
    with pytest.raises(perdure.StorePathError, match="null"):
        perdure.open(f"{tmp_path}/a\0b")
