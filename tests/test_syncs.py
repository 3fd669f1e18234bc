"""What a captured step must not do is found on a CPU, and what it may do is left alone."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from torch_eaas.errors import ConfigError
from torch_eaas.ops import combine_rows, pack
from torch_eaas.testing import forbid_syncs

X = torch.tensor([3.0, 0.0, 2.0])
ONE = torch.tensor(1)
MASK = X > 1
COUNTS = torch.tensor([1, 0, 2])
FAR = torch.empty(3, device="meta")
"""A tensor of another device than the CPU's; nothing can be read there, but copies are calls."""

READS: list[tuple[str, str, Callable[[], object]]] = [
    ("item", r"Tensor.item\(\)", lambda: ONE.item()),
    ("tolist", r"Tensor.tolist\(\)", lambda: X.tolist()),
    ("numpy", r"Tensor.numpy\(\)", lambda: X.numpy()),
    ("asarray", r"numpy.asarray\(tensor\)", lambda: np.asarray(X)),
    ("cpu", r"Tensor.cpu\(\)", lambda: X.cpu()),
    ("bool", r"bool\(tensor\)", lambda: bool(ONE)),
    ("if", r"bool\(tensor\)", lambda: 1 if ONE else 2),
    ("int", r"int\(tensor\)", lambda: int(ONE)),
    ("float", r"float\(tensor\)", lambda: float(ONE)),
    ("list index", r"a tensor as an index", lambda: [1, 2][ONE]),
    ("range", r"a tensor as an index, a bound or a count", lambda: range(ONE)),
    ("max", r"bool\(tensor\)", lambda: max(X)),
    ("in", r"number in tensor", lambda: 3.0 in X),
    ("format", r"a tensor in a text", lambda: f"{ONE}"),
    ("repr", r"a tensor in a text", lambda: repr(X)),
    ("slice", r"a number read from a tensor", lambda: X[:ONE]),
    ("full", r"a number read from a tensor", lambda: torch.full((2,), ONE)),
    ("is_nonzero", r"a number read from a tensor", lambda: torch.is_nonzero(ONE)),
    ("equal", r"torch.equal\(\)", lambda: torch.equal(X, X)),
    ("allclose", r"torch.allclose\(\)", lambda: torch.allclose(X, X)),
]

SIZES: list[tuple[str, str, Callable[[], object]]] = [
    ("nonzero", r"torch.nonzero\(\)", lambda: X.nonzero()),
    ("argwhere", r"torch.nonzero\(\)", lambda: torch.argwhere(X)),
    ("where of one", r"torch.nonzero\(\)", lambda: torch.where(MASK)),
    ("mask", r"indexing with a mask", lambda: X[MASK]),
    ("mask of rows", r"indexing with a mask", lambda: torch.ones(3, 2)[MASK, 0]),
    ("set by a mask", r"indexing with a mask", lambda: X.clone().__setitem__(MASK, torch.ones(2))),
    ("masked_select", r"torch.masked_select\(\)", lambda: X.masked_select(MASK)),
    ("unique", r"torch.unique\(\)", lambda: X.unique()),
    ("unique in a row", r"torch.unique_consecutive\(\)", lambda: torch.unique_consecutive(X)),
    ("bincount", r"torch.bincount\(\)", lambda: torch.bincount(COUNTS)),
    (
        "repeat_interleave",
        r"torch.repeat_interleave\(\) of counts, without output_size,",
        lambda: torch.repeat_interleave(X, COUNTS),
    ),
]

COPIES: list[tuple[str, str, Callable[[], object]]] = [
    ('to "cpu"', r'Tensor.to\("cpu"\)', lambda: X.to("cpu")),
    ('to "cpu" by name', r'Tensor.to\("cpu"\)', lambda: X.to(device="cpu", dtype=torch.int32)),
    ("tensor", r"torch.tensor\(numbers", lambda: torch.tensor([1.0], device=X.device)),
    ("as_tensor", r"torch.as_tensor\(numbers", lambda: torch.as_tensor([1.0], device=X.device)),
    ("asarray", r"torch.asarray\(numbers", lambda: torch.asarray([1.0], device=X.device)),
    ("new_tensor", r"Tensor.new_tensor\(numbers\)", lambda: X.new_tensor([1.0])),
    ("to a device", r"a copy from cpu to meta of pageable memory", lambda: X.to("meta")),
    ("copy_", r"a copy from cpu to meta of pageable memory", lambda: FAR.clone().copy_(X)),
    (
        "copy_ of pageable memory",
        r"a copy from cpu to meta of pageable memory",
        lambda: FAR.clone().copy_(X, non_blocking=True),
    ),
]

WAITS: list[tuple[str, str, Callable[[], object]]] = [
    ("device", r"torch.cuda.synchronize\(\)", lambda: torch.cuda.synchronize()),
    ("stream", r"Stream.synchronize\(\)", lambda: torch.cuda.Stream.synchronize(None)),
    ("event", r"Event.synchronize\(\)", lambda: torch.cuda.Event.synchronize(None)),
    ("accelerator", r"torch.accelerator.synchronize\(\)", lambda: torch.accelerator.synchronize()),
    ("cpu", r"torch.cpu.synchronize\(\)", lambda: torch.cpu.synchronize()),
]

ADVICE = {
    "reads": (READS, "keep the number in a tensor"),
    "sizes": (SIZES, "the size of its result depends on the data; use what has a size that"),
    "copies": (COPIES, "copy before the step, or between pinned memory"),
    "waits": (WAITS, "wait after the step, not within it"),
}

