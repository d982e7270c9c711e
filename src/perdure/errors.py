"""One error hierarchy, one kind per failure that a caller can act on.

Errors are raised for calls that cannot be carried out as asked. What happens to single blocks of a call that was
carried out (missing, corrupt, denied, late, rejected) is a status in the report, never an exception.
"""

from __future__ import annotations


class PerdureError(Exception):
    """Base of all errors raised by Perdure."""


class InvalidArgument(PerdureError, ValueError):
    """A value passed by the caller is unusable: what, where and what to pass instead is in the message."""


class BufferMismatch(InvalidArgument):
    """A buffer has the wrong size, is read-only, not contiguous or overlaps another one of the same call."""


class UnknownOption(InvalidArgument):
    """An option or configuration key does not exist; the message names the nearest one that does."""


class ConfigError(PerdureError, ValueError):
    """A setting of the service is unusable; the message says which, where it came from and what to write instead."""


class StorePathError(PerdureError, OSError):
    """The store's directory is missing, not a directory, or cannot be written."""


class RootUnavailable(PerdureError, OSError):
    """A directory that holds segments of the store is not there now (not mounted, another one is); what lies in it is
    not lost. The message says which, and what to do."""


class FormatError(PerdureError):
    """What lies on the disk is not a Perdure store, or was written by a newer format version."""


class StoreLocked(PerdureError):
    """Another process has the directory open for writing; the message names its host, pid and boot id."""


class StoreClosed(PerdureError):
    """The store was closed, or this process is a fork()ed child of the one that opened it."""


class ReadOnlyStore(PerdureError):
    """A write was asked of a store that was opened read-only."""


class StaleFence(PerdureError):
    """A lease or segment ownership ended and someone else holds it; nothing was written or published."""


class CatalogError(PerdureError):
    """The catalog could not carry out the operation (full, I/O error, damaged); nothing was changed."""


class CatalogUnavailable(CatalogError):
    """Part of the catalog's cluster did not answer, or was not replicated, within the call's time. Of a change it is
    unknown whether it happened: read it again."""


class OwnershipLost(CatalogError):
    """This process was silent for longer than its lease and another one took its segments over; nothing was published.
    It goes on with segments of its own: write again."""


class Erased(CatalogError):
    """The tenant, or the blocks, were erased meanwhile; nothing was published. Open the keyspace again: it has other
    names now."""


class ServiceUnavailable(PerdureError):
    """No service answers at the address, or it ended and did not come back within the call's deadline."""


class ServiceBusy(PerdureError):
    """The service has no room for this client or its memory; the message says which limit, and what to raise."""


class ProtocolError(PerdureError):
    """The other side said something that is not the protocol, or speaks another version of it."""


class AuditUnavailable(PerdureError):
    """The audit log cannot take records (disk full, I/O error): what changes something is refused until it can."""


class AuditDamaged(PerdureError):
    """The audit log is not what was signed: cut short, edited, or not a log; the message says where."""


class KeyUnavailable(PerdureError):
    """A key that is needed cannot be had: its file or its key service is missing, slow, or another one than before."""


class KeyDestroyed(KeyUnavailable):
    """A key was destroyed on purpose: what it protected can never be read again."""


class PolicyError(PerdureError, ValueError):
    """A policy, principal or matrix file is unusable; the message says which, where, and what to write instead."""


class AccessDenied(PerdureError):
    """Policy does not let this caller do that, or its token or capability is not valid (any more)."""
