"""The operations `fastft bench kernels` knows, one a file: inputs, reference, cost, and who provides it."""

from __future__ import annotations

import importlib

from fastft.bench.operations.base import Operation

__all__ = ["OPERATIONS", "find_operation", "operation_names"]

# Name → module beside this file; imported when asked for.
OPERATIONS = {
    "rms_norm": "rms_norm",
    "rope": "rope",
    "swiglu": "swiglu",
    "dequantize": "dequantize",
    "cross_entropy": "cross_entropy",
    "lora_linear": "lora_linear",
    "dropout": "dropout",
    "sparse_product": "sparse_product",
}
_OTHER_NAMES = {"linear_cross_entropy": "cross_entropy", "nf4": "dequantize"}


def operation_names(names: list[str]) -> list[str]:
    """The operations meant by `names`, each once, in order; all of them for no names.

    Raises:
        ValueError: an unknown name.
    """
    known = [_OTHER_NAMES.get(name, name) for name in names] or list(OPERATIONS)
    unknown = [name for name in known if name not in OPERATIONS]
    if unknown:
        raise ValueError(f"no operation {', '.join(unknown)} to benchmark; there are {', '.join(OPERATIONS)}.")
    return list(dict.fromkeys(known))


def find_operation(name: str) -> Operation:
    """The operation of that name (one of `OPERATIONS`)."""
    module = importlib.import_module(f"fastft.bench.operations.{OPERATIONS[name]}")
    operation: Operation = module.OPERATION
    return operation
