"""Sample keys and records for tests of catalogs, and what an index must hold after them.

The same arguments give the same samples on every machine and run. The checks read an index only through its protocol
and derive what they expect by counting one by one, so they share no rule with the catalogs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from perdure import limits
from perdure.catalog.api import RECORD, BlockIndex, Durability, KeyArray, PublishResult, RecordArray, Usage

NOW_S = 1_800_000_000
PAGE = limits.page_bytes
SEGMENT, OTHER_SEGMENT = b"segment-00000001", b"segment-00000002"
TENANT, OTHER_TENANT = b"tenant-000000001", b"tenant-000000002"
INSERTED, EXISTS, REPLACED = PublishResult.INSERTED, PublishResult.EXISTS, PublishResult.REPLACED

# What a present record is worth against a new one: (present, new, draining?, expected). Unnamed fields are equal.
WORTH: list[tuple[dict[str, int], dict[str, int], bool, PublishResult]] = [
    ({}, {}, False, EXISTS),
    ({}, {}, True, REPLACED),
    ({"durability": 1}, {"durability": 0}, False, EXISTS),
    ({"durability": 0}, {"durability": 1}, False, REPLACED),
    ({"durability": 2}, {"durability": 2}, False, EXISTS),
    ({"durability": 2}, {"durability": 2}, True, REPLACED),
    ({"retention": 9}, {"retention": 8}, False, EXISTS),
    ({"retention": 8}, {"retention": 9}, False, REPLACED),
    ({"tenant_epoch": 4}, {"tenant_epoch": 3}, False, EXISTS),
    ({"tenant_epoch": 3}, {"tenant_epoch": 4}, False, REPLACED),
    ({"expires_s": 0}, {"expires_s": NOW_S + 9}, False, EXISTS),
    ({"expires_s": NOW_S + 9}, {"expires_s": 0}, False, REPLACED),
    ({"expires_s": NOW_S + 9}, {"expires_s": NOW_S + 9}, False, EXISTS),
    ({"expires_s": NOW_S + 9}, {"expires_s": NOW_S + 8}, False, EXISTS),
    ({"expires_s": NOW_S + 9}, {"expires_s": NOW_S + 10}, False, REPLACED),
    ({"expires_s": NOW_S + 1}, {"expires_s": NOW_S - 5}, False, EXISTS),
    ({"expires_s": NOW_S}, {"expires_s": NOW_S - 5}, False, REPLACED),
    ({"expires_s": NOW_S - 1}, {"expires_s": NOW_S - 5}, False, REPLACED),
    ({"expires_s": 2**32 - 1}, {"expires_s": 0}, False, REPLACED),
    ({"durability": 2, "retention": 8}, {"durability": 1, "retention": 9}, False, REPLACED),
    ({"durability": 2, "tenant_epoch": 1}, {"durability": 1, "tenant_epoch": 2}, False, REPLACED),
    ({"durability": 1, "expires_s": 0}, {"durability": 2, "expires_s": NOW_S + 9}, False, REPLACED),
    ({"stored_bytes": 1}, {"stored_bytes": 2}, False, EXISTS),
    ({"created_s": 1}, {"created_s": 2}, False, EXISTS),
    ({"codec": 0}, {"codec": 1}, False, EXISTS),
]


def make_keys(count: int, seed: int = 0) -> KeyArray:
    """`count` different keys, the same for the same seed."""
    return np.random.default_rng(seed).integers(0, 256, (count, limits.key_bytes), np.uint8)


def make_records(count: int, **fields: object) -> RecordArray:
    """`count` records of adjacent blocks; `fields` overrides fields by one value or an array of them."""
    records = np.zeros(count, RECORD)
    chosen: dict[str, object] = {
        "segment": SEGMENT,
        "tenant": TENANT,
        "offset": np.arange(count) * 3 * PAGE,
        "stored_bytes": 5000,
        "block_bytes": 8192,
        "created_s": NOW_S - 100,
        "durability": Durability.SESSION,
    }
    for name, value in (chosen | fields).items():
        records[name] = np.void(value) if isinstance(value, bytes) else value
    return records


def publish(
    index: BlockIndex,
    keys: KeyArray,
    records: RecordArray,
    *,
    draining: tuple[bytes, ...] = (),
    admit: Callable[[], None] | None = None,
) -> list[PublishResult]:
    results = index.publish(keys, records, now_s=NOW_S, is_draining=draining.__contains__, admit=admit)
    assert results.shape == (len(keys),)
    assert results.dtype == np.uint8
    return [PublishResult(result) for result in results.tolist()]


def content(index: BlockIndex) -> dict[bytes, bytes]:
    """Everything in the index, read in small pages."""
    found: dict[bytes, bytes] = {}
    start = b""
    while True:
        keys, records = index.scan(start, 7)
        assert len(keys) == len(records) <= 7
        if len(keys) == 0:
            return found
        listed = [key.tobytes() for key in keys]
        assert listed == sorted(set(listed)), "scan is not in key order"
        assert listed[0] >= start, "scan went back"
        found.update(zip(listed, [record.tobytes() for record in records], strict=True))
        start = listed[-1] + b"\0"


def usage_of(records: RecordArray) -> dict[bytes, Usage]:
    """The usage these records must amount to, counted one by one."""
    totals: dict[bytes, list[int]] = {}
    for record in records:
        total = totals.setdefault(record["tenant"].tobytes(), [0, 0, 0])
        total[0] += 1
        total[1] += int(record["block_bytes"])
        total[2] += PAGE + -(-int(record["stored_bytes"]) // PAGE) * PAGE
    return {tenant: Usage(*total) for tenant, total in totals.items()}


def assert_holds(index: BlockIndex, keys: KeyArray, records: RecordArray) -> None:
    """The index holds exactly these records, and every way of asking agrees."""
    expected = {key.tobytes(): record.tobytes() for key, record in zip(keys, records, strict=True)}
    assert content(index) == expected
    present, found = index.lookup(keys)
    assert present.all()
    assert found.tobytes() == records.tobytes()
    assert index.count() == len(expected)
    assert index.usage() == usage_of(records)
