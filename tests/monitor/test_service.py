from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.monitor.planned import FAST, MONITOR, Cluster, server
from torch_eaas.monitor.members import Members
from torch_eaas.monitor.service import Service


def test_a_silent_stream_sends_a_comment() -> None:
    async def first_frames() -> list[str]:
        cluster = Cluster()
        service = Service(cluster.members, lambda: cluster.now, keepalive=0.01)
        stream = service.stream("")
        return [await anext(stream) for _ in range(2)]

    assert asyncio.run(first_frames())[1] == ": keepalive\n\n"


def test_a_listener_that_reads_too_slowly_is_told_to_start_afresh() -> None:
    async def frames() -> list[str]:
        cluster = Cluster()
        service = Service(cluster.members, lambda: cluster.now, keepalive=0.01)
        cluster.join(server("s1", 1))
        stream = service.stream(cluster.members.log.event_id(0))
        seen = [await anext(stream), await anext(stream)]
        for instance in range(2, 600):
            cluster.join(server("s1", instance))
        seen.append(await anext(stream))
        service.bell.stop()
        return [*seen, *[frame async for frame in stream]]

    kinds = [frame.split("\n")[1] for frame in asyncio.run(frames())]
    assert kinds == ["event: join", "event: placement", "event: resync"]


def test_a_tick_that_fails_is_not_the_last(caplog: pytest.LogCaptureFixture) -> None:
    times: Iterator[Exception | float] = iter([RuntimeError("planned"), 1.0, 2.0])
    done = asyncio.Event()

    def clock() -> float:
        time = next(times, None)
        if time is None:
            done.set()
            return 3.0
        if isinstance(time, Exception):
            raise time
        return time

    async def run() -> None:
        service = Service(Members(FAST, MONITOR, 0.0), clock, keepalive=1)
        running = asyncio.create_task(service.run())
        await asyncio.wait_for(done.wait(), 5)
        running.cancel()

    asyncio.run(run())
    assert [record.getMessage() for record in caplog.records] == ["a tick of the monitor failed"]
