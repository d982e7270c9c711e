"""Payload by NIXL: what is special about it. Runs on a CPU, where UCX copies between processes (`.ci/nixl`)."""

from __future__ import annotations

from typing import ClassVar

import pytest

pytest.importorskip("nixl_cu12", reason="the extra `nixl` is not installed")

import perdure
from perdure import RemoteStore
from perdure.testing.transport import ServiceProcess, TransportConformance


@pytest.fixture(autouse=True)
def _transports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "cma,self,tcp")


class TestNixl(TransportConformance):
    flags: ClassVar[dict[str, str]] = {"listen": "127.0.0.1:0"}
    reads_in_messages = 1

    def connect(self, service: ServiceProcess) -> RemoteStore:
        return perdure.connect(service.address("tcp").replace("tcp://", "nixl://"))
