"""The isolation audit: that it finds a leak, and does not pass what tells nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from support.policies import policy_directory
from support.served import serving

from perdure.cli import main
from perdure.errors import InvalidArgument, ServiceUnavailable
from perdure.observe import isolation
from perdure.observe.isolation import EndpointProbe, Verdict, auc, audit, ks_p

HIT_S, MISS_S = 0.010, 0.030


class Pretended:
    """times: seconds of a kind. hits: what is told of it."""

    def __init__(self, times: dict[str, float], hits: dict[str, bool | None]):
        self._times, self._hits, self._rng = times, hits, np.random.default_rng(5)

    def store(self, sample: int) -> None:
        pass

    def ask(self, kind: str, sample: int) -> tuple[float, bool | None]:
        return float(self._rng.normal(self._times[kind], 0.002)), self._hits[kind]


def judged(other_s: float, same_s: float = HIT_S, *, same: bool | None = True, other: bool | None = False) -> Verdict:
    times = {"same": same_s, "other": other_s, "fresh": MISS_S}
    return audit(Pretended(times, {"same": same, "other": other, "fresh": None if other is None else False}), 100)


def test_isolated_means_that_nothing_can_be_told() -> None:
    verdict = judged(MISS_S)
    assert verdict.isolated
    assert (verdict.problems, verdict.inconclusive) == ((), "")
    assert verdict.auc < 0.65
    assert verdict.hits == {"same": 100, "other": 0, "fresh": 0}


def test_a_leak_by_time_is_found() -> None:
    verdict = judged(HIT_S, same=None, other=None)
    assert not verdict.isolated
    assert "by time" in verdict.problems[0]
    assert verdict.auc > 0.99


def test_a_leak_by_hits_is_found_whatever_the_time() -> None:
    assert "hit 100 of 100 prefixes" in judged(MISS_S, other=True).problems[0]


def test_what_tells_nothing_does_not_pass() -> None:
    for verdict in (judged(MISS_S, MISS_S, same=False), judged(MISS_S, MISS_S), judged(MISS_S, MISS_S, same=None)):
        assert verdict.inconclusive
        assert not verdict.isolated
    with pytest.raises(InvalidArgument):
        audit(Pretended({}, {}), 5)


def test_the_statistics() -> None:
    rng = np.random.default_rng(7)
    assert ks_p([1, 2, 3, 4], [1, 2, 3, 4]) == 1.0
    assert ks_p(np.zeros(250), np.ones(250)) < 1e-50
    # one in twenty of alike samples is below 0.05, about
    alike = [ks_p(rng.normal(size=200), rng.normal(size=200)) for _ in range(400)]
    assert 0.02 < np.mean(np.array(alike) < 0.05) < 0.09
    assert auc([1, 2], [3, 4]) == auc([3, 4], [1, 2]) == 1.0
    assert auc([1, 1], [1, 1]) == 0.5


# --- live
def run(*arguments: str) -> tuple[int, Any]:
    done = CliRunner().invoke(main, ["audit-isolation", *arguments, "--json"])
    return done.exit_code, json.loads(done.output) if done.exit_code < 2 else done.output


def test_two_tenants_of_a_service(tmp_path: Path) -> None:
    """Hits only: what the times say depends on the machine."""
    small = ["--samples", "20", "--blocks", "4", "--block-bytes", "4096"]
    with serving(tmp_path / "s", policy=policy_directory(tmp_path / "p", sockets=tmp_path)):
        _, told = run(str(tmp_path / "engine-a.sock"), str(tmp_path / "engine-b.sock"), *small)
        assert told["hits"] == {"same": 20, "other": 0, "fresh": 0}
        status, told = run(str(tmp_path / "engine-a.sock"), str(tmp_path / "engine-a2.sock"), *small)
        assert (status, told["hits"]["other"], told["isolated"]) == (1, 20, False)  # one tenant's principals share
    with serving(tmp_path / "t"):
        _, told = run(str(tmp_path / "t"), "--tenant", "a", "--tenant", "b", *small)
        assert told["hits"] == {"same": 20, "other": 0, "fresh": 0}
        assert run(str(tmp_path / "t"), "--tenant", "a", "--tenant", "a", *small)[1]["hits"]["other"] == 20


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name the socket"),
        (["a"], "--tenant must be given twice"),
        (["a", "b", "--tenant", "x"], "--tenant must be given twice"),
        (["--endpoint", "http://127.0.0.1:1/x"], "--header must be given twice"),
        (["--endpoint", "ftp://x", "--header", "a: b", "--header", "a: c"], "write http://"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], says: str) -> None:
    done = CliRunner().invoke(main, ["audit-isolation", *arguments])
    assert done.exit_code == 2
    assert says in done.output


class Endpoint(ThreadingHTTPServer):
    """Caches prompts, by caller if `isolated`, and says so."""

    def __init__(self, isolated: bool):
        super().__init__(("127.0.0.1", 0), Handler)
        self.isolated, self.seen, self.told = isolated, set[tuple[str, str]](), True


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = (self.headers["Authorization"] if self.server.isolated else "", asked["prompt"])
        usage = {"prompt_tokens_details": {"cached_tokens": 16 if name in self.server.seen else 0}}
        self.server.seen.add(name)
        body = json.dumps({"choices": [{"text": "x"}]} | ({"usage": usage} if self.server.told else {})).encode()
        self.send_response(200 if asked["model"] == "m" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[Callable[[bool], tuple[Endpoint, str]]]:
    servers: list[Endpoint] = []

    def start(isolated: bool) -> tuple[Endpoint, str]:
        servers.append(Endpoint(isolated))
        threading.Thread(target=servers[-1].serve_forever, name="endpoint").start()
        return servers[-1], f"http://127.0.0.1:{servers[-1].server_address[1]}/v1/completions"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("isolated", [True, False])
def test_an_endpoint_through_any_engine(endpoint: Callable[[bool], tuple[Endpoint, str]], isolated: bool) -> None:
    _, url = endpoint(isolated)
    headers = ["--header", "Authorization: Bearer a", "--header", "Authorization: Bearer b"]
    _, told = run("--endpoint", url, "--model", "m", "--samples", "20", *headers)
    assert told["hits"] == {"same": 20, "other": 0 if isolated else 20, "fresh": 0}
    assert any("prefixes that only tenant A" in one for one in told["problems"]) is not isolated


def test_an_endpoint_that_tells_nothing_or_fails(endpoint: Callable[[bool], tuple[Endpoint, str]]) -> None:
    server, url = endpoint(True)
    server.told = False
    probe = EndpointProbe(url, "m", [{}, {}], words=8)
    assert probe.ask("same", 5)[1] is None
    with pytest.raises(ServiceUnavailable, match="status 404"):
        EndpointProbe(url, "other", [{}, {}], words=8).store(1)
    with pytest.raises(ServiceUnavailable, match="is it up"):
        EndpointProbe("http://127.0.0.1:1/v1", "m", [{}, {}], words=8).store(1)
    assert isolation._cached(b"x") is None
