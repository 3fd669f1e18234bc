"""The server's arithmetic, useful alone. Each op has a plain twin in ``reference`` that defines it.

A layer on a device, from the tokens in a server's slots to each token's sum, without a host sync::

    rows_R, places_STK, counts_G = pack(ids_STK, layers_S, num_tokens_S, groups_LE, num_groups)
    active_G, offsets_G, tiles_G, totals_3 = group_shrink(counts_G, block_rows=64)
    gate_up_R2I = ...  # a grouped GEMM over the active groups; row r is token rows_R[r] // K
    hidden_RI = swiglu(gate_up_R2I, totals_3)
    down_RD = ...  # and another
    out_TD = combine(down_RD, places_STK.view(-1, K), weights_TK, num_tokens_S=num_tokens_S)

Each public name is loaded on first use, so that what needs the twins only brings no Triton. No file
here is named like a public name: importing that file would put the module in the function's place.

This package and ``comm`` are strangers: neither imports the other.
"""

from importlib import import_module

_HOMES = {
    "combine": "combining",
    "group_shrink": "shrinking",
    "pack": "packing",
    "quantize_rows": "row_quantizer",
    "swiglu": "activation",
    "swiglu_quantize": "activation",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    """Load a public name on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
