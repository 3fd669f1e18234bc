from __future__ import annotations

from dataclasses import astuple
from datetime import timedelta
from pathlib import Path

import pytest

from torch_eaas.cli.cluster_file import ClusterFile, read_cluster_file
from torch_eaas.cli.roles import roles_of
from torch_eaas.errors import ConfigError

SERVER = "[[server]]\n"


def read(tmp_path: Path, text: str) -> ClusterFile:
    (tmp_path / "model").mkdir(exist_ok=True)
    path = tmp_path / "c.toml"
    path.write_text(f'checkpoint = "model"\n{text}')
    return read_cluster_file(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = ", "is no TOML: "),
        ("", "no [[server]]: a cluster has at least one"),
        ("port = 1\n" + SERVER, "port is not known; known here: checkpoint, start_timeout, "),
        (
            "start_timeout = 0\n" + SERVER,
            "start_timeout must be a number of seconds above 0, got",
        ),
        ("start_timeout = inf\n" + SERVER, "a number of seconds above 0, got inf"),
        ("start_timeout = true\n" + SERVER, "a number of seconds above 0, got True"),
        ("monitor = 3\n" + SERVER, "monitor must be a table, written [monitor], got 3"),
        ("[monitor]\nport = 65536\n", "[monitor] port must be an integer from 0 to 65535, got 65"),
        ("[monitor]\nport = '1'\n", "[monitor] port must be an integer from 0 to 65535, got '1'"),
        ("[monitor]\nhost = ''\n", "[monitor] host must be a string that is not empty, got ''"),
        ("[monitor]\nlease = 5\n", "[monitor] lease is not known; known here: host, port, max_r"),
        ("[server]\n", "server must be a list of tables, each written [[server]], got {}"),
        (SERVER + "name = 'a b'", "[[server]] 1 name must be of letters, digits, dots, dashes"),
        (SERVER + "name = 'monitor'", "two processes are called monitor; give each table a name"),
        (SERVER + SERVER, "two processes are called server"),
        (SERVER + "[[client]]\nname = 'server'\ncommand = ['x']", "two processes are called serv"),
        (SERVER + "count = 0", "[[server]] 1 count must be an integer of at least 1, got 0"),
        (SERVER + "count = 1.0", "[[server]] 1 count must be an integer of at least 1, got 1.0"),
        (SERVER + "count = true", "count must be an integer of at least 1, got True"),
        (SERVER + "max_restarts = -1", "max_restarts must be an integer of at least 0, got -1"),
        (SERVER + "share = '2/2'", "[[server]] 1 share must be INDEX/COUNT with INDEX from 0 to"),
        (SERVER + "share = 2", "[[server]] 1 share must be a string that is not empty, got 2"),
        (SERVER + "experts = '4-2'", "[[server]] 1 experts must be numbers and ranges like 0-7"),
        (
            SERVER + "experts = '1'\nshare = '0/2'",
            "experts must be left out where there is a share, got [1]",
        ),
        (
            SERVER + "experts = '1'\ncopies = 2",
            "copies must be left out where there are experts, got 2",
        ),
        (SERVER + "copies = 2", "copies must be at most the number of shares (1), got 2"),
        (SERVER + "share = '0/2'\ncopies = 3\ncount = 3", "the number of shares (2), got 3"),
        (SERVER + "room = -1", "[[server]] 1 room must be an integer of at least 0, got -1"),
        (SERVER + "standby = 1", "[[server]] 1 standby must be true or false, got 1"),
        (
            SERVER + "standby = true\nshare = '0/2'",
            "standby must be left out where there is a share or experts, got True",
        ),
        (SERVER + "standby = true\nexperts = '1'", "standby must be left out where there is a sh"),
        (
            SERVER + "standby = true\ncopies = 2",
            "copies must be left out where standby is true, got 2",
        ),
        ("[access]\ntoken = 'x'\n" + SERVER, "[access] token is not known; known here: token_file"),
        ("[access]\ntoken_file = 3\n" + SERVER, "[access] token_file must be a string that is not"),
        ("[access]\ntoken_file = 'no'\n" + SERVER, "[access] token_file must be a file, got '"),
        (
            "[access]\ntls_key = 'c.toml'\n" + SERVER,
            "[access] tls_certificate must be given with tls_key: they go together, it is missing",
        ),
        (
            "[access]\ntls_certificate = 'c.toml'\n" + SERVER,
            "[access] tls_key must be given with tls_certificate: they go together, it is missing",
        ),
        (
            "[access]\ntls_authority = 'c.toml'\n" + SERVER,
            "tls_authority must be left out without a tls_certificate: the monitor then speaks pl",
        ),
        (SERVER + "storage = 'int4'", "storage must be one of 'fp32', 'bf16', 'fp8', got 'int4'"),
        (SERVER + "transport = 'loopback'", "transport must be one of 'auto', 'cuda_ipc', 'nvshm"),
        (SERVER + "name='a'\n" + SERVER + "colour = 1", "[[server]] 2 colour is not known; known "),
        (SERVER + "[[client]]", "[[client]] 1 command must be a list of strings, at least one, it"),
        (SERVER + "[[client]]\ncommand = []", "a list of strings, at least one, got []"),
        (SERVER + "[[client]]\ncommand = 'ls -l'", "a list of strings, at least one, got 'ls -l'"),
        (SERVER + "[[client]]\ncommand = ['x', 1]", "list of strings, at least one, got ['x', 1]"),
        (SERVER + "[[client]]\ncommand = ['x']\nrestart = 'no'", "[[client]] 1 restart is not kn"),
    ],
)
def test_what_is_wrong_is_named_with_file_table_and_key(
    text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, text)
    assert str(error.value).startswith(f"{tmp_path / 'c.toml'}: ")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SERVER, "checkpoint must be a string that is not empty, it is missing"),
        ("checkpoint = 'nowhere'\n" + SERVER, "checkpoint must be a directory, got '"),
    ],
)
def test_a_checkpoint_is_a_directory_beside_the_file(
    text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_cluster_file(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: No such file or directory"):
        read_cluster_file(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b"x = '\xe9'")
    with pytest.raises(ConfigError, match=r"latin\.toml: is no TOML: 'utf-8' codec"):
        read_cluster_file(tmp_path / "latin.toml")


def test_what_is_left_out_has_the_verbs_defaults(tmp_path: Path) -> None:
    file = read(tmp_path, SERVER)
    assert (file.monitor.host, file.monitor.port, file.monitor.max_restarts) == ("127.0.0.1", 0, 5)
    assert (file.start_timeout, file.clients) == (timedelta(seconds=120), ())
    [server] = file.servers
    assert (server.name, server.share, server.copies, server.experts) == ("server", (0, 1), 1, None)
    assert (server.storage, server.max_rows, server.threads) == ("fp32", 2048, 1)
    assert server.transport == "auto"
    assert server.max_restarts == 5
    assert (server.standby, server.room) == (False, 0)
    assert set(astuple(file.access)) == {None}


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("count = 3\ncopies = 2", {"server-0": (0, 3), "server-1": (1, 3), "server-2": (2, 3)}),
        ("count = 2\nshare = '1/4'", {"server-0": (1, 4), "server-1": (1, 4)}),
        ("share = '1/4'", {"server": (1, 4)}),
    ],
    ids=["dealt among them", "the same share twice", "a share of others"],
)
def test_several_servers_share_the_experts(
    text: str, shares: dict[str, tuple[int, int]], tmp_path: Path
) -> None:
    assert {s.name: s.share for s in read(tmp_path, SERVER + text).servers} == shares


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", ["--share=0/1", "--copies=1"]),
        ("room = 3", ["--share=0/1", "--copies=1", "--room=3"]),
        ("experts = '1-2'\nroom = 1", ["--experts=1,2", "--room=1"]),
        ("standby = true", ["--standby"]),
        ("standby = true\nroom = 4", ["--standby", "--room=4"]),
        ("standby = false", ["--share=0/1", "--copies=1"]),
    ],
    ids=["a share", "with room", "experts", "standby", "standby of a few", "none"],
)
def test_a_servers_options_say_what_it_holds_and_may_load(
    text: str, options: list[str], tmp_path: Path
) -> None:
    _, role = roles_of(read(tmp_path, SERVER + text))
    _, _, _, verb, _, monitor, *more = role.command("http://h:1")
    assert (verb, monitor) == ("server", "--monitor=http://h:1")
    assert more[: len(options) + 1] == [*options, "--name=server"]


