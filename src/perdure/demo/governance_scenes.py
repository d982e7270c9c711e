"""`perdure demo-governance`: two tenants on one service: what they share, what they cannot, what is kept and what goes.

A service with a policy, encryption and an audit log, in a process of its own. acme stores a system prompt and two
sessions; globex finds nothing of it, then the published system prompt and nothing else, then nothing again. One session
is put on hold, and all of acme erased: that waits, also when the service is killed meanwhile, until the hold is taken
off. Then acme is gone, globex is not, and `stranger.py` verifies the receipt in a process that has nothing of ours.

No model: blocks are random bytes, each compared after every read. Nothing is left in the directory.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from perdure.demo.process import DemoError, Progress
from perdure.demo.report import Stage, show_checks
from perdure.demo.service import Service
from perdure.errors import AccessDenied
from perdure.governance import audit_look
from perdure.keys import KVLayout
from perdure.service.client import RemoteStore, connect

BLOCKS: Final = 16  # of the system prompt, of each session, and of what globex has
_TOKENS, _BYTES = 16, 128 * 1024  # of a block
_IDENTITY: Final[dict[str, Any]] = {
    "model": "demo", "weights": "sha256:" + "0" * 64, "codec": "off",
    "layout": KVLayout(_TOKENS, _BYTES, dtype="bfloat16", order="layer,kv,head,token,dim"),
}  # fmt: skip
_SYSTEM, _CHAT_1, _CHAT_2, _OTHER = range(4)
_WAIT_S: Final = 60.0
_STRANGER: Final = "stranger.py"

TITLES = {
    "store": "acme stores a prompt, two sessions",
    "apart": "globex asks for them",
    "published": "publish the prompt; end that",
    "held": "hold a session, erase acme",
    "killed": "kill the service, start it again",
    "erased": "take the hold off",
    "verified": "a stranger verifies the receipt",
}


def play(directory: Path) -> dict[str, Any]:
    """All scenes. Returns a JSON-able outcome: `ok`, `checks` by name, `receipt`. Raises PerdureError."""
    began = time.monotonic()
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="run-", dir=directory.resolve()) as work, Stage(TITLES) as stage:
        told = _Play(stage, Path(work)).run()
    return {
        "ok": all(told["checks"].values()), **told, "scenes_s": stage.seconds,
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


class _Play:
    """The scenes, and the checks that they came to."""

    def __init__(self, stage: Stage, work: Path):
        self._stage, self._work, self.checks = stage, work, dict[str, bool]()
        self._ends, self._clients = ExitStack(), dict[str, RemoteStore]()
        # sockets have short names only
        self._sockets = Path(self._ends.enter_context(tempfile.TemporaryDirectory(prefix="perdure-")))
        options = ("--policy", str(_policy(work / "policy", self._sockets)), "--audit", "on", "--encryption", "on")
        self._service = Service(work / "store", *options)

    def run(self) -> dict[str, Any]:
        with self._ends, self._service:
            for name in TITLES:
                self._stage.during(name, getattr(self, f"_{name}"))
        return {"checks": self.checks, "receipt": self._receipt}

    def _client(self, name: str) -> RemoteStore:
        if name not in self._clients:
            self._clients[name] = self._ends.enter_context(connect(self._sockets / f"{name}.sock"))
        return self._clients[name]

    def _space(self, tenant: str) -> Any:
        return self._client(f"{tenant}-engine").keyspace(tenant=tenant, **_IDENTITY)

    def _store(self, note: Progress) -> None:
        self._service.start()
        acme, globex = self._space("acme"), self._space("globex")
        self._acme = acme
        stored = [_write(acme, part) for part in (_SYSTEM, _CHAT_1, _CHAT_2)] + [_write(globex, _OTHER)]
        for name, part in (("chat-1", _CHAT_1), ("chat-2", _CHAT_2)):
            stored.append(bool(acme.session(name, subject="user-7").extend(acme.chain(_tokens(part)))))
        self.checks["acme stored a system prompt and two sessions, globex something of its own"] = all(stored)

    def _apart(self, note: Progress) -> None:
        globex, parts = self._space("globex"), (_SYSTEM, _CHAT_1, _CHAT_2)
        nothing = [globex.lookup(globex.chain(_tokens(part))) == 0 for part in parts]
        stolen = self._acme.chain(_tokens(_SYSTEM))
        nothing += [globex.lookup(stolen) == 0, _read(globex, _SYSTEM, stolen) == 0]
        self.checks["globex found nothing of it, by its own names or by acme's"] = all(nothing)

    def _published(self, note: Progress) -> None:
        operator = self._client("operator")
        operator.publish(self._acme.digest, _tokens(_SYSTEM), name="system prompt", readers=["globex"])
        globex = self._space("globex")
        found = [_read(globex, part, globex.chain(_tokens(part))) for part in (_SYSTEM, _CHAT_1, _CHAT_2)]
        self.checks["published, globex read exactly the system prompt, every byte of it"] = found == [BLOCKS, 0, 0]
        operator.unpublish("system prompt")
        keys = globex.chain(_tokens(_SYSTEM))
        self.checks["unpublished, nothing of it any more"] = globex.lookup(keys) == _read(globex, _SYSTEM, keys) == 0

    def _held(self, note: Progress) -> None:
        operator = self._client("operator")
        self._hold = operator.hold(tenant="acme", session="chat-1", reason="case 4711")
        try:
            self._client("acme-engine").erase(tenant="acme")
            self.checks["an engine may not erase"] = False
        except AccessDenied:
            self.checks["an engine may not erase"] = True
        self._order = operator.erase(tenant="acme")
        waits = [one["id"] for one in operator.lifecycle("acme")["erasures"]] == [self._order["id"]]
        self.checks["the erasure of acme waits for the hold, and nothing is gone"] = (
            self._order["state"] == "held" and waits and self._all_of_acme()
        )

    def _killed(self, note: Progress) -> None:
        self._service.kill()
        self._service.start()
        self.checks["so it does in the next process, after SIGKILL"] = (
            self._client("operator").erasure(self._order["id"])["state"] == "held" and self._all_of_acme()
        )

    def _all_of_acme(self) -> bool:
        acme = self._space("acme")
        return all(_read(acme, part, acme.chain(_tokens(part))) == BLOCKS for part in (_SYSTEM, _CHAT_1, _CHAT_2))

    def _erased(self, note: Progress) -> None:
        operator, order = self._client("operator"), self._order["id"]
        before = self._space("acme")
        operator.unhold(tenant="acme", hold=self._hold["id"])
        until = time.monotonic() + _WAIT_S
        while (told := operator.erasure(order))["state"] != "erased":
            if time.monotonic() > until:
                raise DemoError(f"the erasure is still {told['state']} after {_WAIT_S:.0f} s: {told['why']}")
            time.sleep(0.05)
        self._receipt = told["receipt"]
        after, globex = self._space("acme"), self._space("globex")
        left = [
            _read(space, part, space.chain(_tokens(part)))
            for space in (before, after) for part in (_SYSTEM, _CHAT_1, _CHAT_2)
        ]  # fmt: skip
        self.checks["with the hold off acme is gone: by the names it had, and by those it gets now"] = not any(left)
        self.checks["its sessions too"] = not operator.sessions("acme") and after.find_session("chat-1") is None
        self.checks["globex has what it had"] = _read(globex, _OTHER, globex.chain(_tokens(_OTHER))) == BLOCKS
        self.checks["the receipt says that the keys were destroyed"] = "\ndone keys destroyed\n" in str(
            self._receipt["statement"]
        )

    def _verified(self, note: Progress) -> None:
        """The key is from the operator's side, not from the receipt."""
        folder = audit_look.folder_of(self._work / "store")
        key = (folder / "key.pub").read_text().strip()
        self.checks["a stranger with 20 lines and `cryptography` verifies it"] = self._stranger(self._receipt, key)
        forged = self._receipt | {"statement": self._receipt["statement"].replace("tenant acme", "tenant globex")}
        self.checks["and refuses a forged one"] = not self._stranger(forged, key)
        self._ends.pop_all().close()
        self._service.end()
        self.checks["the whole audit log verifies, hold and erasure in it"] = audit_look.verify(folder, key).ok and (
            {"publish", "unpublish", "hold", "erase", "unhold", "erased"}
            <= {event.op for _, event in audit_look.records(folder)}
        )

    def _stranger(self, receipt: dict[str, str], key: str) -> bool:
        path, program = self._work / "receipt.json", Path(__file__).with_name(_STRANGER)
        path.write_text(json.dumps(receipt))
        command = [sys.executable, "-I", str(program), str(path), key]
        return subprocess.run(command, capture_output=True, timeout=_WAIT_S, check=False).returncode == 0


