"""`perdure.open`: a store in this process, with a policy or without."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, overload

from perdure.errors import InvalidArgument
from perdure.store import Store
from perdure.store import open as open_store

if TYPE_CHECKING:
    from perdure.service.embedded import GovernedStore


@overload
def open(path: str | os.PathLike[str], *, policy: None = None, **options: Any) -> Store: ...  # noqa: A001


@overload
def open(  # noqa: A001
    path: str | os.PathLike[str], *, policy: str | os.PathLike[str], principal: str, **options: Any
) -> GovernedStore: ...


def open(path: str | os.PathLike[str], *, policy: str | os.PathLike[str] | None = None, **options: Any) -> Any:  # noqa: A001 (perdure.open is its public name)
    """As `perdure.store.open`, with two options more.

    policy: directory of principals, terms and rules that every call is held to. principal: who this process is there;
    it needs `embedded = true`. See docs/policy.md.

    Raises PolicyError: the policy is not valid, or lets the principal open no store; nothing was opened or created.
    """
    if policy is None:
        if "principal" in options:
            raise InvalidArgument("principal=...: means nothing without a policy; pass policy=DIR too")
        return open_store(path, **options)
    principal = options.pop("principal", None)
    if not isinstance(principal, str):
        raise InvalidArgument(f"principal={principal!r}: name who this process is in the policy")
    from perdure.service.embedded import open_governed

    return open_governed(path, policy, principal, options)
