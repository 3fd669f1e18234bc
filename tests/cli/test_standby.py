"""Standbys in processes: what the last holder held is loaded elsewhere, and no token is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from launched import SHAKESPEARE, Launched, eaas, wait_for
from local import continuation

from tests.certificates import make_certificate

PROMPT = "JULIET:\nO "
TOKENS = 320


def test_a_standby_takes_over_from_a_server_that_leaves_and_another_from_one_that_dies() -> None:
    with eaas("monitor", "--port=0") as monitor:
        where = f"--monitor={monitor.ready()['url']}"

        def serve(name: str, *options: str) -> Launched:
            return eaas("server", str(SHAKESPEARE), where, f"--name={name}", *options)

        options = [where, f"--prompt={PROMPT}", f"--max-new-tokens={TOKENS}"]
        with (
            serve("first") as first,
            serve("second", "--standby") as second,
            eaas("generate", str(SHAKESPEARE), *options) as client,
        ):
            assert second.ready()["experts"] == {}
            wait_for(lambda: len(client.out) > len(PROMPT) or client.process.poll() is not None)
            first.send(signal.SIGTERM)
            assert first.end() == 0, first.err
            with serve("third", "--standby") as third:
                third.ready()
                second.send(signal.SIGKILL)
                assert client.end() == 0, client.err
                assert client.out.decode() == continuation(PROMPT, TOKENS) + "\n"


def test_a_launched_standby_takes_over_where_token_and_certificates_are_asked_for(
    tmp_path: Path,
) -> None:
    make_certificate(tmp_path, "monitor")
    (tmp_path / "token").write_text("sesame-0123456789")
    (tmp_path / "token").chmod(0o600)
    file = tmp_path / "cluster.toml"
    file.write_text(
        f"""
        checkpoint = "{SHAKESPEARE}"
        [access]
        token_file = "token"
        tls_certificate = "monitor.pem"
        tls_key = "monitor.key"
        tls_authority = "monitor.pem"
        [[server]]
        name = "only"
        [[server]]
        name = "spare"
        standby = true
        [[client]]
        command = [
            "{{python}}", "-m", "torch_eaas", "generate", "{{checkpoint}}", "--monitor={{monitor}}",
            "--tls-authority=monitor.pem", "--prompt=ROMEO:", "--max-new-tokens=96",
        ]
        """
    )
    with eaas("launch", str(file)) as launch:
        ready = launch.ready()
        assert ready["url"].startswith("https://127.0.0.1:")
        launch.until("ROMEO:")
        os.kill(ready["pids"]["only"], signal.SIGKILL)
        assert launch.end() == 0, launch.err
        _, text = launch.out.decode().split("\n", 1)
        assert text == continuation("ROMEO:", 96) + "\n", launch.err
        assert "only was killed by SIGKILL: restart 1 of 5" in launch.err