def test_a_servers_transport_is_handed_on(tmp_path: Path) -> None:
    _, role = roles_of(read(tmp_path, SERVER + "transport = 'shared_memory'"))
    assert "--transport=shared_memory" in role.command("http://h:1")


def test_several_standbys_are_alike(tmp_path: Path) -> None:
    _, first, second = roles_of(read(tmp_path, SERVER + "standby = true\ncount = 2"))
    assert "--name=server-0" in first.command("")
    assert list(second.command(""))[6:8] == ["--standby", "--name=server-1"]


def test_certificates_reach_the_monitor_and_their_authority_the_servers(tmp_path: Path) -> None:
    for name in ("cert.pem", "key.pem", "ca.pem"):
        (tmp_path / name).touch()
    names = "tls_certificate = 'cert.pem'\ntls_key = 'key.pem'\ntls_authority = 'ca.pem'\n"
    monitor, server = roles_of(read(tmp_path, f"[access]\n{names}{SERVER}"))
    assert list(monitor.command(""))[-2:] == [
        f"--tls-certificate={tmp_path / 'cert.pem'}",
        f"--tls-key={tmp_path / 'key.pem'}",
    ]
    assert f"--tls-authority={tmp_path / 'ca.pem'}" in server.command("https://127.0.0.1:1")


def test_a_clients_command_is_filled_in_and_other_braces_are_its_own(tmp_path: Path) -> None:
    command = """["run", "{monitor}", "{checkpoint}:{name}", '{"a": {x}}', "{python}"]"""
    file = read(tmp_path, f"{SERVER}[[client]]\ncount = 2\nmax_restarts = 3\ncommand = {command}")
    *_, role = roles_of(file)
    program, url, where, other, python = role.command("http://h:1")
    assert (program, url, other) == ("run", "http://h:1", '{"a": {x}}')
    assert where == f"{tmp_path / 'model'}:client-1"
    assert Path(python).is_absolute()
    assert (role.folder, role.policy.max_restarts) == (tmp_path, 3)


@pytest.mark.parametrize(
    ("url", "port"),
    [("", 0), ("http://127.0.0.1:4711", 4711), ("http://[::1]:4712", 4712)],
    ids=["first start", "restart", "IPv6"],
)
def test_a_monitor_keeps_its_port(url: str, port: int, tmp_path: Path) -> None:
    monitor, *_ = roles_of(read(tmp_path, SERVER))
    assert monitor.command(url)[-1] == f"--port={port}"
