"""Importing Lightning Thunder on a torch it does not know yet.

Thunder 0.2.6 (its newest release, and its head) names five methods of named tensors when it is imported. torch 2.13
removed named tensors, so `import thunder` alone raises AttributeError there. Nothing else of Thunder's needs them: with
stand-ins on `torch.Tensor` during the import, and taken off again after it, Thunder works.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["import_thunder"]

_NAMED_TENSOR_METHODS = ("align_as", "align_to", "has_names", "refine_names", "rename")
_INSTALL = (
    "Install it with `pip install lightning-thunder`; beside transformers 5, litgpt needs `pip install --no-deps "
    "litgpt` (it asks for an older huggingface_hub, and works with the new one)."
)


def _stand_in(name: str) -> Any:
    """A method that only says it is none; Thunder reads its name."""

    def absent(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        raise AttributeError(f"this torch has no named tensors, and so no Tensor.{name}")

    absent.__name__ = absent.__qualname__ = name
    return absent


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """Stand-ins for the methods that this torch lacks, for as long as the context lasts."""
    missing = [name for name in _NAMED_TENSOR_METHODS if not hasattr(torch.Tensor, name)]
    for name in missing:
        setattr(torch.Tensor, name, _stand_in(name))
    try:
        yield
    finally:
        for name in missing:
            delattr(torch.Tensor, name)


def import_thunder() -> Any:
    """The `thunder` module, imported whatever the installed torch.

    Raises:
        ImportError: where Thunder is not installed.
    """
    if "thunder" in sys.modules:
        return sys.modules["thunder"]
    with _stand_ins():
        try:
            return importlib.import_module("thunder")
        except ModuleNotFoundError as error:
            raise ImportError(
                f"fastft.integrations.thunder needs Lightning Thunder, but {error.name!r} is missing. {_INSTALL}"
            ) from error
