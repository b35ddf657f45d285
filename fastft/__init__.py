"""fastft: Hugging Face fine-tuning, faster and smaller, without changing how anyone writes it.

Importing installs inert patches (a method acts only on instances that carry a plan), prints nothing, and loads
neither trl, peft, bitsandbytes nor Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastft.patching import install as _install

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fastft import functional as functional
    from fastft.data import (
        check_dataset,
        get_chat_template,
        standardize_chat,
        text_files,
        train_on_responses_only,
    )
    from fastft.model import FastLanguageModel, FastModel
    from fastft.patching.plan import patch, patched, release_memory, unpatch
    from fastft.patching.registry import stock_only
    from fastft.patching.report import report
    from fastft.training.learning_rates import create_optimizer
    from fastft.training.run import RunCallback
    from fastft.verification import verify

_LAZY = {
    "FastModel": "fastft.model",
    "FastLanguageModel": "fastft.model",
    "RunCallback": "fastft.training.run",
    "check_dataset": "fastft.data",
    "create_optimizer": "fastft.training.learning_rates",
    "get_chat_template": "fastft.data",
    "patch": "fastft.patching.plan",
    "patched": "fastft.patching.plan",
    "release_memory": "fastft.patching.plan",
    "report": "fastft.patching.report",
    "standardize_chat": "fastft.data",
    "stock_only": "fastft.patching.registry",
    "text_files": "fastft.data",
    "train_on_responses_only": "fastft.data",
    "unpatch": "fastft.patching.plan",
    "verify": "fastft.verification",
}

__all__ = [
    "FastLanguageModel",
    "FastModel",
    "RunCallback",
    "check_dataset",
    "create_optimizer",
    "functional",
    "get_chat_template",
    "patch",
    "patched",
    "release_memory",
    "report",
    "standardize_chat",
    "stock_only",
    "text_files",
    "train_on_responses_only",
    "unpatch",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Public names on first use (PEP 562), so that `import fastft` costs next to nothing."""
    import importlib

    if name == "functional":
        return importlib.import_module("fastft.functional")
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'fastft' has no attribute {name!r}; it has {', '.join(__all__)}")


_install()
