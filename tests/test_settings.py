"""Settings of the service: where each value comes from, and what happens to one that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from perdure import limits
from perdure.cli import main
from perdure.errors import ConfigError, PerdureError
from perdure.service import settings
from perdure.service.settings import Loaded, load, parse_cpus
from perdure.service.sockets import is_loopback, parse_address


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "perdure.toml"
    path.write_text(text)
    return path


def refused(flags: dict[str, Any] | None = None, config: Path | None = None, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(flags or {}, config, environ)
    assert isinstance(caught.value, PerdureError)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


def test_flags_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    config = file(tmp_path, 'memory = "2GiB"\nnice = 3\ncodec = "on"\n')
    environ = {"PERDURE_MEMORY": "4GiB", "PERDURE_NICE": "5", "HOME": "/nowhere"}
    loaded = load({"memory": "8GiB", "codec": None}, config, environ)
    chosen = loaded.settings
    assert (chosen.memory, chosen.nice, chosen.codec, chosen.clients_max) == (8 * limits.GIB, 5, "on", 1024)
    assert loaded.origins["memory"] == "flag"
    assert loaded.origins["nice"] == "env PERDURE_NICE"
    assert loaded.origins["codec"] == f"file {config}"
    assert loaded.origins["clients_max"] == "default"
    assert loaded.origins.keys() == chosen.model_dump().keys()


def test_only_the_environment_given_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_NICE", "7")
    assert load({}, None, {}).settings.nice == 0


def test_defaults_are_private_and_modest() -> None:
    chosen = load({}, None, {}).settings
    assert chosen.memory == limits.GIB
    assert chosen.listen == ""
    assert is_loopback(parse_address(chosen.metrics)[0])


def test_the_socket_lies_in_the_data_directory() -> None:
    assert load({"data": "/a"}, None, {}).settings.socket_path() == Path("/a/perdure.sock")
    assert load({"data": "/a", "socket": "/b/s"}, None, {}).settings.socket_path() == Path("/b/s")
    with pytest.raises(ConfigError, match="--data DIR"):
        load({}, None, {}).settings.socket_path()


def test_an_empty_value_switches_off(tmp_path: Path) -> None:
    config = file(tmp_path, 'mirror = "/m"\nmetrics = "127.0.0.1:1"\ncapacity = "1GiB"\n')
    chosen = load({}, config, {"PERDURE_MIRROR": "", "PERDURE_METRICS": "", "PERDURE_CAPACITY": ""}).settings
    assert (chosen.mirror, chosen.metrics, chosen.capacity) == (None, "", None)


@pytest.mark.parametrize("name", sorted(settings.FOREIGN))
def test_variables_of_others_are_left_alone(name: str) -> None:
    assert load({}, None, {name: "1"}).origins == load({}, None, {}).origins


def test_unknown_keys_name_the_nearest(tmp_path: Path) -> None:
    message = refused(None, None, PERDURE_MEMROY="1GiB")
    assert "PERDURE_MEMROY" in message
    assert "PERDURE_MEMORY" in message
    config = file(tmp_path, 'capasity = "1GiB"\n')
    message = refused(None, config)
    assert str(config) in message
    assert "'capasity'" in message
    assert "'capacity'" in message
    assert "'nice'" in refused({"nicee": 1})


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("capacity", "20 potatoes", "200GiB"),
        ("memory", "", "8GiB"),
        ("memory", "-1", "8GiB"),
        ("listen", "9463", "HOST:PORT"),
        ("listen", "127.0.0.1:99999", "HOST:PORT"),
        ("metrics", "::1:80", "HOST:PORT"),
        ("codec", "zip", "auto, on or off"),
        ("cpus", "3-1", "0-3,7"),
        ("cpus", "a", "0-3,7"),
        ("nice", "20", "-20 to 19"),
        ("nice", "much", "-20 to 19"),
        ("hugepages", "perhaps", "true or false"),
        ("log_level", "loud", "debug, info"),
        ("log_format", "xml", "json or text"),
        ("drain_s", "nan", "seconds from 0"),
        ("drain_s", "-1", "seconds from 0"),
        ("clients_max", "0", "number from 1"),
        ("data", "a\0b", "a path"),
    ],
)
def test_a_bad_value_is_named_with_its_source_and_a_good_one(tmp_path: Path, key: str, value: str, hint: str) -> None:
    name = f"PERDURE_{key.upper()}"
    config = file(tmp_path, f"{key} = {json.dumps(value)}\n")
    for message, source in (
        (refused({key: value}), "flag"),
        (refused(None, None, **{name: value}), f"env {name}"),
        (refused(None, config), f"file {config}"),
    ):
        assert f"{key}={value!r}" in message
        assert f"from {source}" in message
        assert hint in message


def test_all_bad_values_are_named_at_once() -> None:
    message = refused({"nice": "99", "codec": "zip"})
    assert "nice=" in message
    assert "codec=" in message


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    assert "No such file" in refused(None, tmp_path / "none.toml")
    assert "not TOML" in refused(None, file(tmp_path, "memory: 8GiB\n"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert "not TOML" in refused(None, tmp_path / "binary")


def test_nothing_is_reachable_from_outside_by_accident() -> None:
    tls = {"tls_cert": "/c", "tls_key": "/k", "tls_ca": "/a"}
    for host in ("0.0.0.0", "[::]", "10.1.2.3", "node7"):
        assert "TLS" in refused({"listen": f"{host}:9463"})
        assert load({"listen": f"{host}:9463"} | tls, None, {}).settings.listen == f"{host}:9463"
        assert "metrics_public" in refused({"metrics": f"{host}:9464"} | tls)
        assert load({"metrics": f"{host}:9464", "metrics_public": "true"}, None, {}).settings.metrics_public
    for host in ("127.0.0.1", "127.8.8.8", "[::1]", "localhost"):
        assert load({"listen": f"{host}:0", "metrics": f"{host}:0"}, None, {}).settings.listen
    for key in tls:
        assert "TLS needs" in refused({"listen": "0.0.0.0:1"} | {name: tls[name] for name in tls if name != key})


def test_addresses_and_cpus() -> None:
    assert parse_address("[::1]:80") == ("::1", 80)
    assert parse_address("node:0") == ("node", 0)
    for bad in ("", ":1", "a:", "a:-1", "a:65536", "a:٣", "::1"):
        with pytest.raises(ValueError, match=r"."):
            parse_address(bad)
    assert parse_cpus("0-3,7") == {0, 1, 2, 3, 7}
    assert parse_cpus("") == frozenset()
    for bad in ("1-", "-1", "1,,2", "0-99999", "1;2"):
        with pytest.raises(ValueError, match=r"."):
            parse_cpus(bad)


def test_settings_cannot_be_changed() -> None:
    loaded: Loaded = load({}, None, {})
    with pytest.raises(ValueError, match="frozen"):
        loaded.settings.nice = 1


def test_the_command_prints_values_and_origins(tmp_path: Path) -> None:
    config = file(tmp_path, "nice = 3\n")
    run = CliRunner().invoke(
        main, ["config", "--config", str(config), "--memory", "2GiB", "--hugepages"], env={"PERDURE_CODEC": "off"}
    )
    assert run.exit_code == 0, run.output
    rows = {line.split()[0]: line for line in run.output.splitlines()}
    assert str(2 * limits.GIB) in rows["memory"]
    assert rows["memory"].endswith("flag")
    assert rows["hugepages"].split() == ["hugepages", "true", "flag"]
    assert rows["nice"].endswith(f"file {config}")
    assert rows["codec"].endswith("env PERDURE_CODEC")
    assert rows["drain_s"].endswith("default")
    shown = json.loads(CliRunner().invoke(main, ["config", "--config", str(config), "--json"]).output)
    assert shown["nice"] == {"value": 3, "origin": f"file {config}"}


def test_the_command_says_what_is_wrong_in_one_line() -> None:
    run = CliRunner().invoke(main, ["config", "--nice", "much"])
    assert run.exit_code == 2
    assert "nice='much' (from flag)" in run.output
    run = CliRunner().invoke(main, ["serve"])
    assert run.exit_code == 2
    assert "--data DIR" in run.output


def test_every_setting_has_its_flag_and_its_hint() -> None:
    command = main.commands["serve"]
    assert {option.name for option in command.params} == {*settings.keys(), "config"}
    assert all("; write " in (field.description or "") for field in settings.Settings.model_fields.values())
