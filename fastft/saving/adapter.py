"""Saving the adapters alone: PEFT's own files under PEFT's own names, with the tokenizer beside them.

Plain PEFT loads what is here, without fastft. What this adds to `model.save_pretrained` is that the folder holds
exactly this save, that it takes its place only when it is whole, and that the files are read back and compared, bit by
bit, with the adapters of the live model.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from fastft.saving.check import SaveCheckError
from fastft.saving.folder import check_target, replacing

__all__ = ["save_adapter"]


def save_adapter(model: Any, tokenizer: Any, folder: str | os.PathLike[str]) -> Path:
    """Save the active adapters of a PeftModel, as `model.save_pretrained` lays them out, and the tokenizer.

    Args:
        model: a PeftModel.
        tokenizer: saved beside the adapters; None: none.
        folder: replaced as a whole if it holds an earlier save.

    Returns:
        The folder.

    Raises:
        TypeError: `model` is no PeftModel.
        ValueError: a folder that should not be replaced.
        OSError: no permission, no space, or a write failed. What was in `folder` is as before.
        SaveCheckError: the files do not hold what the model holds.
    """
    from peft import PeftModel, get_peft_model_state_dict

    if not isinstance(model, PeftModel):
        raise TypeError(
            f"{type(model).__name__} is no PeftModel, so it has no adapter to save. Make one with "
            "FastModel.get_peft_model, or save the model itself: model.save_pretrained(folder)."
        )
    names = list(model.active_adapters)
    bases = [config.base_model_name_or_path for config in model.peft_config.values()]
    path = check_adapter_target(folder, bases)
    size = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    with replacing(path, size) as temporary:
        model.save_pretrained(str(temporary), selected_adapters=names)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        for name in names:
            inner = temporary if name == "default" else temporary / name
            _compare(inner / "adapter_model.safetensors", get_peft_model_state_dict(model, adapter_name=name), name)
    return path


def check_adapter_target(folder: str | os.PathLike[str], bases: list[str | None]) -> Path:
    """As `check_target`; the folders of named adapters, which PEFT writes, are no strangers here."""
    path = Path(os.path.abspath(Path(folder).expanduser()))
    if path.is_dir() and any((entry / "adapter_config.json").is_file() for entry in path.iterdir() if entry.is_dir()):
        others = [e for e in path.iterdir() if e.is_dir() and not (e / "adapter_config.json").is_file()]
        trained = [e for e in path.iterdir() if e.is_dir() and (e / "trainer_state.json").is_file()]
        if not others and not trained:
            return path
    return check_target(folder, *bases)


def _compare(file: Path, live: dict[str, torch.Tensor], name: str) -> None:
    from safetensors.torch import load_file

    written = load_file(file)
    differing = sorted(live.keys() ^ written.keys()) or [
        key for key, tensor in live.items() if not torch.equal(written[key], tensor.detach().cpu())
    ]
    if differing:
        raise SaveCheckError(
            f"the adapter {name!r} was not written as it is: {', '.join(differing[:3])} differ (of {len(differing)})."
        )