ALLOWED: list[tuple[str, Callable[[], object]]] = [
    ("arithmetic", lambda: (X * 2 + ONE).sum().exp()),
    ("sort, topk", lambda: (X.sort(), X.topk(2), X.cumsum(0))),
    ("where of three", lambda: torch.where(MASK, X, 0)),
    ("masked_fill", lambda: X.masked_fill(MASK, 0)),
    ("a number set by a mask", lambda: X.clone().__setitem__(MASK, 1.0)),
    ("an integer index", lambda: (X[COUNTS], X.index_select(0, COUNTS), X[1:])),
    ("set by an integer index", lambda: X.clone().__setitem__(COUNTS, X)),
    ("nonzero_static", lambda: torch.nonzero_static(X, size=3)),
    (
        "repeat_interleave",
        lambda: torch.repeat_interleave(torch.tensor([1, 0, 2]), output_size=3),
    ),
    ("another dtype", lambda: (X.to(torch.int32), X.long(), X.to(ONE))),
    ("its own device", lambda: (X.to(X.device), X.to(device=X.device))),
    ("not waited for", lambda: X.to("cpu", non_blocking=True)),
    ("new tensors", lambda: (torch.zeros(3), X.new_empty(2), torch.full((2,), 3.0, device="cpu"))),
    ("the host's own tensor", lambda: torch.tensor([1, 2])),
    ("a copy on the device", lambda: X.clone().copy_(X)),
    ("shapes", lambda: (X.shape, len(X), X.dtype, X.is_contiguous(), X.data_ptr())),
]


@pytest.mark.parametrize(
    ("call", "named", "advice"),
    [
        pytest.param(call, named, advice, id=f"{kind}: {name}")
        for kind, (cases, advice) in ADVICE.items()
        for name, named, call in cases
    ],
)
def test_a_call_that_waits_for_the_device_is_named_with_a_way_out(
    call: Callable[[], object], named: str, advice: str
) -> None:
    sentence = rf"^{named}.* waits for the device, which a captured step must not: {advice}"
    with forbid_syncs(), pytest.raises(ConfigError, match=sentence):
        call()


@pytest.mark.parametrize("call", [case[1] for case in ALLOWED], ids=[case[0] for case in ALLOWED])
def test_what_a_graph_can_replay_is_left_alone(call: Callable[[], object]) -> None:
    with forbid_syncs():
        call()


@pytest.mark.parametrize("case", [*READS, *SIZES, COPIES[0], COPIES[2]], ids=lambda case: case[0])
def test_behind_the_step_all_is_allowed_again(
    case: tuple[str, str, Callable[[], object]],
) -> None:
    with forbid_syncs():
        pass
    case[2]()
    with pytest.raises(KeyError), forbid_syncs():
        raise KeyError
    case[2]()


def test_an_op_of_ours_is_one_call_whatever_its_twin_reads() -> None:
    ids_TK = torch.tensor([[0, 1], [1, -1]], dtype=torch.int32)
    weights_TK = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    layers, num_tokens = torch.zeros(1, dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    groups_LE = torch.tensor([[0, 1]], dtype=torch.int32)
    with forbid_syncs():
        _, places_STK, _ = pack(ids_TK[None], layers, num_tokens, groups_LE, 2)
        torch.ops.torch_eaas.pack(ids_TK[None], layers, num_tokens, groups_LE, 2)
        rows_RD = torch.ones(4, 3)
        out_TD = combine_rows(rows_RD, places_STK.view(-1, 2), weights_TK, num_tokens_S=num_tokens)
    assert out_TD.tolist() == [[1.0] * 3] * 2


def test_only_tensors_of_the_named_device_count() -> None:
    host = torch.tensor([1.0, 2.0])
    with forbid_syncs(device="meta"):
        assert (host.tolist(), host.cpu().sum().item()) == ([1.0, 2.0], 3.0)
        assert host[host > 1].tolist() == [2.0]
        with pytest.raises(ConfigError, match=r"Tensor.item\(\) waits"):
            FAR.sum().item()
        with pytest.raises(ConfigError, match=r"torch.tensor\(numbers, device=...\) waits"):
            torch.tensor([1.0], device="meta")
        with pytest.raises(ConfigError, match="a copy from cpu to meta of pageable memory"):
            host.to("meta", non_blocking=True)
        with pytest.raises(ConfigError, match="indexing with a tensor of another device"):
            FAR[torch.tensor([0])]


def test_memory_that_is_pinned_may_be_copied_without_a_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # there is no pinned memory without a GPU
    monkeypatch.setattr(Tensor, "is_pinned", lambda self: True)
    with forbid_syncs():
        FAR.clone().copy_(X, non_blocking=True)
        X.to("meta", non_blocking=True)
        with pytest.raises(ConfigError, match="a copy from cpu to meta without non_blocking=True"):
            FAR.clone().copy_(X)


def test_other_threads_may_wait_and_have_no_steps_of_their_own() -> None:
    found: list[object] = []

    def other() -> None:
        found.append(X.tolist())
        torch.cpu.synchronize()
        try:
            with forbid_syncs():
                found.append("entered")
        except ConfigError as error:
            found.append(str(error))

    with forbid_syncs():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(20)
        with forbid_syncs(), pytest.raises(ConfigError, match="waits for the device"):
            torch.cpu.synchronize()
    assert found == [
        [3.0, 0.0, 2.0],
        "forbid_syncs is on in another thread; one at a time can use it",
    ]
    torch.cpu.synchronize()
