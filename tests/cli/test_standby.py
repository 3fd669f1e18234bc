"""Standbys in processes: what the last holder held is loaded elsewhere, and no token is lost."""

from __future__ import annotations

import signal

from launched import SHAKESPEARE, Launched, eaas, wait_for
from local import continuation

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
