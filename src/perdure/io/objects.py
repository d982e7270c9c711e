"""Objects of a bucket: made once, read in ranges, deleted. S3 through `obstore`; and a sibling that fails on purpose.

Contract
- `create` never overwrites: of two writers of one name the first wins, and the other one is told. An object is there
  completely or not at all.
- A store that cannot be reached, refuses, or takes longer than `limits.object_call_s` raises ObjectStoreError, which
  says nothing about the object. FileNotFoundError is a verdict: the store answered that there is none.
- Calls block their thread without the GIL. Credentials come from the environment or the machine's role, are used by
  `obstore` alone, and are in no message.
- `file://` URLs are for tests: nothing is fsynced there.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from perdure import limits
from perdure.errors import InvalidArgument
from perdure.io.api import Buffer
from perdure.io.faulty import Fault, FaultPlan

SCHEMES: Final = ("s3", "file")
_MESSAGE_CHARS_MAX: Final = 200
_BEYOND: Final = "InvalidRange"  # nothing of the object lies there
_NO_BUCKET: Final = "NoSuchBucket"  # a wrong address, or a bucket that is gone: no verdict about its objects


class ObjectStoreError(OSError):
    """The object store could not be asked, or did not do it; whether a change happened is unknown."""

    def __init__(self, where: str, why: str):
        super().__init__(errno.EHOSTUNREACH, f"{where}: {why}")


class Objects(Protocol):
    """Objects below one URL. Names are relative paths. Thread-safe. Raises ObjectStoreError, FileNotFoundError."""

    where: str  # the URL

    def create(self, name: str, data: Buffer) -> bool:
        """False, and nothing is changed, if there is one of that name."""
        ...

    def size(self, name: str) -> int: ...

    def read_into(self, name: str, buffers: Sequence[Buffer], offset: int) -> int:
        """Bytes read; fewer than asked for only at the object's end."""
        ...

    def delete(self, name: str) -> None:
        """What is not there is deleted."""
        ...


def check_url(url: str) -> str:
    """The URL without a slash at its end. Raises InvalidArgument."""
    parts = urlsplit(url) if isinstance(url, str) else urlsplit("")
    hint = "'s3://BUCKET/PREFIX' is possible"
    if parts.scheme not in SCHEMES or not (parts.netloc if parts.scheme == "s3" else parts.path.strip("/")):
        raise InvalidArgument(f"cold={masked(str(url))!r}: {hint}")
    if {"@", ":"} & set(parts.netloc) or parts.query or parts.fragment:
        raise InvalidArgument(
            f"cold={masked(url)!r}: {hint}; credentials, endpoint and region come from the environment (AWS_...)"
        )
    return url.rstrip("/")


def masked(url: str) -> str:
    """Without user, password and query, for people to see."""
    return re.sub(r"\?.*", "", re.sub("://.*@", "://", url))


