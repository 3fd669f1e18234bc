"""A monitor as a process of its own, which is killed, suspended and started again."""

from __future__ import annotations

import os
import re

import httpx

from benchmarks.nursery import Offspring
from torch_eaas.cli.children import Child
from torch_eaas.cli.cluster import START_TIMEOUT

LEASE_S = 2.0
ASK_S = 10.0


class FailingMonitor:
    """``torch-eaas monitor``, at the same port in each of its lives; close it."""

    def __init__(self) -> None:
        self.url = ""
        self._is_ready = False
        self._start(port=0)
        self.await_ready()

    def await_ready(self) -> None:
        """Wait until the newest life answers."""
        if not self._is_ready:
            self.url = str(self._child.ready(START_TIMEOUT)["url"])
            self._is_ready = True

    def restart(self, nice: int) -> None:
        """Kill it and start another one, which need not be ready yet."""
        self.close()
        self._start(port=int(self.url.rpartition(":")[2]))
        os.setpriority(os.PRIO_PROCESS, self._child.pid, nice)

    def leases_expired(self) -> int:
        """Return how many members it has taken for dead or hanging in this life."""
        answer = httpx.get(f"{self.url}/metrics", timeout=ASK_S, trust_env=False)
        found = re.search(r"^torch_eaas_leases_expired_total (\S+)$", answer.text, re.MULTILINE)
        assert found is not None, f"no such metric in {answer.text[:1000]}"
        return int(float(found[1]))

    def close(self) -> None:
        """Kill it and wait for its end."""
        self.process.close()
        self._child.close()

    def _start(self, port: int) -> None:
        arguments = ["monitor", f"--port={port}", f"--lease={LEASE_S:g}", "--log-level=error"]
        self._child = Child("the monitor", arguments)
        self.process = Offspring(self._child.pid)
        """Its process, to be stopped and resumed."""
        self._is_ready = False