def _policy(path: Path, sockets: Path) -> Path:
    (path / "tenants").mkdir(parents=True)
    (path / "rules").mkdir()
    listed = (("acme-engine", "engine", ["acme"]), ("globex-engine", "engine", ["globex"]),
              ("operator", "operator", ["acme", "globex"]))  # fmt: skip
    (path / "principals.toml").write_text(
        "".join(
            f'[[principal]]\nname = "{name}"\nroles = ["{role}"]\ntenants = {json.dumps(tenants)}\n'
            f"socket = {json.dumps(str(sockets / f'{name}.sock'))}\n\n"
            for name, role, tenants in listed
        )
    )
    for tenant, terms in (("acme", "publication = true"), ("globex", 'scope = "published"')):
        (path / "tenants" / f"{tenant}.toml").write_text(
            f'tenant = "{tenant}"\nversion = 1\nencryption = "required"\n{terms}\n'
        )
    return path


def _tokens(part: int) -> NDArray[np.uint32]:
    return np.arange(BLOCKS * _TOKENS, dtype=np.uint32) + np.uint32(part << 16)


def _bytes(part: int) -> NDArray[np.uint8]:
    return np.random.default_rng(part).integers(0, 256, (BLOCKS, _BYTES), np.uint8)


def _write(space: Any, part: int) -> bool:
    return bool(space.write(space.chain(_tokens(part)), _bytes(part)).durable)


def _read(space: Any, part: int, keys: Any) -> int:
    """How many blocks of a part were delivered. Raises DemoError if one has a wrong byte."""
    into = np.zeros((BLOCKS, _BYTES), np.uint8)
    found = space.read(keys, into).statuses == 0
    if (into[found] != _bytes(part)[found]).any():
        raise DemoError("a block was delivered with wrong bytes")
    return int(found.sum())


def show(outcome: dict[str, Any]) -> None:
    """The outcome for people, on stdout."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    console.print(Text(f"\nthe receipt\n{outcome['receipt']['statement']}"), highlight=False, soft_wrap=True)
    console.print(Text(f"{outcome['seconds']} s in all\n"), highlight=False)
    show_checks(outcome["checks"])
