"""Structured logs: one line per event on stderr, as JSON or as text.

    log = logs.get("service")
    log.info("ready", extra=logs.fields(socket=path, clients=3))

Contract
- The message is the event's name, what belongs to it are fields; both forms carry the same.
- A line is a line: control characters are escaped, a field is cut at 1024 characters, bytes are shown as at most 16
  hex digits. So neither keys nor contents of blocks can get into a log as a whole.
- Never raises into the caller, never writes anywhere but to the stream it was given.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Mapping
from typing import Any, Final, TextIO

_ROOT: Final = "perdure"
_FIELDS: Final = "perdure_fields"
_HEX_DIGITS_MAX: Final = 16
_FIELD_CHARACTERS_MAX: Final = 1024
_WHOLE_KEY: Final = re.compile(r"[0-9a-fA-F]{64,}")


def get(name: str) -> logging.Logger:
    """The logger of one part of the service."""
    return logging.getLogger(f"{_ROOT}.{name}")


def fields(**values: Any) -> dict[str, Any]:
    """What belongs to an event, for `extra=`."""
    return {_FIELDS: values}


def set_up(level: str, form: str, stream: TextIO | None = None) -> logging.Handler:
    """Log to a stream (stderr) from now on, and nowhere else. Returns the handler, for `take_down`."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    root = logging.getLogger(_ROOT)
    for old in tuple(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    root.propagate = False
    return handler


def take_down(handler: logging.Handler) -> None:
    root = logging.getLogger(_ROOT)
    root.removeHandler(handler)
    root.setLevel(logging.NOTSET)
    root.propagate = True


class JsonLines(logging.Formatter):
    """{"time": ..., "level": ..., "logger": ..., "event": ..., fields...}"""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(dict(_parts(record)), default=str)  # ASCII only, so a line stays a line


class TextLines(logging.Formatter):
    """2026-12-02T10:00:00.000Z INFO service: ready socket=/x/perdure.sock"""

    def format(self, record: logging.LogRecord) -> str:
        parts = dict(_parts(record))
        head = [parts.pop(name) for name in ("time", "level", "logger", "event")]
        tail = "".join(f" {name}={_word(value)}" for name, value in parts.items())
        return f"{head[0]} {head[1].upper()} {head[2]}: {_plain(head[3])}{tail}"


def _parts(record: logging.LogRecord) -> list[tuple[str, Any]]:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    parts: list[tuple[str, Any]] = [
        ("time", f"{stamp}.{int(record.msecs):03d}Z"),
        ("level", record.levelname.lower()),
        ("logger", record.name.removeprefix(f"{_ROOT}.")),
        ("event", _cut(record.getMessage())),
    ]
    given: Mapping[str, Any] = getattr(record, _FIELDS, {})
    taken = {name for name, _ in parts}
    parts += [(f"{name}_" if name in taken else name, _shown(value)) for name, value in given.items()]
    if record.exc_info and record.exc_info[1] is not None:
        parts.append(("error", _cut(f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}")))
        parts.append(("trace", logging.Formatter().formatException(record.exc_info)))
    return parts


def _shown(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        digits = bytes(value[:_HEX_DIGITS_MAX]).hex()
        return digits if len(digits) <= _HEX_DIGITS_MAX else f"{digits[:_HEX_DIGITS_MAX]}…"
    return _cut(str(value))


def _cut(text: str) -> str:
    text = _WHOLE_KEY.sub(lambda found: f"{found[0][:_HEX_DIGITS_MAX]}…", text)
    return text if len(text) <= _FIELD_CHARACTERS_MAX else f"{text[:_FIELD_CHARACTERS_MAX]}…"


def _plain(text: str) -> str:
    return text if text.isprintable() else json.dumps(text)


def _word(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(text)
