"""Strict accounting: every tensor that a model needs is there, and every tensor there has a use."""

from collections.abc import Collection, Mapping

import torch

from torch_eaas.errors import CheckpointError
from torch_eaas.models.checkpoint import SCALE_SUFFIX, Checkpoint

MAX_NAMED = 8
"""How many tensors of one kind a message names."""


def check_tensors(
    checkpoint: Checkpoint,
    expected: Mapping[str, tuple[int, ...]],
    allowed: Collection[str],
) -> None:
    """Check a checkpoint's tensors against a model's; reads headers only.

    Args:
        checkpoint: The checkpoint.
        expected: Name and shape of each tensor that must be there. The scales of those that are
            FP8 must be there too.
        allowed: Names of others that may be there.

    Raises:
        CheckpointError: With file and name of each tensor that is missing, unexpected or of
            the wrong shape.
    """
    names = checkpoint.names
    present = {name: checkpoint.info(name) for name in expected if name in names}
    scales = {
        name + SCALE_SUFFIX for name, info in present.items() if info.dtype == torch.float8_e4m3fn
    }
    missing = [name for name in [*expected, *sorted(scales)] if name not in names]
    unexpected = [
        checkpoint.where(name)
        for name in sorted(names - expected.keys() - scales - frozenset(allowed))
    ]
    misshapen = [
        f"{checkpoint.where(name)} is {info.shape}, not {expected[name]}"
        for name, info in present.items()
        if info.shape != expected[name]
    ]
    faults = {"missing": missing, "unexpected": unexpected, "of the wrong shape": misshapen}
    if any(faults.values()):
        listed = "; ".join(_list(kind, found) for kind, found in faults.items() if found)
        raise CheckpointError(f"{checkpoint.path} does not fit its config: {listed}")


def _list(kind: str, found: list[str]) -> str:
    rest = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return f"{len(found)} {kind}: {', '.join(found[:MAX_NAMED])}{rest}"
