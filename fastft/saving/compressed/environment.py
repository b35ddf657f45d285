"""llm-compressor in this process: may it run here, and what it would leave behind.

llm-compressor declares narrow ranges (0.14: transformers up to 5.17, one version of compressed-tensors), and what it
does inside them is not what it does outside. So its own metadata is asked before any work, and a version outside is an
error that names it. The merge does not need llm-compressor at all: it can be done here, and the merged folder be
compressed in an environment of its own, which every such error says how to do.

The library is written for a process of its own. Importing it takes all of loguru's sinks away and puts its own on
stdout; a run writes an environment variable and keeps the model in a global session. Here it is imported with its
logging switched off, which leaves loguru alone, and runs in a session that ends with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

__all__ = ["llmcompressor_session", "require_llmcompressor"]

_ELSEWHERE = """
Nothing was merged or written yet. To keep this environment as it is, save merged here and compress in one of its own:
    FastModel.save_merged(model, tokenizer, "merged")
    python -m venv compressing && compressing/bin/pip install 'fastft[compressed]'
    compressing/bin/fastft compress merged OUT --scheme {scheme}"""
_LOGGING, _TOKENIZERS = "LLM_COMPRESSOR_LOG_DISABLED", "TOKENIZERS_PARALLELISM"


def require_llmcompressor(scheme: str) -> None:
    """Refuse to start where llm-compressor is missing, or other packages are not in the ranges it declares.

    Args:
        scheme: what was asked for, for the advice in the error.

    Raises:
        ImportError: the package, the version that is installed and the one that is wanted.
    """
    elsewhere = _ELSEWHERE.format(scheme=scheme)
    try:
        version = metadata.version("llmcompressor")
        metadata.version("compressed-tensors")
    except metadata.PackageNotFoundError as error:
        raise ImportError(
            "Compressed formats need llm-compressor and compressed-tensors: pip install 'fastft[compressed]'. (That "
            "moves transformers and compressed-tensors to the versions llm-compressor is tied to.)" + elsewhere
        ) from error
    wrong = _out_of_range(metadata.requires("llmcompressor") or [])
    if wrong:
        raise ImportError(
            f"llmcompressor {version} does not work with what is installed here: {'; '.join(wrong)}." + elsewhere
        )


def _out_of_range(requirements: list[str]) -> list[str]:
    """What is installed in another version than a requirement wants, in words. Missing packages show at the import."""
    from packaging.requirements import Requirement

    wrong = []
    for line in requirements:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            wrong.append(f"it wants {requirement.name}{requirement.specifier}, and {installed} is installed")
    return wrong


@contextmanager
def llmcompressor_session() -> Iterator[None]:
    """Import llm-compressor and give it a session of its own; loguru, environment and session are as before afterwards.

    Raises:
        ImportError: a package that it imports is missing.
    """
    before = {name: os.environ.get(name) for name in (_LOGGING, _TOKENIZERS)}
    try:
        os.environ.update({_LOGGING: "true", _TOKENIZERS: "false"})
        try:
            from llmcompressor import create_session
            from loguru import logger as loguru
        except ImportError as error:
            raise ImportError(f"llm-compressor is installed, but cannot be imported here: {error}") from error
        _need_level(loguru)
        for name in ("llmcompressor", "compressed_tensors"):
            loguru.disable(name)
        try:
            with create_session():
                yield
        finally:
            for name in ("llmcompressor", "compressed_tensors"):
                loguru.enable(name)
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _need_level(loguru: Any) -> None:
    """GPTQ logs at a level of its own, which is missing when logging was off at the import."""
    try:
        loguru.level("METRIC")
    except ValueError:
        loguru.level("METRIC", no=38)
