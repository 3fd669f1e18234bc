"""The server's arithmetic, useful alone. Each op has a plain twin in ``reference`` that defines it.

A layer on a device, from the tokens in a server's slots to each token's sum, without a host sync::

    rows_R, places_STK, counts_G = pack(ids_STK, layers_S, num_tokens_S, groups_LE, num_groups)
    groups = ActiveGroups.of(counts_G, block_rows=choose_block_rows(len(rows_R), num_groups))
    gate_up_R2I = grouped_gemm(x_TD, gate_up_G2ID, groups, rows_R=rows_R, gather_div=K)
    hidden_RI = swiglu(gate_up_R2I, groups.totals_3)
    down_RD = grouped_gemm(hidden_RI, down_GDI, groups)
    out_TD = combine_rows(down_RD, places_STK.view(-1, K), weights_TK, num_tokens_S=num_tokens_S)

Each public name is loaded on first use, so that what needs the twins only brings no Triton. No file
here is named like a public name: importing that file would put the module in the function's place.

This package and ``comm`` are strangers: neither imports the other.
"""

from importlib import import_module

_HOMES = {
    "ActiveGroups": "active_groups",
    "GemmConfig": "gemm_config",
    "GemmTuner": "gemm_tuner",
    "choose_block_rows": "gemm_config",
    "combine_rows": "combining",
    "dequantize_rows": "row_dequantizer",
    "group_shrink": "shrinking",
    "grouped_gemm": "gemm",
    "grouped_gemm_fp8": "gemm",
    "pack": "packing",
    "quantize_blocks": "quantize",
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
