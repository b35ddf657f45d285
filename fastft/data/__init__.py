"""Data helpers: from raw rows to labels that are exactly what should be trained, on datasets and TRL's own
utilities.

Each name is imported on first use: none of datasets, trl and jinja2 is loaded by `import fastft.data`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastft.data.check import DatasetCheck, check_dataset
    from fastft.data.responses import train_on_responses_only
    from fastft.data.standard import standardize_chat
    from fastft.data.templates import CHAT_TEMPLATES, get_chat_template
    from fastft.data.text import text_files

_LAZY = {
    "CHAT_TEMPLATES": "fastft.data.templates",
    "DatasetCheck": "fastft.data.check",
    "check_dataset": "fastft.data.check",
    "get_chat_template": "fastft.data.templates",
    "standardize_chat": "fastft.data.standard",
    "text_files": "fastft.data.text",
    "train_on_responses_only": "fastft.data.responses",
}

__all__ = [
    "CHAT_TEMPLATES",
    "DatasetCheck",
    "check_dataset",
    "get_chat_template",
    "standardize_chat",
    "text_files",
    "train_on_responses_only",
]


def __getattr__(name: str) -> Any:
    """Public names on first use (PEP 562)."""
    import importlib

    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'fastft.data' has no attribute {name!r}; it has {', '.join(__all__)}")
