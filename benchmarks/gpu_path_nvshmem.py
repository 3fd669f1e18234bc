"""Two PEs of NVSHMEM on one GPU, a server and a client, if NVSHMEM starts so."""

from __future__ import annotations

import os
from contextlib import ExitStack
from multiprocessing.connection import Connection as Pipe
from typing import Any

import torch

from benchmarks.gpu_path_checks import PATIENT, Ends, check_fewer_tokens, check_tokens
from benchmarks.gpu_path_ends import Sizes, new_client, new_server
from benchmarks.gpu_path_processes import STARTS_S
from benchmarks.workers import Worker
from torch_eaas.comm.nvshmem import NvshmemConfig, NvshmemWorld, Role
from torch_eaas.comm.nvshmem_transport import NvshmemTransport
from torch_eaas.errors import EaasError, PeerTimeout, TransportError
from torch_eaas.protocol.layout import PairSpec


def answers_between_pes(sizes: Sizes, device: torch.device) -> int:
    """Start both, and compare the client's answers; return how many.

    Raises:
        TransportError: One of them ended or did not start; with its reason.
        WrongResult: An answer is not the local layer's.
    """
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        server, client = (
            stack.enter_context(Worker(be_pe, (role, sizes, str(device)), cores=cores))
            for role in ("server", "client")
        )
        # PE 0's id, which all start under, and then its address
        for _ in range(2):
            client.pipe.send(_told(server))
        compared: int = _told(client)
    return compared


def be_pe(pipe: Pipe, role: Role, sizes: Sizes, device: str) -> None:
    """Be one of two PEs: PE 0 serves, PE 1 asks; errors go into the pipe as texts."""
    torch.set_num_threads(1)
    try:
        _be_pe(pipe, role, sizes, torch.device(device))
    except EaasError as error:
        pipe.send(("error", f"{role}: {type(error).__name__}: {error}"))


def _be_pe(pipe: Pipe, role: Role, sizes: Sizes, device: torch.device) -> None:
    config = sizes.config(**PATIENT)

    def exchange(own: bytes | None) -> bytes:
        if own is None:
            return bytes(_await(pipe))
        pipe.send(("id", own))
        return own

    number = 0 if role == "server" else 1
    start = NvshmemConfig(role=role, pe=number, num_pes=2, device=device.index or 0)
    transport = NvshmemTransport(NvshmemWorld.open(start, PairSpec.of(config), exchange))
    given: dict[str, Any] = {"device": device, "transport": transport}
    if role == "server":
        with new_server(sizes, sizes.weights(), config, name="pe0", **given) as server:
            server.serve_in_background()
            pipe.send(("address", server.address))
            try:
                pipe.recv()
            except EOFError:
                return
    with new_client(sizes, config, [_await(pipe)], **given) as client:
        ends = Ends(sizes=sizes, weights=sizes.weights(), device=device, client=client)
        pipe.send(("compared", check_tokens(ends) + check_fewer_tokens(ends)))


def _await(pipe: Pipe) -> Any:
    if not pipe.poll(STARTS_S):
        raise PeerTimeout(f"PE 1 heard nothing of PE 0 within {STARTS_S:g} s")
    return pipe.recv()


def _told(worker: Worker) -> Any:
    """Return what a PE tells; raise TransportError with its reason if it failed."""
    kind, told = worker.receive(STARTS_S)
    if kind == "error":
        raise TransportError(told)
    return told
