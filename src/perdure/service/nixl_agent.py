"""NIXL, as far as it is used here: one agent, its registered memory, and transfers that it starts (extra `nixl`).

Contract
- Thread-safe: one call of NIXL at a time. What NIXL raises becomes `Broken`; NIXL absent is a ConfigError.
- Descriptors never cross the wire in NIXL's own form, which is pickle: agents tell each other addresses and `about`,
  the agent's metadata, which NIXL reads without making objects of it.
- NIXL (UCX) knows no authentication: whoever reaches an agent's ports, or has its metadata read by ours, is trusted as
  code of this process would be. Forged metadata has ended processes, and over `cma` made them read their own memory.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import threading
import weakref
from pathlib import Path
from typing import Any, Final

from perdure.errors import ConfigError
from perdure.io.memory import address

_MODULES: Final = ("nixl_cu12", "nixl_cu13")
_HINT: Final = "pip install 'perdure[nixl]' (without CUDA: pip install --no-deps nixl-cu12==1.5.1)"
_BACKEND: Final = "UCX"
_RDMA: Final = Path("/sys/class/infiniband")


class Broken(Exception):
    """NIXL refuses or has failed; the message is its own."""


class Agent:
    """Made in 0.5 s. `name`: unlike any other's."""

    def __init__(self) -> None:
        nixl = _load()
        self.name = os.urandom(16).hex()
        self._lock = threading.Lock()
        self._made: Any = _call(nixl.nixl_agent, self.name, nixl.nixl_agent_config(backends=[_BACKEND]))
        if _BACKEND not in self._agent.backends:
            raise ConfigError("NIXL is installed without its UCX plugin")
        _agents.add(self)

    def register(self, view: memoryview) -> bytes:
        """Let transfers reach this memory; what another agent must be told about it."""
        with self._lock:
            memory = _call(self._agent.register_memory, [(address(view), view.nbytes, 0, "")], "DRAM")
            return bytes(_call(self._agent.get_partial_agent_metadata, memory, True, [_BACKEND]))

    def meet(self, about: bytes) -> str:
        """Learn of another agent, or of more of its memory; its name."""
        with self._lock:
            return str(_call(self._agent.add_remote_agent, about).decode(errors="replace"))

    def forget(self, name: str) -> None:
        """Close the connection to another agent."""
        with self._lock:
            _call(self._agent.remove_remote_agent, name)

    def start(self, verb: str, here: int, there: int, nbytes: int, name: str) -> Any:
        """READ or WRITE another agent's memory; a transfer, to be asked about until it is done and then released."""
        with self._lock:
            ours = self._agent.get_xfer_descs([(here, nbytes, 0)], "DRAM")
            theirs = self._agent.get_xfer_descs([(there, nbytes, 0)], "DRAM")
            transfer = _call(self._agent.initialize_xfer, verb, ours, theirs, name)
            try:
                _call(self._agent.transfer, transfer)
            except Broken:
                _call(transfer.release)
                raise
            return transfer

    def done(self, transfer: Any) -> bool:
        """False while it is going on. Raises Broken if it has failed."""
        with self._lock:
            state = _call(self._agent.check_xfer_state, transfer)
        if state == "ERR":
            raise Broken("the transfer failed")
        return bool(state == "DONE")

    def release(self, transfer: Any) -> None:
        with self._lock:
            _call(transfer.release)

    def close(self) -> None:
        with self._lock:
            self._made = None

    @property
    def _agent(self) -> Any:
        if self._made is None:
            raise Broken("this agent was closed")
        return self._made


_agents: weakref.WeakSet[Agent] = weakref.WeakSet()


def _after_fork() -> None:
    """The child must not destroy its copies: it would wait for threads it lacks, and disturb the parent's epoll."""
    for agent in list(_agents):
        made, agent._made = agent._made, None  # noqa: SLF001 (same module)
        if made is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(made.agent))


os.register_at_fork(after_in_child=_after_fork)


def _call(function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:  # NIXL's have no base of their own
        raise Broken(f"{type(error).__name__}: {error}") from error


def _load() -> Any:
    if not _RDMA.exists():
        os.environ.setdefault("UCX_MODULES", "^ib")  # its libraries in the wheel of 1.5.1 crash at exit (libnl-route)
    raising = logging.raiseExceptions
    for name in _MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        logging.raiseExceptions = raising  # which the import changes
        if "NIXL_LOG_LEVEL" not in os.environ:
            logging.getLogger("nixl").setLevel(logging.WARNING)
        return module
    raise ConfigError(f"NIXL is not installed here: {_HINT}")