class ObstoreObjects:
    """Objects in S3, or what speaks its language, or (tests) in a directory. Raises InvalidArgument."""

    def __init__(self, url: str, *, call_s: float = limits.object_call_s):
        try:
            import obstore
            from obstore.exceptions import AlreadyExistsError, BaseError
            from obstore.store import from_url
        except ImportError as error:
            raise InvalidArgument(f"cold={masked(url)!r}: {error}; install perdure[cold]") from error
        self.where = check_url(url)
        self._obstore, self._exists, self._errors = obstore, AlreadyExistsError, BaseError
        retry: Any = {"max_retries": limits.object_retries_max, "retry_timeout": timedelta(seconds=call_s)}
        options: dict[str, Any] = {"retry_config": retry}
        if self.where.startswith("s3:"):
            client: Any = {
                "timeout": f"{call_s:g}s", "connect_timeout": f"{limits.object_connect_s:g}s",
                "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true",  # as if none were given
            }  # fmt: skip
            options["client_options"] = client
        else:
            options = {"mkdir": True}
        try:
            self._reads = from_url(self.where, **options)
            if "client_options" in options:  # a segment takes longer than a range
                options["client_options"] = client | {"timeout": f"{limits.object_upload_s:g}s"}
            self._writes = from_url(self.where, **options)
        except (BaseError, OSError, ValueError) as error:
            raise InvalidArgument(f"cold={masked(url)!r}: {_reason(error)}") from None

    def create(self, name: str, data: Buffer) -> bool:
        try:
            self._ask(lambda: self._obstore.put(self._writes, name, data, mode="create", use_multipart=False))
        except self._exists:
            return False
        return True

    def size(self, name: str) -> int:
        return int(self._ask(lambda: self._obstore.head(self._reads, name))["size"])

    def read_into(self, name: str, buffers: Sequence[Buffer], offset: int) -> int:
        wanted = sum(piece.nbytes for piece in buffers)
        try:
            got = memoryview(self._ask(lambda: self._obstore.get_range(self._reads, name, start=offset, length=wanted)))
        except ObjectStoreError as error:
            if _BEYOND in str(error) and self.size(name) <= offset:
                return 0
            raise
        at = 0
        for piece in buffers:
            part = got[at : at + piece.nbytes]
            piece[: part.nbytes] = part
            at += part.nbytes
        return at

    def delete(self, name: str) -> None:
        try:
            self._ask(lambda: self._obstore.delete(self._reads, name))
        except FileNotFoundError:
            return

    def _ask(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except self._exists:
            raise
        except FileNotFoundError as error:
            why = _reason(error)
            if why.startswith(_NO_BUCKET):
                raise ObjectStoreError(self.where, why) from None
            raise FileNotFoundError(errno.ENOENT, f"{self.where}: {why}") from None
        except (self._errors, OSError) as error:
            raise ObjectStoreError(self.where, _reason(error)) from None


def _reason(error: BaseException) -> str:
    """One line: the code that S3 gives (or the kind that `obstore` does), and what the client says of it."""
    text = str(error)
    code = re.search(f"<Code>([A-Za-z]+)</Code>|({_BEYOND})", text)
    line = (text.splitlines() or [type(error).__name__])[0]
    return (f"{code[1] or code[2]}: {line}" if code else line)[:_MESSAGE_CHARS_MAX]


class FaultyObjects:
    """`inner` with the faults of a plan (`io.faulty`), by the names of what files do: create, link (asked after the
    object is there: its outcome is unknown), open (of `size`), preadv, unlink. `torn`: other bytes, no error."""

    def __init__(self, inner: Objects, plan: FaultPlan):
        self.inner, self.plan, self.where = inner, plan, inner.where

    def _strike(self, op: str, name: str, nbytes: int = 0) -> Fault | None:
        fault = self.plan.next(op, name, nbytes)
        if fault is None:
            return None
        if fault.kind == "hang":
            self.plan.wait()
            return None
        if fault.kind in ("short", "torn"):
            return fault
        raise ObjectStoreError(self.where, f"{fault.kind}: {op} {name}")

    def create(self, name: str, data: Buffer) -> bool:
        self._strike("create", name, data.nbytes)
        made = self.inner.create(name, data)
        self._strike("link", name)
        return made

    def size(self, name: str) -> int:
        self._strike("open", name)
        return self.inner.size(name)

    def read_into(self, name: str, buffers: Sequence[Buffer], offset: int) -> int:
        nbytes = sum(piece.nbytes for piece in buffers)
        fault = self._strike("preadv", name, nbytes)
        moved = self.inner.read_into(name, buffers, offset)
        if fault is None:
            return moved
        if fault.kind == "short":
            return fault.prefix(moved)
        last = buffers[-1]
        last[last.nbytes // 2 :] = bytes(last.nbytes - last.nbytes // 2)
        return moved

    def delete(self, name: str) -> None:
        self._strike("unlink", name)
        self.inner.delete(name)


class ObjectFile:
    """One object as a `File` to read from. Opening it asks nobody."""

    native = False
    direct = False
    memory_alignment = 1
    device = -1  # none of the machine's: what is in flight there is not counted with a disk's

    def __init__(self, objects: Objects, name: str, nbytes: int):
        self._objects, self._nbytes, self.path = objects, nbytes, name

    def fileno(self) -> int:
        raise OSError(errno.EBADF, "an object has no descriptor", self.path)

    def size(self) -> int:
        return self._nbytes

    def preadv(self, buffers: Sequence[Buffer], offset: int) -> int:
        return self._objects.read_into(self.path, buffers, offset) if offset < self._nbytes else 0

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int:
        raise self._refusal()

    def allocate(self, offset: int, length: int) -> None:
        raise self._refusal()

    def truncate(self, length: int) -> None:
        raise self._refusal()

    def datasync(self) -> None:
        """It is durable since it was made."""

    def close(self) -> None:
        """Nothing is open."""

    def _refusal(self) -> OSError:
        return OSError(errno.EROFS, "objects are never changed", self.path)
