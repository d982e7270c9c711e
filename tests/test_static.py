"""Nothing that comes from outside becomes code, and nothing listens everywhere: in the source and in a running service.

Banned imports are in `test_tidy`; here is what hides behind allowed ones."""

from __future__ import annotations

import ast
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from support.served import serving

import perdure
from perdure.errors import ConfigError
from perdure.service.server import Server
from perdure.service.settings import load
from perdure.service.streams import TlsFiles

SRC = Path(__file__).resolve().parent.parent / "src"
CODE = {"eval", "exec", "compile", "__import__"}
UNSAFE = {  # call -> the argument that makes it safe, and its value; None: never
    "torch.load": ("weights_only", True),
    "yaml.load": None,
    "yaml.unsafe_load": None,
    "joblib.load": None,
    "pd.read_pickle": None,
    "ctypes.string_at": None,
    "os.system": None,
    "os.popen": None,
}
ANYWHERE = ("0.0.0.0", "::", "")
LISTENING = ("bind", "create_server", "listen", "start_server", "TCPServer", "HTTPServer", "ThreadingTCPServer")
LISTENERS = {  # who listens, and what keeps other machines out
    "perdure/service/sockets.py": "Unix sockets, 0600",
    "perdure/service/node.py": "loopback, or TLS with client certificates: tests below",
    "perdure/observe/endpoint.py": "loopback, or metrics_public: tests below",
    "perdure/engines/events.py": "in an engine, off unless it names an address; vLLM's protocol has no identities",
}
NOT_SERVED = ("perdure/testing/", "perdure/benchmarks/", "perdure/demo/")


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield f"{path.relative_to(SRC)}:{node.lineno}", ast.unparse(node.func), node


def keyword(node: ast.Call, name: str) -> object:
    found = [one.value for one in node.keywords if one.arg == name]
    return found[0].value if found and isinstance(found[0], ast.Constant) else None


def test_no_input_becomes_code() -> None:
    broken = []
    for place, name, node in calls():
        if name in CODE:
            broken.append(f"{place}: {name}")
        elif name == "msgspec.msgpack.Decoder" and not node.args:
            broken.append(f"{place}: a decoder without a type")
        elif name in UNSAFE:
            safe = UNSAFE[name]
            if safe is None or keyword(node, safe[0]) is not safe[1]:
                broken.append(f"{place}: {name}")
        elif keyword(node, "shell") is True:
            broken.append(f"{place}: shell=True")
        elif keyword(node, "allow_pickle") is True or keyword(node, "weights_only") is False:
            broken.append(f"{place}: {name} with pickle")
    assert not broken, "\n".join(broken)


def test_everybody_who_listens_is_known() -> None:
    """A new listener has to be put into LISTENERS, with what keeps other machines out, and a test of it."""
    found = {
        place.partition(":")[0]
        for place, name, _ in calls()
        if name.rpartition(".")[2] in LISTENING and not place.startswith(NOT_SERVED)
    }
    found |= {
        str(path.relative_to(SRC))
        for path in sorted(SRC.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(one).rpartition(".")[2] in LISTENING for one in node.bases)
    }
    assert found == set(LISTENERS)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", ""])
def test_no_store_is_served_beyond_loopback_without_client_certificates(tmp_path: Path, host: str) -> None:
    with perdure.open(tmp_path / "s", memory=0, capacity="64MiB") as store, pytest.raises(ConfigError, match="TLS"):
        Server(store, socket=tmp_path / "sock", listen=(host, 0))
    with pytest.raises(ConfigError, match="metrics"):
        load({"data": str(tmp_path), "metrics": f"[{host}]:9464" if ":" in host else f"{host}:9464"}, None, {})


def test_tls_asks_for_a_certificate(tmp_path: Path) -> None:
    authority = trustme.CA()
    ours = authority.issue_cert("127.0.0.1")
    files = [tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem")]
    for blob, path in zip((ours.cert_chain_pems[0], ours.private_key_pem, authority.cert_pem), files, strict=True):
        blob.write_to_path(path)
    made = TlsFiles(*files).context(server=True)
    assert made.verify_mode is ssl.CERT_REQUIRED
    assert made.minimum_version is ssl.TLSVersion.TLSv1_3
    with serving(tmp_path / "s", listen=("127.0.0.1", 0), tls=TlsFiles(*files)) as (_, server):
        assert server.node is not None
        assert refused(server.node.address, ssl.create_default_context(cafile=str(files[2])))


def refused(address: tuple[str, int], context: ssl.SSLContext) -> bool:
    """The refusal comes after a handshake of TLS 1.3, with the first bytes."""
    try:
        with (
            socket.create_connection(address, timeout=10) as raw,
            context.wrap_socket(raw, server_hostname=address[0]) as stream,
        ):
            stream.sendall(b"hello")
            return stream.recv(1) == b""
    except (ssl.SSLError, ConnectionError):
        return True


def test_nobody_listens_everywhere_by_default() -> None:
    broken = [
        place
        for place, name, node in calls()
        if name.rpartition(".")[2] in LISTENING
        for constant in ast.walk(node)
        if isinstance(constant, ast.Constant) and constant.value in ANYWHERE and isinstance(constant.value, str)
    ]
    assert not broken, "\n".join(broken)


SCRIPT = """
import sys
seen = []
sys.addaudithook(lambda event, arguments: seen.append((event, arguments)) if event.startswith("pickle.") else None)
from pathlib import Path
import perdure
from perdure.testing.store import FOUND, STORED, chain, keyspace, read, write
from support.served import serving, tcp_address

def main(folder):
    with serving(folder, listen=("127.0.0.1", 0)) as (_, server):
        for address in (folder, tcp_address(server)):
            with perdure.connect(address) as client:
                space = keyspace(client, tenant=f"t{len(str(address))}")
                keys = chain(space, 1, 4)
                assert write(space, keys) == [STORED] * 4
                assert read(space, keys) == [FOUND] * 4
                space.session("s").extend(keys)
                client.service_status()

main(Path(sys.argv[1]))
print(seen)
"""


@pytest.mark.parametrize("flags", [[], ["-O"]])
def test_a_running_service_unpickles_nothing(tmp_path: Path, flags: list[str]) -> None:
    """Python tells of every class that an unpickler looks for."""
    environment = os.environ | {"PYTHONPATH": f"{SRC}{os.pathsep}{Path(__file__).parent}"}
    done = subprocess.run(
        [sys.executable, *flags, "-c", SCRIPT, str(tmp_path / "s")],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
