"""Finds what a captured step must not do, also where no GPU is: calls that wait for the device.

A CUDA graph replays launches. A call that hands the host a number, a size or a copy has to wait for
the device first: a capture fails at it, and an eager step stalls.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from torch_eaas.errors import ConfigError

_KEEP = "keep the number in a tensor: torch.where, masked_fill and index_select take tensors"
_SIZE = (
    "the size of its result depends on the data; use what has a size that the host knows: "
    "torch.where of three arguments, masked_fill, torch.nonzero_static"
)
_COPY = "copy before the step, or between pinned memory and the device with non_blocking=True"
_WAIT = "wait after the step, not within it"

_READS: dict[Any, str] = {
    torch.Tensor.item: "Tensor.item()",
    torch.Tensor.tolist: "Tensor.tolist()",
    torch.Tensor.numpy: "Tensor.numpy()",
    torch.Tensor.cpu: "Tensor.cpu()",
    torch.Tensor.__array__: "numpy.asarray(tensor)",
    torch.Tensor.__bool__: "bool(tensor)",
    torch.Tensor.__int__: "int(tensor)",
    torch.Tensor.__float__: "float(tensor)",
    torch.Tensor.__index__: "a tensor as an index, a bound or a count",
    torch.Tensor.__contains__: "number in tensor",
    torch.Tensor.__format__: "a tensor in a text",
    torch.Tensor.__repr__: "a tensor in a text",
}
"""What the caller wrote and torch's methods know nothing else of."""

_FROM_HOST: dict[Any, str] = {
    torch.tensor: "torch.tensor(numbers, device=...)",
    torch.as_tensor: "torch.as_tensor(numbers, device=...)",
    torch.asarray: "torch.asarray(numbers, device=...)",
}

_AFTER_READING = ("_local_scalar_dense", "equal", "allclose")

_OF_UNKNOWN_SIZE = (
    *("nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive"),
    *("unique_dim_consecutive", "bincount"),
)

_INDEXED = ("index", "index_put", "index_put_")

_WAITS: tuple[tuple[Any, str, str], ...] = (
    (torch.cuda, "synchronize", "torch.cuda.synchronize()"),
    (torch.cuda.Event, "synchronize", "Event.synchronize()"),
    (torch.cuda.Stream, "synchronize", "Stream.synchronize()"),
    (torch.accelerator, "synchronize", "torch.accelerator.synchronize()"),
    (torch.cpu, "synchronize", "torch.cpu.synchronize()"),
)

_READS_ON_HOST = "torch_eaas.client_tickets"
"""Reads tickets, which lie on the host also where tokens are on a GPU."""

_ONE_THREAD = threading.RLock()


@contextmanager
def forbid_syncs(device: torch.device | str = "cpu") -> Iterator[None]:
    """Let every call of this thread that would wait for the device raise; for tests of steps.

    Forbidden are reads (``.item()``, ``.tolist()``, ``.cpu()``, ``bool(tensor)``, a tensor as an
    index), results whose size depends on data (``nonzero``, ``x[mask]``), copies between devices
    that are not non-blocking or not pinned, tensors made of the host's numbers, and
    ``synchronize`` of the device, of streams and of events. An op of ``torch.ops.torch_eaas`` is
    one call: what its twin reads on a CPU, its kernel reads on the device.

    Args:
        device: Where the step runs: tensors there count. With ``"cpu"`` a step is shown to be fit
            for a GPU where there is none: then a literal ``"cpu"`` stands for the host, and
            ``x.device`` for the device.

    Raises:
        ConfigError: The step made such a call, which it names; or another thread is in here.

    Example::

        with forbid_syncs():
            step()  # ConfigError: Tensor.item() waits for the device, ...
    """
    if not _ONE_THREAD.acquire(blocking=False):
        raise ConfigError("forbid_syncs is on in another thread; one at a time can use it")
    try:
        kind = torch.device(device).type
        with ExitStack() as stack:
            for owner, name, shown in _WAITS:
                stack.enter_context(_refused(owner, name, shown))
            ops = _Ops(kind)
            stack.enter_context(_Calls(kind, ops))
            stack.enter_context(ops)
            yield
    finally:
        _ONE_THREAD.release()


def _refuse(call: str, advice: str) -> ConfigError:
    return ConfigError(f"{call} waits for the device, which a captured step must not: {advice}")


