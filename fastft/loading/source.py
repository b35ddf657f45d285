"""What a model name is: a local folder, a hub name, an adapter, or a GGUF file.

Decided by what is there and never by how the name is spelled: a folder may be called anything. Only when nothing is
found does the spelling matter, because the error then says whether a folder or a hub name was meant.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

__all__ = ["HUB_OPTIONS", "Source", "adapter_base", "describe_failure", "has_tokenizer", "resolve_source"]

ADAPTER_CONFIG = "adapter_config.json"
MODEL_CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"

# Keyword arguments of every Hugging Face loader that say where and how files are fetched.
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "subfolder")

_BASE_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True)
class Source:
    """One resolved name.

    Attributes:
        kind: "model" (a checkpoint with config.json), "adapter" (a PEFT adapter over a base), or "gguf".
        name: the folder or hub name, as Hugging Face's loaders take it.
        local: whether `name` is a folder on this machine.
        hub: token, revision and the other fetch options, for every loader that reads `name`.
        gguf_path: the GGUF file on this machine, for kind "gguf".
    """

    kind: Literal["model", "adapter", "gguf"]
    name: str
    local: bool
    hub: dict[str, Any] = field(default_factory=dict)
    gguf_path: Path | None = None


def resolve_source(model_name: str | os.PathLike[str], *, gguf_file: str | None = None, **hub: Any) -> Source:
    """Find out what `model_name` is.

    Args:
        model_name: a folder, a hub name, or the path of a .gguf file.
        gguf_file: a GGUF file's name inside that folder or hub repository.
        **hub: `token`, `revision` and the options in `HUB_OPTIONS`.

    Raises:
        FileNotFoundError: a folder or file that is not there.
        ValueError: a folder that holds both a whole checkpoint and an adapter.
        OSError: a GGUF file that the hub does not give (its own error is the cause). A hub name without `gguf_file` is
            only asked whether it is an adapter; that it does not exist shows when its configuration is read.
    """
    hub = {name: value for name, value in hub.items() if value is not None}
    path = Path(model_name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return Source("gguf", str(path.parent), local=True, gguf_path=path)
    if path.is_dir():
        return _resolve_folder(path, gguf_file, hub)
    name = os.fspath(model_name)
    if _looks_local(name):
        raise FileNotFoundError(_missing_folder(name, path))
    return _resolve_hub(name, gguf_file, hub)


def _resolve_folder(folder: Path, gguf_file: str | None, hub: dict[str, Any]) -> Source:
    name = str(folder)
    inner = folder / hub.get("subfolder", "")
    if gguf_file is not None:
        gguf_path = inner / gguf_file
        if not gguf_path.is_file():
            raise FileNotFoundError(f"gguf_file={gguf_file!r} is not in {inner}, which holds {_listing(inner)}.")
        return Source("gguf", name, local=True, hub=hub, gguf_path=gguf_path)
    has_config = (inner / MODEL_CONFIG).is_file()
    if (inner / ADAPTER_CONFIG).is_file():
        weights = [found.name for pattern in _BASE_WEIGHTS for found in sorted(inner.glob(pattern))]
        if has_config and weights:
            raise ValueError(
                f"{inner} holds both a whole checkpoint ({weights[0]}) and an adapter ({ADAPTER_CONFIG}): loading it "
                "could mean either. Move one of them to its own folder, or load the checkpoint with "
                "AutoModelForCausalLM, fastft.patch it, and add the adapter with PeftModel.from_pretrained(model, "
                "folder, is_trainable=True)."
            )
        return Source("adapter", name, local=True, hub=hub)
    if not has_config:
        raise FileNotFoundError(_not_a_checkpoint(inner))
    return Source("model", name, local=True, hub=hub)


def _resolve_hub(name: str, gguf_file: str | None, hub: dict[str, Any]) -> Source:
    from transformers.utils import cached_file, find_adapter_config_file

    if gguf_file is not None:
        try:
            found = cached_file(name, gguf_file, **hub)
        except OSError as error:
            raise OSError(describe_failure(name, error)) from error
        if found is None:
            raise OSError(f"{name!r} on the hub was reached, but {gguf_file!r} could not be fetched from it.")
        return Source("gguf", name, local=False, hub=hub, gguf_path=Path(found))
    # Silent about an unreachable hub: a model may be whole in the cache. Reading its configuration is what fails aloud.
    adapter = find_adapter_config_file(name, **hub)
    return Source("model" if adapter is None else "adapter", name, local=False, hub=hub)


def adapter_base(adapter: Source) -> Source:
    """The model that an adapter was trained on, resolved.

    Raises:
        ValueError: the adapter does not say.
        FileNotFoundError: it names a folder that is not on this machine (the plain error is its cause).
        OSError: as `resolve_source`.
    """
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(adapter.name, **adapter.hub)
    base = config.base_model_name_or_path
    how = (
        f"Put the base model's folder or hub name into base_model_name_or_path of {ADAPTER_CONFIG}, or load the base "
        "with FastModel.from_pretrained, add the adapter with PeftModel.from_pretrained(model, adapter, "
        "is_trainable=True), then fastft.patch(model)."
    )
    if not base:
        raise ValueError(f"The adapter {adapter.name!r} does not say which model it was trained on. {how}")
    options = {name: value for name, value in adapter.hub.items() if name not in ("revision", "subfolder")}
    try:
        return resolve_source(base, revision=config.revision, **options)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"The adapter {adapter.name!r} was trained on {base!r}: {error} {how}") from error


def has_tokenizer(source: Source) -> bool:
    """Whether a tokenizer is kept with `source` (training saves one beside an adapter)."""
    if source.local:
        return (Path(source.name) / source.hub.get("subfolder", "") / TOKENIZER_CONFIG).is_file()
    from transformers.utils import cached_file

    found = cached_file(
        source.name, TOKENIZER_CONFIG,
        _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False, **source.hub,
    )  # fmt: skip
    return found is not None


def describe_failure(name: str, error: BaseException) -> str:
    """What to tell the user when the hub did not give `name`: where it was looked for and what to try."""
    return (
        f"{name!r} could not be loaded. It is no folder here (looked in {Path.cwd()}), so it was taken as a name on "
        f"the Hugging Face hub, which answered: {str(error).strip()}\n"
        "If you meant a folder, give its path (an absolute one cannot be mistaken). If you meant the hub: check the "
        "spelling (owner/name) and the revision; for a private or gated repository accept its terms and pass token=... "
        "or run `hf auth login`; without network only what is already in the cache can be loaded."
    )


def _looks_local(name: str) -> bool:
    """Whether `name` is spelled as a path: a hub name is 'name' or 'owner/name' and nothing else."""
    is_path = name.startswith(("/", ".", "~")) or name.endswith(("/", ".gguf")) or os.path.isabs(name)
    return is_path or "\\" in name or name.count("/") > 1


def _missing_folder(name: str, path: Path) -> str:
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    return (
        f"{name!r} looks like a path on this machine, but there is no such folder or file: {path.absolute()} "
        f"(the part that exists is {parent}). Check the path; a name on the hub is written 'owner/name'."
    )


def _not_a_checkpoint(folder: Path) -> str:
    gguf_files = sorted(found.name for found in folder.glob("*.gguf"))
    if gguf_files:
        advice = f"To load the GGUF file pass gguf_file={gguf_files[0]!r}."
    else:
        advice = (
            "A model folder is what `save_pretrained` writes. If this is a training output folder, one of its "
            "checkpoint-* folders may be what you want."
        )
    return (
        f"{folder} is a folder, but neither a model nor an adapter: it has no {MODEL_CONFIG} and no {ADAPTER_CONFIG}. "
        f"It holds {_listing(folder)}. {advice}"
    )


def _listing(folder: Path, limit: int = 8) -> str:
    if not folder.is_dir():
        return "nothing (no such folder)"
    names = sorted(entry.name for entry in folder.iterdir())
    if not names:
        return "nothing"
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
