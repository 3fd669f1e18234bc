"""What fails is started again, up to a cap; nobody else notices."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from cheap_cluster import CLIENTS, MONITOR, SERVERS, Cheap, CheapCluster
from launched import is_gone, wait_for

DONE = Cheap(name="client", kind="client", code="print(f'{name} asked {url}')", max_restarts=0)


def test_a_server_that_is_killed_three_times_comes_back_and_nobody_else_notices(
    tmp_path: Path,
) -> None:
    with CheapCluster(tmp_path, MONITOR, *SERVERS, *CLIENTS) as cluster:
        line = cluster.ready()
        others = cluster.pids(MONITOR, SERVERS[1], *CLIENTS)
        for times in (1, 2, 3):
            os.kill(cluster.started("server-0", times), signal.SIGKILL)
        last = cluster.started("server-0", 4)
        assert cluster.pids(MONITOR, SERVERS[1], *CLIENTS) == others
        assert not any(map(is_gone, [*others, last]))
        assert "server-0 was killed by SIGKILL: restart 3 of 5 in 0.0 s" in cluster.err
        cluster.send(signal.SIGTERM)
        assert cluster.end() == 0, cluster.err
    monitor, first, second = (int(cluster.lines(name)[0].split()[1]) for name in line["pids"])
    assert line == {
        "ready": "launch",
        "url": f"http://first-of-{monitor}",
        "pid": cluster.pid,
        "pids": {"monitor": monitor, "server-0": first, "server-1": second},
    }


def test_a_server_that_fails_too_often_is_named_and_everything_ends(tmp_path: Path) -> None:
    code = "ready(); print(f'no luck {starts()}', file=sys.stderr); time.sleep(0.2); sys.exit(7)"
    doomed = replace(SERVERS[0], code=code, max_restarts=2)
    with CheapCluster(tmp_path, MONITOR, doomed, SERVERS[1], CLIENTS[0]) as cluster:
        assert cluster.end() == 1
        assert len(cluster.lines("server-0")) == 3
        assert cluster.err.endswith(
            "failed: server-0 ended with exit code 7 after 2 restarts in a row and is not started "
            "again (max_restarts = 2); the end of its stderr:\n  no luck 3\n"
        )
        assert "[server-0] no luck 1\n" in cluster.err
        assert cluster.ended() == ["client-0", "server-1", "monitor"]


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        (
            [replace(MONITOR, code="print('port taken', file=sys.stderr); sys.exit(2)")],
            "monitor ended with exit code 2 before it was ready; the end of its stderr:\n"
            "  port taken",
        ),
        (
            [MONITOR, replace(SERVERS[0], code="sys.exit()"), SERVERS[1]],
            "server-0 ended with exit code 0 before it was ready; it wrote nothing to stderr",
        ),
        (
            [MONITOR, SERVERS[0], replace(SERVERS[1], code="serve()", start_timeout=0.5)],
            "server-1 was not ready in 0.5 s; it wrote nothing to stderr",
        ),
        (
            [replace(MONITOR, code="print('{\"ready\": 1}', flush=True); serve()")],
            "monitor: no URL in its ready line, {'ready': 1}",
        ),
    ],
    ids=["monitor", "server", "server that hangs", "monitor without a URL"],
)
def test_a_failed_start_ends_with_1_and_leaves_nobody(
    roles: list[Cheap], message: str, tmp_path: Path
) -> None:
    with CheapCluster(tmp_path, *roles, CLIENTS[0]) as cluster:
        assert cluster.end() == 1
        assert cluster.err.endswith(f"failed: {message}\n")
        assert cluster.out == b""
        assert cluster.lines("client-0") == []
        for role in roles:
            assert all(is_gone(int(line.split()[1])) for line in cluster.lines(role.name))


def test_a_restart_that_does_not_become_ready_counts_as_a_failure(tmp_path: Path) -> None:
    code = "starts() == 2 or ready(); serve()"
    slow = replace(SERVERS[0], code=code, start_timeout=1.0)
    with CheapCluster(tmp_path, MONITOR, slow) as cluster:
        cluster.ready()
        os.kill(cluster.started("server-0"), signal.SIGKILL)
        third = cluster.started("server-0", 3)
        assert cluster.err.count("server-0 was not ready in 1 s and is killed") == 1
        assert "server-0 was killed by SIGKILL: restart 2 of 5" in cluster.err
        assert not is_gone(third)


def test_a_restart_that_ends_with_0_before_it_is_ready_is_a_failure_too(tmp_path: Path) -> None:
    code = "starts() == 2 and sys.exit(0); ready(); serve()"
    with CheapCluster(tmp_path, MONITOR, replace(SERVERS[0], code=code)) as cluster:
        cluster.ready()
        os.kill(cluster.started("server-0"), signal.SIGKILL)
        wait_for(lambda: "server-0 ended with exit code 0: restart 2 of 5" in cluster.err, 30)
        cluster.started("server-0", 3)


def test_a_monitor_comes_back_where_it_was(tmp_path: Path) -> None:
    with CheapCluster(tmp_path, MONITOR, SERVERS[0]) as cluster:
        first = cluster.started("monitor")
        url = cluster.ready()["url"]
        os.kill(first, signal.SIGKILL)
        second = cluster.started("monitor", 2)
        command = Path(f"/proc/{second}/cmdline").read_bytes().split(b"\0")
        assert command[-2].decode() == url == f"http://first-of-{first}"
        assert not is_gone(cluster.started("server-0"))


def test_a_server_that_was_drained_on_purpose_stays_away(tmp_path: Path) -> None:
    with CheapCluster(tmp_path, MONITOR, *SERVERS) as cluster:
        cluster.ready()
        os.kill(cluster.started("server-0"), signal.SIGTERM)
        wait_for(lambda: "server-0 ended with exit code 0 and stays so" in cluster.err, 30)
        # when nobody is left that runs, there is nothing to wait for
        os.kill(cluster.started("server-1"), signal.SIGTERM)
        os.kill(cluster.started("monitor"), signal.SIGTERM)
        assert cluster.end() == 0, cluster.err
        assert [len(cluster.lines(role.name)) for role in SERVERS] == [1, 1]


def test_it_ends_with_its_last_client(tmp_path: Path) -> None:
    later = replace(DONE, name="later", code="time.sleep(0.3)")
    with CheapCluster(tmp_path, MONITOR, *SERVERS, DONE, later) as cluster:
        assert cluster.end() == 0, cluster.err
        first, second = cluster.out.decode().splitlines()
        # what the client printed is its own, and comes after the ready line
        assert second == f"client asked {json.loads(first)['url']}"
        assert sorted(cluster.ended()[:2]) == ["server-0", "server-1"]
        assert cluster.ended()[2:] == ["monitor"]


def test_a_client_that_fails_is_started_again_only_if_the_file_says_so(tmp_path: Path) -> None:
    fails = replace(DONE, code="sys.exit(3 if starts() < 3 else 0)")
    with CheapCluster(tmp_path, MONITOR, replace(fails, max_restarts=2)) as cluster:
        assert cluster.end() == 0, cluster.err
        cluster.started("client", 3)
    for path in tmp_path.iterdir():
        path.unlink()
    with CheapCluster(tmp_path, MONITOR, fails) as cluster:
        assert cluster.end() == 1
        assert cluster.err.endswith(
            "failed: client ended with exit code 3 and is not started again (max_restarts = 0); "
            "it wrote nothing to stderr\n"
        )
        cluster.started("client", 1)


def test_one_who_writes_without_end_keeps_nobody_from_a_restart(tmp_path: Path) -> None:
    code = "ready()\nfor n in range(20000): print('x' * 100, file=sys.stderr)\nserve()"
    with CheapCluster(tmp_path, MONITOR, replace(SERVERS[0], code=code), SERVERS[1]) as cluster:
        cluster.ready()
        began = time.monotonic()
        os.kill(cluster.started("server-1"), signal.SIGKILL)
        cluster.started("server-1", 2)
        assert time.monotonic() - began < 10
        wait_for(lambda: cluster.err.count(f"[server-0] {'x' * 100}\n") == 20000, 30)
