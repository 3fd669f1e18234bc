"""Where the command line takes the token from, and that it stands on no command line."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

import httpx
import pytest
from launched import SHAKESPEARE, eaas

from tests.certificates import make_certificate
from torch_eaas.access import Access
from torch_eaas.cli import access
from torch_eaas.cli import main as cli
from torch_eaas.cli.environment import TOKEN, child_environment, hand_on_token
from torch_eaas.errors import ConfigError

SECRET = "sesame-0123456789"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a token, and none in the environment."""
    monkeypatch.delenv(TOKEN, raising=False)
    path = tmp_path / "token"
    path.write_text(f"{SECRET}\n")
    path.chmod(0o600)
    return path


def parsed(*arguments: str) -> Namespace:
    parser = ArgumentParser()
    for add in (access.add_token, access.add_certificate, access.add_authority):
        add(parser)
    return parser.parse_args(arguments)


def test_the_token_comes_from_a_file_else_from_the_environment(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert access.access_of(parsed()) == Access()
    monkeypatch.setenv(TOKEN, "another-0123456789")
    assert access.access_of(parsed()).token == "another-0123456789"
    assert access.access_of(parsed(f"--token-file={file}")).token == SECRET


def test_certificates_are_paths(file: Path) -> None:
    args = parsed("--tls-certificate=a", "--tls-key=b", "--tls-authority=c")
    assert access.access_of(args) == Access(
        tls_certificate=Path("a"), tls_key=Path("b"), tls_authority=Path("c")
    )


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o606, 0o644, 0o666, 0o777], ids=oct)
def test_a_file_that_every_user_may_read_or_change_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(ConfigError, match=rf"every user may use it \(mode {mode:04o}\).*chmod 600"):
        access.access_of(parsed(f"--token-file={file}"))


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o640], ids=oct)
def test_a_file_of_the_own_user_or_group_is_taken(file: Path, mode: int) -> None:
    file.chmod(mode)
    assert access.access_of(parsed(f"--token-file={file}")).token == SECRET


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; `openssl rand -hex 32` makes a token"),
        (b" \n", "is empty"),
        (b"\xffsesame-0123456789", "is no text of ASCII characters$"),
        (b"secret", "a token has 16 to 256"),
        (b"sesame-0123456789\nsesame-0123456789", "a token has 16 to 256"),
    ],
    ids=ascii,
)
def test_a_file_without_a_token_is_refused(file: Path, content: bytes, message: str) -> None:
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        access.access_of(parsed(f"--token-file={file}"))
    assert "sesame" not in str(caught.value)


def test_a_file_that_is_not_there_is_refused(file: Path) -> None:
    file.unlink()
    with pytest.raises(ConfigError, match=f"--token-file {file}: No such file"):
        access.access_of(parsed(f"--token-file={file}"))


def test_children_inherit_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "")
    hand_on_token("")
    assert child_environment()[TOKEN] == ""
    hand_on_token(SECRET)
    assert child_environment()[TOKEN] == SECRET


def test_a_clusters_file_may_name_the_tokens_file_and_the_option_goes_before(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN, "another-0123456789")
    (tmp_path / "model").mkdir()
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(
        'checkpoint = "model"\n[access]\ntoken_file = "named"\n[[server]]\n[monitor]\n'
    )
    named = tmp_path / "named"
    named.write_text("a-third-one-0123456789")
    named.chmod(0o600)
    dry = ["launch", "--dry-run", str(cluster)]
    assert cli.main(dry) == 0
    assert child_environment()[TOKEN] == "a-third-one-0123456789"
    assert cli.main([*dry, f"--token-file={file}"]) == 0
    assert child_environment()[TOKEN] == SECRET


def test_a_tokens_file_that_a_clusters_file_names_is_refused_by_that_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    cluster = tmp_path / "cluster.toml"
    cluster.write_text('checkpoint = "model"\n[access]\ntoken_file = "named"\n[[server]]\n')
    (tmp_path / "named").touch(0o600)
    assert cli.main(["launch", "--dry-run", str(cluster)]) == 1
    assert f"{cluster}: [access] token_file {tmp_path / 'named'}: is empty; " in (
        capsys.readouterr().err
    )


def test_a_monitor_for_other_machines_asks_for_a_token(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["monitor", "--host=0.0.0.0"]) == 1
    assert "listen on 0.0.0.0 (--host), which other machines reach" in capsys.readouterr().err


@pytest.mark.usefixtures("in_process")
def test_a_cluster_with_a_token_serves_those_who_have_it(
    file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(f'checkpoint = "{SHAKESPEARE}"\n[[server]]\n')
    with eaas("launch", str(cluster), f"--token-file={file}") as launch:
        ready = launch.ready()
        for pid in (launch.pid, *ready["pids"].values()):
            assert SECRET.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert httpx.get(f"{ready['url']}/members", trust_env=False).status_code == 401
        arguments = ["generate", str(SHAKESPEARE), f"--monitor={ready['url']}", "--prompt=ROMEO:"]
        arguments += ["--max-new-tokens=2"]
        assert cli.main([*arguments, f"--token-file={file}"]) == 0
        assert "the monitor refuses this member" not in caplog.text
        assert cli.main([*arguments, "--wait=1"]) == 1
        assert "the monitor refuses this member" in caplog.text
        assert "the token is missing or wrong" in caplog.text
        told = [*capsys.readouterr(), caplog.text, launch.err, launch.out.decode()]
        assert SECRET not in "".join(told)


ASKS = """
import sys
from datetime import timedelta
from pathlib import Path
from torch_eaas.access import Access
from torch_eaas.cli.environment import token_of
from torch_eaas.monitor.link import MonitorLink

access = Access(token=token_of(), tls_authority=Path("monitor.pem"))
with MonitorLink(sys.argv[1], timedelta(seconds=30), access) as link:
    [server] = link.call("GET", "/members")["servers"]
    print(server["name"], server["experts"], server["room"])
"""


def test_a_launched_standby_joins_where_token_and_certificates_are_asked_for(
    file: Path, tmp_path: Path
) -> None:
    make_certificate(tmp_path, "monitor")
    (tmp_path / "asks.py").write_text(ASKS)
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(
        f"""
        checkpoint = "{SHAKESPEARE}"
        [access]
        token_file = "token"
        tls_certificate = "monitor.pem"
        tls_key = "monitor.key"
        tls_authority = "monitor.pem"
        [[server]]
        name = "spare"
        standby = true
        room = 3
        [[client]]
        command = ["{{python}}", "asks.py", "{{monitor}}"]
        max_restarts = 5  # it ends with an error while the server has not joined yet
        """
    )
    with eaas("launch", str(cluster)) as launch:
        assert launch.end() == 0, launch.err
        ready, told = launch.out.decode().splitlines()
        assert '"url": "https://127.0.0.1:' in ready
        assert told == "spare 0 3"
        assert SECRET not in launch.err
