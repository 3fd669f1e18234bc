"""The server's arithmetic, useful alone. Each op has a plain twin in ``reference`` that defines it.

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
