"""The store as its users see it: the public conformance suite and state machine, and what is only true of an embedded
store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings

import perdure
from perdure import Store, limits
from perdure.segments.format import record_bytes
from perdure.testing.model import StoreMachine, tally
from perdure.testing.store import StoreConformance


class TestEmbedded(StoreConformance):
    def make_store(self, directory: Path, **options: Any) -> Store:
        return perdure.open(directory, **options)


class Machine(StoreMachine):
    def make_store(self, directory: Path, **options: Any) -> Store:
        return perdure.open(directory, **options)

    def keep_house(self, store: Store) -> None:
        store._keeper.chores()
        assert store._keeper.last_error is None

    def recount(self, store: Store) -> dict[str, dict[str, int]]:
        _, records = store._core.index.scan(bytes(limits.key_bytes), 1 << 20)
        names = {space.tenant_id: space.tenant for space in self.spaces}
        return tally(
            (names[row["tenant"].tobytes()], int(row["block_bytes"]), record_bytes(int(row["stored_bytes"])))
            for row in records
        )


Machine.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=50,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestMachine = Machine.TestCase
