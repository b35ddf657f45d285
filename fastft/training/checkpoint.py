"""`fastft.json` in a checkpoint: which fastft wrote it, by which loss, for which parameters; read before resuming.

A run that resumes under another loss convention goes on with a jump that looks like a bug of the data, and an
optimizer's state is stored by position: a model that trains other parameters of like shapes takes up moments that
belong to others, and nobody says so. So the parameters must be the same (an error, before a weight is loaded), and a
difference in the loss is worth a warning.

The file is plain JSON beside transformers' own; a checkpoint without it (a stock run's) resumes as ever.
"""

from __future__ import annotations

import json
import pathlib
import warnings
from importlib import metadata
from typing import Any

from torch import nn

from fastft.patching import registry
from fastft.patching.approximations import chosen

FILE_NAME = "fastft.json"
FORMAT = 1
# What the reported loss and its gradient mean; changed only when they change.
LOSS = "sum over counted tokens / num_items_in_batch, else / their number"
_LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes")
_NAMED = 6  # parameters that an error lists

__all__ = ["FILE_NAME", "check_before_resuming", "describe", "write"]


def describe(trainer: Any, inner: nn.Module, site: registry.Site) -> dict[str, Any]:
    """What a checkpoint of this run says of itself.

    Args:
        trainer: the one that trains.
        inner: the transformers model, inside its PEFT wrapper.
        site: the backbone's plan.
    """
    import fastft

    arguments = trainer.args
    sites = [one for module in inner.modules() if (one := registry.site_of(module)) is not None]
    return {
        "format": FORMAT,
        "fastft": fastft.__version__,
        "libraries": {name: version for name in _LIBRARIES if (version := _version(name)) is not None},
        "trainer": type(trainer).__name__,
        "loss": {
            "convention": LOSS,
            "num_items_in_batch": bool(trainer.model_accepts_loss_kwargs),
            "average_tokens_across_devices": bool(arguments.average_tokens_across_devices),
            "label_smoothing_factor": float(arguments.label_smoothing_factor),
            "loss_type": _plain(getattr(arguments, "loss_type", None)),
            "own_loss_function": trainer.compute_loss_func is not None,
        },
        "arithmetic": {"approximations": chosen(sites), "padding_free": site.padding_free},
        "trainable": {
            name: "x".join(map(str, p.shape)) for name, p in trainer.model.named_parameters() if p.requires_grad
        },
    }


def write(folder: pathlib.Path, description: dict[str, Any]) -> None:
    """Put `fastft.json` into a checkpoint's folder."""
    (folder / FILE_NAME).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")


def check_before_resuming(folder: pathlib.Path, now: dict[str, Any]) -> None:
    """Compare a checkpoint's `fastft.json`, if it has one, with the run that is about to resume from it.

    Args:
        folder: the checkpoint's.
        now: `describe` of the run.

    Raises:
        ValueError: the file cannot be read, or other parameters were trained then: it names them.

    Warns:
        UserWarning: another fastft, loss or arithmetic wrote it: it says what differs.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return
    try:
        then = json.loads(path.read_text(encoding="utf-8"))
        trained = dict(then["trainable"].items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{path} does not say what a fastft checkpoint says ({error!r}). Resume from another checkpoint; if you "
            "are sure of this one, delete that file."
        ) from error
    if list(trained.items()) != list(now["trainable"].items()):
        raise ValueError(
            f"the checkpoint {folder} trained other parameters than this run does: {_difference(trained, now)} Its "
            "optimizer state belongs to its own parameters, so nothing was loaded. Give the model the adapter (r, "
            "target_modules, modules_to_save) it had then, or start anew from the weights: "
            "FastModel.from_pretrained of the checkpoint's folder, and train() without resume_from_checkpoint."
        )
    differences = [
        f"{what.replace('_', ' ')} was {_read(then, part, what)!r} and is {value!r}"
        for part in ("loss", "arithmetic")
        for what, value in now[part].items()
        if _read(then, part, what) != value
    ]
    if then.get("fastft") != now["fastft"]:
        differences.insert(0, f"fastft was {then.get('fastft')} and is {now['fastft']}")
    if differences:
        warnings.warn(
            f"fastft: resuming from {folder}, which was written under other terms: {'; '.join(differences)}. Losses "
            "before and after need not line up.",
            stacklevel=2,
        )


def _difference(then: dict[str, str], now: dict[str, Any]) -> str:
    """The parameters, by name: those of one side only, those of another shape, or their order."""
    current = now["trainable"]
    gone, new = [name for name in then if name not in current], [name for name in current if name not in then]
    shapes = [
        f"{name} was {then[name]}, is {current[name]}" for name in then if current.get(name, then[name]) != then[name]
    ]
    parts = [
        f"{what}: {', '.join(names[:_NAMED])}{f' and {len(names) - _NAMED} more' if len(names) > _NAMED else ''}."
        for what, names in (
            ("only in the checkpoint", gone),
            ("only in this run", new),
            ("of another shape", shapes),
        )
        if names
    ]
    return " ".join(parts) or "the same ones in another order."


def _read(then: dict[str, Any], part: str, what: str) -> Any:
    section = then.get(part)
    return section.get(what) if isinstance(section, dict) else None


def _plain(value: Any) -> Any:
    """As JSON gives it back: DPO's `loss_type` may be a list."""
    return list(map(str, value)) if isinstance(value, (list, tuple)) else None if value is None else str(value)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
