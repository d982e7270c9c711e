"""What the connector's two halves tell each other: plans from the scheduler to the workers, outcomes back.

vLLM carries these objects between its processes, once per step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from perdure.keys import KVLayout


@dataclass(slots=True)
class Part:
    """Blocks of one KV-cache group: their ids in the engine's cache, and their hashes, in the order of the sequence."""

    group: int
    block_ids: list[int]
    hashes: list[bytes]


@dataclass(slots=True)
class Transfer:
    """One load or save, named by its job and not by its request: a request may come back under its id.

    epoch: of the weights; a worker that has others drops the transfer. lora: content digest of the adapter, or "".
    """

    job: int
    request: str
    epoch: int
    lora: str
    parts: list[Part]


@dataclass(slots=True)
class Plan(KVConnectorMetadata):  # type: ignore[misc]
    """What the workers do in one step.

    weights: digest of the weights of all ranks, "" until every rank has told its own. overwritten: blocks that this
    step, or a load that starts in it, writes to from their first token on: whoever still reads them has to end first.
    finished: saves of requests that are over, whose blocks may be among those; saves: after the step. checks: blocks
    computed in this step that are compared with what is stored. cancel_saves: what is overwritten is not known.
    """

    epoch: int = 0
    weights: str = ""
    overwritten: list[int] = field(default_factory=list)
    finished: list[Transfer] = field(default_factory=list)
    loads: list[Transfer] = field(default_factory=list)
    saves: list[Transfer] = field(default_factory=list)
    checks: list[Transfer] = field(default_factory=list)
    cancel_saves: bool = False


@dataclass(slots=True)
class Shard(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What one rank holds: the digest of its loaded weights, and the layout of each of its KV-cache groups."""

    weights: str
    layouts: list[KVLayout]


@dataclass(slots=True)
class Outcome(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What the workers tell the scheduler. shards: by (pipeline rank, tensor rank), with the epoch they belong to.

    tripped: what a canary found. problem: why a worker is off.
    """

    shards: dict[tuple[int, int], tuple[int, Shard]] = field(default_factory=dict)
    tripped: str = ""
    problem: str = ""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Outcome:
        assert isinstance(other, Outcome)
        return Outcome(
            self.shards | other.shards, self.tripped or other.tripped, self.problem or other.problem
        )  # fmt: skip
