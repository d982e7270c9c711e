"""What every control store must do, as a test class to inherit; how is told in `perdure.testing.catalog`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perdure import limits
from perdure.catalog.api import ControlStore, Durability, Lease, SegmentRecord, SegmentState
from perdure.errors import InvalidArgument, StoreClosed
from perdure.testing.catalog_samples import make_keys

HOLDER, OTHER_HOLDER = b"holder-000000001", b"holder-000000002"
TOO_LONG = bytes(limits.control_name_bytes_max + 1)


def make_segment(number: int, **fields: Any) -> SegmentRecord:
    record = SegmentRecord(
        segment=number.to_bytes(limits.id_bytes, "big"),
        state=SegmentState.OPEN,
        owner=b"owner-0000000001",
        tenant=b"tenant-000000001",
        durability=Durability.SESSION,
        retention=3,
        boot_id=b"boot-00000000001",
        created_s=1_800_000_000,
        allocated_bytes=limits.segment_bytes_max,
        sealed_bytes=0,
        records=0,
        expires_s=0,
    )
    return replace(record, **fields)


def acquire(control: ControlStore, scope: bytes, holder: bytes, now_s: float = 0.0, ttl_s: float = 10.0) -> Lease:
    lease = control.acquire(scope, holder, now_s, ttl_s)
    assert lease is not None
    return lease


class ControlStoreConformance:
    """Inherit and override `make`, and `reopen` if the store outlives its object."""

    def make(self, directory: Path) -> ControlStore:
        raise NotImplementedError

    def reopen(self, control: ControlStore, directory: Path) -> ControlStore | None:
        """Close `control` and open what it left behind; None: nothing outlives the object."""
        return None

    @pytest.fixture
    def control(self, tmp_path: Path) -> Iterator[ControlStore]:
        control = self.make(tmp_path)
        yield control
        control.close()

    # --- documents

    def test_compare_and_set(self, control: ControlStore) -> None:
        assert control.get("policy", b"k") is None
        assert not control.compare_and_set("policy", b"k", b"", b"one")
        assert control.get("policy", b"k") is None
        assert control.compare_and_set("policy", b"k", None, b"one")
        assert not control.compare_and_set("policy", b"k", None, b"two")
        assert not control.compare_and_set("policy", b"k", b"on", b"two")
        assert not control.compare_and_set("policy", b"k", b"two", None)
        assert control.get("policy", b"k") == b"one"
        assert control.compare_and_set("policy", b"k", b"one", b"one")
        assert control.compare_and_set("policy", b"k", b"one", b"")
        assert control.get("policy", b"k") == b""
        assert not control.compare_and_set("policy", b"k", None, b"two")
        assert control.compare_and_set("policy", b"k", b"", None)
        assert control.get("policy", b"k") is None
        assert control.compare_and_set("policy", b"k", None, None)
        assert not control.compare_and_set("policy", b"k", b"", None)

    def test_namespaces_never_meet(self, control: ControlStore) -> None:
        names = [("a", b"bc"), ("ab", b"c"), ("abc", b""), ("a", b""), ("a", b"\0bc"), ("a\0", b"bc"), ("ä", b"\xff")]
        for number, (namespace, key) in enumerate(names):
            assert control.compare_and_set(namespace, key, None, bytes([number]))
        for number, (namespace, key) in enumerate(names):
            assert control.get(namespace, key) == bytes([number])
        assert control.items("a") == [(b"", b"\3"), (b"\0bc", b"\4"), (b"bc", b"\0")]
        assert control.items("ab") == [(b"c", b"\1")]
        assert control.items("ä") == [(b"\xff", b"\6")]
        assert control.items("b") == []
        assert control.items("a", b"\0bc") == [(b"bc", b"\0")]
        assert control.items("a", b"\0b", 1) == [(b"\0bc", b"\4")]
        assert control.items("a", b"", 2) == [(b"", b"\3"), (b"\0bc", b"\4")]
        assert control.items("a", b"bc") == []

    @pytest.mark.parametrize(("namespace", "key"), [("", b"k"), ("n", TOO_LONG), ("n" * 1000, b"")])
    def test_names_are_bounded(self, control: ControlStore, namespace: str, key: bytes) -> None:
        with pytest.raises(InvalidArgument):
            control.compare_and_set(namespace, key, None, b"value")
        with pytest.raises(InvalidArgument):
            control.get(namespace, key)

    def test_one_of_many_sets_each_value(self, control: ControlStore) -> None:
        control.compare_and_set("count", b"k", None, b"0")

        def increment(_: int) -> None:
            for _ in range(10):
                while True:
                    present = control.get("count", b"k")
                    assert present is not None
                    if control.compare_and_set("count", b"k", present, b"%d" % (int(present) + 1)):
                        break

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(increment, range(4)))
        assert control.get("count", b"k") == b"40"

    # --- segments

    def test_segments(self, control: ControlStore) -> None:
        assert control.segments() == []
        records = [make_segment(number) for number in (300, 1, 256, 2**127)]
        for record in records:
            control.put_segment(record)
        assert control.segments() == sorted(records, key=lambda record: record.segment)
        sealed = make_segment(
            256,
            state=SegmentState.SEALED,
            owner=b"owner-0000000002",
            tenant=b"\0" * 16,
            durability=Durability.RETAINED,
            retention=255,
            boot_id=b"\xff" * 16,
            created_s=2**32,
            allocated_bytes=2**40,
            sealed_bytes=2**40 - 1,
            records=2**33,
            expires_s=2**32 - 1,
        )
        control.put_segment(sealed)
        control.put_segment(sealed)
        assert control.get_segment(sealed.segment) == sealed
        control.delete_segment(records[0].segment)
        control.delete_segment(records[0].segment)
        assert control.get_segment(records[0].segment) is None
        assert control.segments() == [records[1], sealed, records[3]]
        state = control.segments()[1].state
        assert isinstance(state, SegmentState)

    def test_segments_change_by_compare_and_set(self, control: ControlStore) -> None:
        made, sealed = make_segment(7), make_segment(7, state=SegmentState.SEALED, sealed_bytes=9)
        assert not control.swap_segment(sealed, made)
        assert control.segments() == []
        assert control.swap_segment(None, made)
        assert not control.swap_segment(make_segment(7, records=3), sealed)
        assert control.swap_segment(made, sealed)
        assert not control.swap_segment(None, made)
        assert control.get_segment(made.segment) == sealed
        control.delete_segment(made.segment)
        assert not control.swap_segment(sealed, replace(sealed, state=SegmentState.DRAINING))
        assert control.segments() == []

    @pytest.mark.parametrize(
        "fields", [{"segment": b"short"}, {"owner": b""}, {"retention": 256}, {"records": -1}, {"created_s": 2**64}]
    )
    def test_bad_segment_records_are_refused(self, control: ControlStore, fields: dict[str, Any]) -> None:
        with pytest.raises(InvalidArgument):
            control.put_segment(make_segment(1, **fields))
        assert control.segments() == []

    # --- leases

    def test_a_lease_has_one_holder(self, control: ControlStore) -> None:
        lease = acquire(control, b"scope", HOLDER, now_s=100.0, ttl_s=10.0)
        assert (lease.scope, lease.holder, lease.deadline_s) == (b"scope", HOLDER, 110.0)
        assert control.acquire(b"scope", OTHER_HOLDER, 109.9, 10.0) is None
        assert control.check(lease)
        acquire(control, b"scope2", OTHER_HOLDER, now_s=100.0)
        later = acquire(control, b"scope", OTHER_HOLDER, now_s=110.0)  # at the deadline it is over
        assert later.token > lease.token
        assert not control.check(lease)
        assert control.check(later)
        assert control.renew(lease, 111.0, 10.0) is None
        assert not control.release(lease)
        assert control.check(later)

    def test_the_holder_may_ask_again(self, control: ControlStore) -> None:
        lease = acquire(control, b"scope", HOLDER, now_s=100.0)
        again = acquire(control, b"scope", HOLDER, now_s=105.0)
        assert again == replace(lease, deadline_s=115.0)
        assert control.check(lease)
        assert control.acquire(b"scope", OTHER_HOLDER, 114.0, 10.0) is None
        after = acquire(control, b"scope", HOLDER, now_s=115.0)  # too late to be the same lease
        assert after.token > lease.token
        assert not control.check(lease)

    def test_renewing(self, control: ControlStore) -> None:
        lease = acquire(control, b"scope", HOLDER, now_s=100.0)
        renewed = control.renew(lease, 105.0, 20.0)
        assert renewed == replace(lease, deadline_s=125.0)
        assert control.acquire(b"scope", OTHER_HOLDER, 124.0, 1.0) is None
        # Expired but not taken: nobody was told otherwise, so it lives on.
        assert control.check(lease)
        assert control.renew(lease, 200.0, 10.0) == replace(lease, deadline_s=210.0)
        assert control.acquire(b"scope", OTHER_HOLDER, 209.0, 1.0) is None
        assert control.release(lease)
        assert control.renew(lease, 201.0, 10.0) is None

    def test_tokens_grow_over_releases(self, control: ControlStore) -> None:
        last = 0
        for turn in range(6):
            lease = acquire(control, b"scope", HOLDER if turn % 2 else OTHER_HOLDER)
            assert lease.token > last
            last = lease.token
            assert control.release(lease)
            assert not control.check(lease)
            assert not control.release(lease)

    def test_one_of_many_gets_the_lease(self, control: ControlStore) -> None:
        def work(number: int) -> list[int]:
            holder = b"holder-%d" % number
            got = [control.acquire(b"scope-%d" % scope, holder, 0.0, 10.0) for scope in range(12)]
            return [scope for scope, lease in enumerate(got) if lease is not None]

        with ThreadPoolExecutor(4) as pool:
            winners = [scope for won in pool.map(work, range(4)) for scope in won]
        assert sorted(winners) == list(range(12))

    @pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("inf"), float("nan")])
    def test_bad_lifetimes_are_refused(self, control: ControlStore, ttl_s: float) -> None:
        with pytest.raises(InvalidArgument):
            control.acquire(b"scope", HOLDER, 0.0, ttl_s)
        with pytest.raises(InvalidArgument):
            control.pin(HOLDER, make_keys(1), float("nan"))
        lease = acquire(control, b"scope", OTHER_HOLDER)
        with pytest.raises(InvalidArgument):
            control.renew(lease, 0.0, ttl_s)
        with pytest.raises(InvalidArgument):
            control.acquire(b"scope", HOLDER, float("nan"), 1.0)
        assert control.check(lease)

    @pytest.mark.parametrize("name", [b"", TOO_LONG])
    def test_lease_names_are_bounded(self, control: ControlStore, name: bytes) -> None:
        with pytest.raises(InvalidArgument):
            control.acquire(name, HOLDER, 0.0, 1.0)
        with pytest.raises(InvalidArgument):
            control.acquire(b"scope", name, 0.0, 1.0)
        with pytest.raises(InvalidArgument):
            control.pin(name, make_keys(1), 1.0)

    # --- pins

    def test_pins(self, control: ControlStore) -> None:
        keys = make_keys(300)
        ids = [control.pin(HOLDER, keys[:count], 100.0 + count) for count in (0, 1, 300)]
        assert len(set(ids)) == 3
        pins = {pin.pin_id: pin for pin in control.pins()}
        assert pins.keys() == set(ids)
        for pin_id, count in zip(ids, (0, 1, 300), strict=True):
            assert pins[pin_id].owner == HOLDER
            assert pins[pin_id].deadline_s == 100.0 + count
            assert b"".join(pins[pin_id].keys) == keys[:count].tobytes()
        assert control.unpin(ids[2])
        assert not control.unpin(ids[2])
        assert not control.unpin(max(ids) + 1)
        assert not control.unpin(-1)
        assert control.pin(HOLDER, keys[:1], 1.0) not in ids

    def test_pins_expire(self, control: ControlStore) -> None:
        ids = [control.pin(HOLDER, make_keys(1), deadline_s) for deadline_s in (1.0, 2.0, 3.0)]
        lease = acquire(control, b"scope", HOLDER, ttl_s=1.0)
        assert control.expire(0.5) == 0
        assert control.expire(2.0) == 2
        assert [pin.pin_id for pin in control.pins()] == ids[2:]
        assert control.check(lease)  # leases end by being taken

    def test_a_dead_owner_leaves_nothing(self, control: ControlStore) -> None:
        for owner in (HOLDER, OTHER_HOLDER, HOLDER + b"x"):
            control.pin(owner, make_keys(2), 100.0)
        control.pin(HOLDER, make_keys(1), 100.0)
        lease, other = acquire(control, b"one", HOLDER), acquire(control, b"two", OTHER_HOLDER)
        named = acquire(control, b"three", HOLDER + b"-thread-1")
        assert control.end_owner(HOLDER) == 4
        assert control.end_owner(HOLDER) == 0
        assert [pin.owner for pin in control.pins()] == [OTHER_HOLDER, HOLDER + b"x"]
        assert not control.check(lease)
        assert not control.check(named)
        assert control.check(other)
        assert acquire(control, b"one", OTHER_HOLDER).token > lease.token

    # --- life

    def test_closed(self, tmp_path: Path) -> None:
        control = self.make(tmp_path)
        control.close()
        control.close()
        calls: list[Callable[[], object]] = [
            lambda: control.get("n", b"k"),
            lambda: control.put_segment(make_segment(1)),
            lambda: control.acquire(b"scope", HOLDER, 0.0, 1.0),
            control.pins,
        ]
        for call in calls:
            with pytest.raises(StoreClosed):
                call()

    def test_everything_outlives_the_object(self, tmp_path: Path) -> None:
        control = self.make(tmp_path)
        try:
            control.compare_and_set("n", b"k", None, b"value")
            control.put_segment(make_segment(1))
            lease = acquire(control, b"scope", HOLDER)
            released = acquire(control, b"released", HOLDER)
            control.release(released)
            kept, dropped = (control.pin(HOLDER, make_keys(2), 9.0) for _ in range(2))
            control.unpin(dropped)
            reopened = self.reopen(control, tmp_path)
            if reopened is None:
                pytest.skip("nothing outlives this control store")
            control = reopened
            assert control.items("n") == [(b"k", b"value")]
            assert control.segments() == [make_segment(1)]
            assert control.check(lease)
            assert control.acquire(b"scope", OTHER_HOLDER, 1.0, 1.0) is None
            assert acquire(control, b"released", OTHER_HOLDER).token > released.token
            assert [pin.pin_id for pin in control.pins()] == [kept]
            assert control.pin(HOLDER, make_keys(1), 9.0) not in (kept, dropped)
        finally:
            control.close()