@contextmanager
def _refused(owner: Any, name: str, shown: str) -> Iterator[None]:
    """Let a function raise in this thread; others may wait as they like."""
    before = vars(owner)[name]
    mine = threading.get_ident()

    def wait(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == mine:
            raise _refuse(shown, _WAIT)
        return before(*args, **kwargs)

    setattr(owner, name, wait)
    try:
        yield
    finally:
        setattr(owner, name, before)


class _Calls(TorchFunctionMode):
    """Sees calls as they were written; off within a call, so within an op's twin too."""

    def __init__(self, kind: str, ops: _Ops) -> None:
        super().__init__()
        self._kind = kind
        self._ops = ops

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        of_device = bool(args) and isinstance(args[0], Tensor) and args[0].device.type == self._kind
        if func in _READS and sys._getframe(1).f_globals.get("__name__") == _READS_ON_HOST:
            with self._ops.off():
                return func(*args, **kwargs)
        if of_device and func in _READS:
            raise _refuse(_READS[func], _KEEP)
        if of_device and func is torch.Tensor.to:
            self._check_move(args[1:], kwargs)
        if of_device and func is torch.Tensor.new_tensor:
            raise _refuse("Tensor.new_tensor(numbers)", _COPY)
        if func in _FROM_HOST and not of_device and self._is_named(kwargs.get("device")):
            raise _refuse(_FROM_HOST[func], _COPY)
        return func(*args, **kwargs)

    def _check_move(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a move to the host: on a CPU torch has nothing to do, and no op is seen."""
        target = kwargs.get("device", args[0] if args else None)
        # .to(device, dtype, non_blocking)
        is_free = kwargs.get("non_blocking") or any(arg is True for arg in args[1:3])
        if isinstance(target, str) and target == "cpu" and not is_free:
            raise _refuse('Tensor.to("cpu")', _COPY)

    def _is_named(self, device: Any) -> bool:
        """Return whether a call names the device; a literal "cpu" names the host."""
        if device is None or device == "cpu":
            return False
        return torch.device(device).type == self._kind


class _Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Sees the ops that calls come down to, and nothing within them."""

    def __init__(self, kind: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._kind = kind
        self._is_off = False

    @contextmanager
    def off(self) -> Iterator[None]:
        """Let a call read what it likes."""
        self._is_off = True
        try:
            yield
        finally:
            self._is_off = False

    @override
    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        namespace, _, name = func.overloadpacket._qualified_op_name.partition("::")
        if namespace == "aten" and not self._is_off and args and isinstance(args[0], Tensor):
            if args[0].device.type == self._kind:
                self._check_op(name, args, kwargs)
            if name == "copy_":
                is_free = kwargs.get("non_blocking") or args[2:3] == (True,)
                self._check_copy(args[1], args[0].device, args[0], is_free)
            elif name == "_to_copy" and kwargs.get("device") is not None:
                self._check_copy(args[0], kwargs["device"], None, kwargs.get("non_blocking"))
        return func(*args, **kwargs)

    def _check_op(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name in _AFTER_READING:
            shown = "a number read from a tensor" if name.startswith("_") else f"torch.{name}()"
            raise _refuse(shown, _KEEP)
        if name in _OF_UNKNOWN_SIZE:
            raise _refuse(f"torch.{name.strip('_').removesuffix('2')}()", _SIZE)
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            raise _refuse("torch.repeat_interleave() of counts, without output_size,", _SIZE)
        if name in _INDEXED:
            _check_indices(name, args)

    def _check_copy(
        self, source: Tensor, target: torch.device, into: Tensor | None, is_free: object
    ) -> None:
        kinds = {source.device.type, target.type}
        if len(kinds) == 1 or self._kind not in kinds:
            return
        # what torch itself allocates for a copy to the host is pinned
        host = source if source.device.type == "cpu" else into
        is_pageable = host is not None and host.device.type == "cpu" and not host.is_pinned()
        if is_pageable or not is_free:
            where = f"{source.device.type} to {target.type}"
            how = "of pageable memory" if is_pageable else "without non_blocking=True"
            raise _refuse(f"a copy from {where} {how}", _COPY)


def _check_indices(name: str, args: tuple[Any, ...]) -> None:
    given = [index for index in args[1] if index is not None]
    if any(index.device.type != args[0].device.type for index in given):
        raise _refuse("indexing with a tensor of another device", _COPY)
    if not any(index.dtype in (torch.bool, torch.uint8) for index in given):
        return
    # x[mask] = number is a masked_fill
    if name == "index" or args[2].dim() > 0:
        raise _refuse("indexing with a mask", _SIZE)
