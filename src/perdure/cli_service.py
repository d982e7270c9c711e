"""The commands about the service: serve, config, doctor, top; and asking it. Registered by `cli`; imports only click at
the top.

Exit status as in `cli`: 0 fine, 1 bad news (`doctor`), 2 the command could not be carried out.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
_PATH = click.Path(path_type=Path)
_FLAGS = (  # option, metavar, help; the key is the option's name. Values are checked by the settings, not by click.
    ("--data", "DIR", "Directory of the store."),
    ("--catalog", "URL", "Cluster that holds the catalog of a shared DIR, valkey://h1,h2,h3."),
    ("--state-dir", "DIR", "With --catalog: local directory of this service alone."),
    ("--capacity", "SIZE", "What the segments may occupy, for example 200GiB."),
    ("--memory", "SIZE", "DRAM of the whole node, for example 8GiB."),
    ("--socket", "PATH", "Unix socket of the engines; perdure.sock in the state directory or DIR if not given."),
    ("--listen", "HOST:PORT", "Serve other hosts too; beyond loopback only with TLS."),
    ("--tls-cert", "FILE", "Certificate chain of this node (PEM)."),
    ("--tls-key", "FILE", "Private key of the certificate (PEM)."),
    ("--tls-ca", "FILE", "Authority that signs the clients' certificates (PEM)."),
    ("--policy", "DIR", "Principals, terms and rules; without it whoever connects may ask for any tenant."),
    ("--metrics", "HOST:PORT", "Address of /metrics, /healthz, /readyz; empty: off."),
    ("--mirror", "DIR", "Second directory, for retained blocks."),
    ("--cold", "URL", "Bucket for what the disk has no room for: s3://BUCKET/PREFIX, off, drop; else as last time."),
    ("--cold-capacity", "SIZE", "What objects there may take, for example 10TiB."),
    ("--codec", "MODE", "Lossless compression: auto, on, off."),
    ("--admission", "MODE", "Which blocks are stored: always, never, value (reuse against wear)."),
    ("--audit", "MODE", "Audit log: auto (as last time, at first off), off, on, reads (every read by message)."),
    ("--encryption", "MODE", "Encrypt new segments: auto (as last time, at first off), on, off, tenants:NAME,NAME."),
    ("--kek", "WHERE", "What wraps the keys: file:PATH, vault:URL#KEY or pkcs11:URI."),
    ("--cpus", "LIST", "CPUs the service may use, for example 0-3,7."),
    ("--nice", "NUMBER", "Scheduling priority, -20 to 19."),
    ("--log-level", "LEVEL", "debug, info, warning or error."),
    ("--log-format", "FORM", "json or text."),
    ("--drain-s", "SECONDS", "How long running calls may take after SIGTERM."),
    ("--clients-max", "NUMBER", "Clients at one time."),
)
_SWITCHES = (
    ("--hugepages/--no-hugepages", "Put the pool into huge pages."),
    ("--metrics-public/--no-metrics-public", "Metrics may be reachable from other machines."),
)


def _settings_options(command: Callable[..., None]) -> Callable[..., None]:
    for switch, text in reversed(_SWITCHES):
        command = click.option(switch, default=None, help=text)(command)
    command = click.option(
        "--root", "roots", metavar="DIR", multiple=True, callback=lambda _, __, given: given or None,
        help="One more directory for segments, on a device of its own; as often as there are any.",
    )(command)  # fmt: skip
    for option, metavar, text in reversed(_FLAGS):
        command = click.option(option, metavar=metavar, default=None, help=text)(command)
    return click.option("--config", type=_PATH, metavar="FILE", help="TOML file of settings.")(command)


@click.command()
@_settings_options
def serve(config: Path | None, **flags: Any) -> None:
    """Run the service of this host: one store, shared by any number of engines.

    Every option can also be written into the file (as drain_s = 5) or the environment (PERDURE_DRAIN_S=5).
    """
    from perdure.service import process, settings

    sys.exit(process.run(settings.load(flags, config, os.environ).settings))


@click.command("config")
@_settings_options
@_JSON
def show_config(config: Path | None, as_json: bool, **flags: Any) -> None:
    """Print the settings that `serve` would run with, and where each one comes from."""
    from perdure.catalogs import masked
    from perdure.service import settings

    loaded = settings.load(flags, config, os.environ)
    values = loaded.settings.model_dump(mode="json")
    values["catalog"] = masked(values["catalog"])
    if as_json:
        click.echo(json.dumps({key: {"value": values[key], "origin": loaded.origins[key]} for key in values}, indent=2))
        return
    width = max(map(len, values))
    for key, value in values.items():
        shown = "" if value is None else json.dumps(value)
        click.echo(f"{key:{width}}  {shown:24}  {loaded.origins[key]}")


@click.command()
@click.argument("directory", metavar="DIR", type=_PATH)
@click.option("--memory", metavar="SIZE", default="1GiB", show_default=True, help="DRAM the service is to have.")
@click.option("--capacity", metavar="SIZE", default=None, help="What the segments are to occupy.")
@_JSON
def doctor(directory: Path, memory: str, capacity: str | None, as_json: bool) -> None:
    """Is this machine fit to serve a store from DIR? Exit status 1 if something is bad."""
    from dataclasses import asdict

    from perdure.observe.doctor import Subject, examine
    from perdure.options import parse_size

    room = None if capacity is None else parse_size(capacity, "capacity")
    checks = examine(Subject(directory, parse_size(memory, "memory"), room))
    if as_json:
        click.echo(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            click.echo(f"{check.verdict:4}  {check.name:{width}}  {check.found}")
            if check.todo:
                click.echo(f"{'':{width + 8}}-> {check.todo}")
    sys.exit(1 if any(check.verdict == "bad" for check in checks) else 0)


@click.command()
@click.option(
    "--socket",
    "path",
    type=_PATH,
    metavar="PATH",
    help="Socket of the service; else from PERDURE_SOCKET or PERDURE_DATA.",
)
@click.option("--once", is_flag=True, help="Look for one second, print, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; implies --once.")
def top(path: Path | None, once: bool, as_json: bool) -> None:
    """What a running service does: memory, clients, calls, hits, rates."""
    import threading
    import time

    from perdure.observe import top as live

    if path is None:
        from perdure.service import settings

        path = settings.load({}, None, os.environ).settings.socket_path()
    from perdure.service.client import connect

    connection = connect(path)
    try:
        if not once and not as_json and sys.stdout.isatty():
            with contextlib.suppress(KeyboardInterrupt):
                live.show(connection.service_status, threading.Event().wait)
            return
        before = live.sample(connection.service_status)
        time.sleep(live.PERIOD_S)
        view = live.derive(before, live.sample(connection.service_status))
    finally:
        connection.close()
    if as_json:
        click.echo(json.dumps(view, indent=2))
        return
    for name, value in live.rows(view):
        click.echo(f"{name:16}{value}")


def explained_by_service(directory: Path, key: bytes) -> dict[str, Any] | None:
    """What the service of a directory knows of a block. None if none answers on DIR/perdure.sock, or one of another
    version."""
    from perdure import limits
    from perdure.errors import ProtocolError, ServiceBusy, ServiceUnavailable
    from perdure.service.client import connect
    from perdure.service.sockets import SOCKET_NAME

    if not (directory / SOCKET_NAME).is_socket():
        return None
    try:
        with connect(directory, name="perdure explain", wait_s=limits.reconnect_s_default) as service:
            return service.explain(key) | {"answered_by": "service"}
    except (ServiceUnavailable, ServiceBusy, ProtocolError):
        return None


def root_rows(roots: dict[str, Any]) -> list[tuple[str, str]]:
    """What `perdure status` says of several roots."""
    rows = [
        (f"root {one['root']}", f"{one['path']}: {one['why'] or one['state']}, {one['free_bytes'] >> 30} GiB free")
        for one in roots["list"]
    ]
    if roots["single_copies"]:
        rows.append(("COPIES", f"{roots['single_copies']} retained segments have no second copy at hand"))
    return rows


@click.command("replace-root")
@click.argument("directory", metavar="DIR", type=_PATH)
@click.argument("number", type=int)
@click.argument("place", metavar="NEW_DIR", type=_PATH)
def replace_root(directory: Path, number: int, place: Path) -> None:
    """Put the empty NEW_DIR in the place of root NUMBER of the store in DIR, whose device is lost for good.

    What was stored there only is given up; retained blocks are copied back from their other root. The store must not be
    open."""
    from perdure.roots import replace

    replace(directory, number, place)
    click.echo(f"root {number} of {directory} is now {place}, and empty; open the store to have it filled")


COMMANDS: tuple[click.Command, ...] = (serve, show_config, doctor, top, replace_root)
