"""What was asked to be erased, as files: so that neither a crash nor a lost catalog forgets it.

DIR/control/erasures/<id>.order     what was asked for, until it is done
DIR/control/erasures/<id>.survey    the same, of one that has waited, with what there was when it began
DIR/control/erasures/<id>.begun     where many hosts share the store: the same, and none of them can read it now
DIR/control/erasures/<id>.keys      the blocks it concerns: from here on they are gone, and nothing stops it
DIR/control/erasures/<id>.receipt   it is done
"""

from __future__ import annotations

import contextlib
from typing import Final

import msgspec

from perdure.core import Core
from perdure.errors import InvalidArgument

FOLDER: Final = "control/erasures"


class Order(msgspec.Struct, omit_defaults=True):
    """As `selection.About`; forgotten at the end. epoch: of a tenant, the first one that stays."""

    id: str
    kind: str
    tenant: str
    tenant_id: str
    at_s: float
    who: str = ""
    target: str = ""
    subject: str = ""
    keys: list[str] = []
    epoch: int = 0
    blocks: int = 0  # what there was when it was ordered
    bytes: int = 0
    keyed: bool = False  # all of it was encrypted
    hosts: list[int] = []  # see `Epochs.wait`
    waited: bool = False  # for a hold: what there is of it is looked up when it begins


def load_orders(core: Core, orders: dict[str, Order], begun: set[str]) -> list[str]:
    """Put those into `orders` that it does not have, and into `begun` those that nobody can read any more on any host;
    the names in the folder. Raises OSError."""
    files = core.files
    names = files.list(FOLDER)
    for name in names:
        stem, _, kind = name.partition(".")
        if kind == "order" and f"{stem}.receipt" not in names and stem not in orders:
            newest = next(one for one in ("begun", "survey", "order") if f"{stem}.{one}" in names)
            with contextlib.suppress(FileNotFoundError):  # another host has just ended it
                orders[stem] = msgspec.json.decode(files.read(f"{FOLDER}/{stem}.{newest}"), type=Order)
                if newest == "begun":
                    begun.add(stem)
        elif kind != "receipt" and f"{stem}.receipt" in names and not core.read_only:
            with contextlib.suppress(OSError):  # what was asked for is forgotten; tried again at the next opening
                files.unlink(f"{FOLDER}/{name}")
    return names


def checked(order: str) -> str:
    if not (isinstance(order, str) and len(order) == 16 and all(one in "0123456789abcdef" for one in order)):
        raise InvalidArgument(f"erasure {order!r}: an id has 16 hex digits")
    return order
