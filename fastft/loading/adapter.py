"""Putting a LoRA on a model, through PEFT's own objects, and refusing what would train nothing or the wrong thing.

PEFT is content when one of the requested names matches; a misspelt one among seven then trains six sites and says
nothing. Here every name is looked up. A model that already carries an adapter is never wrapped again: the same request
keeps the weights that are there, another one is an error that names the fields.

`random_state` seeds the initialization alone. `torch.manual_seed` would not do: it also seeds every other device, and
where CUDA is not yet awake it queues a seed for later. So exactly the generators that are used are seeded, inside
`fork_rng`, which puts their states back.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = [
    "check_names",
    "enable_checkpointing",
    "ignoring_checkpointing_rename",
    "keep_existing",
    "require_trainable",
    "seeded",
]

logger = logging.getLogger(__name__)

# Not part of what an adapter is: bookkeeping, and where its base came from.
_BOOKKEEPING = frozenset(
    {"peft_version", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "task_type"}
)


def check_names(model: nn.Module, config: Any) -> None:
    """Check that every name that `config` asks for exists in `model`.

    Args:
        model: the model before it is wrapped.
        config: `peft.LoraConfig`.

    Raises:
        ValueError: a target module, module to save or layer index that is not there; what there is is listed.
    """
    targets = config.target_modules
    if isinstance(targets, str):
        if targets != "all-linear" and not any(re.fullmatch(targets, name) for name, _ in model.named_modules()):
            raise ValueError(f"target_modules={targets!r} (a regular expression) matches no module. {_offer(model)}")
    elif targets is not None:
        if not targets and not config.target_parameters:
            raise ValueError(f"target_modules is empty: nothing would be trained. {_offer(model)}")
        _require_present(model, "target_modules", targets)
    _require_present(model, "modules_to_save", config.modules_to_save or ())
    _require_layers(model, config.layers_to_transform)


def _require_present(model: nn.Module, argument: str, names: Iterable[str]) -> None:
    present = [name for name, _ in model.named_modules()]
    absent = sorted(
        wanted for wanted in names if not any(name == wanted or name.endswith(f".{wanted}") for name in present)
    )
    if absent:
        raise ValueError(
            f"{argument}: {', '.join(map(repr, absent))} matches no module of {type(model).__name__}, so nothing would "
            f"be trained there. {_offer(model)}"
        )


def _offer(model: nn.Module) -> str:
    """What can be targeted: the last part of the names of modules that hold a matrix."""
    kinds: dict[str, int] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.ndim == 2 and name:
            suffix = name.rpartition(".")[2]
            kinds[suffix] = kinds.get(suffix, 0) + 1
    listed = ", ".join(f"{suffix} ({count})" for suffix, count in kinds.items())
    return f"This model has: {listed}."


def _require_layers(model: Any, wanted: int | list[int] | None) -> None:
    if wanted is None:
        return
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    if count is None:
        return
    indices = [wanted] if isinstance(wanted, int) else list(wanted)
    outside = [index for index in indices if not 0 <= index < count]
    if outside:
        raise ValueError(
            f"layers_to_transform: {outside} outside of the model's {count} layers (0 to {count - 1}): nothing would "
            "be trained there."
        )


@contextmanager
def seeded(model: nn.Module, random_state: int | None) -> Iterator[None]:
    """Run the block with the generators of the CPU and of the model's CUDA devices seeded; then put their states back.

    None leaves the generators alone: the block draws from them as they are.
    """
    if random_state is None:
        yield
        return
    indices = sorted({parameter.device.index for parameter in model.parameters() if parameter.is_cuda})
    with torch.random.fork_rng(devices=indices, device_type="cuda"):
        torch.default_generator.manual_seed(random_state)
        for index in indices:
            torch.cuda.default_generators[index].manual_seed(random_state)
        yield


def keep_existing(model: Any, config: Any, adapter_name: str | None) -> None:
    """Accept a PeftModel whose adapter is what `config` asks for; its weights are not touched.

    Raises:
        ValueError: it has no such adapter, or one that differs; the fields that differ and the ways on are named.
    """
    name = adapter_name or model.active_adapter
    if isinstance(name, (list, tuple)):
        name = name[0]
    ways_on = (
        "To train the adapter that is there, ask for its own configuration or skip get_peft_model. To add another "
        "beside it: model.add_adapter(name, LoraConfig(...)) and model.set_adapter(name). To start afresh: "
        "get_peft_model(model.unload(), ...)."
    )
    if name not in model.peft_config:
        raise ValueError(
            f"This PeftModel has the adapters {sorted(model.peft_config)}, and none called {name!r}. {ways_on}"
        )
    differing = _differences(model, model.peft_config[name], config)
    if differing:
        listed = "; ".join(f"{field}: has {has!r}, asked for {asked!r}" for field, (has, asked) in differing.items())
        raise ValueError(
            f"The model already carries the adapter {name!r} and it differs from the request: {listed}. {ways_on}"
        )
    logger.info("fastft: the model already carries the adapter %r as asked for: its weights are kept", name)


def _differences(model: nn.Module, existing: Any, asked: Any) -> dict[str, tuple[Any, Any]]:
    has, wants = existing.to_dict(), asked.to_dict()
    differing = {}
    for name in sorted((has.keys() | wants.keys()) - _BOOKKEEPING):
        if name == "target_modules" and wants.get(name) == "all-linear":
            same = _covers_all_linear(model)
        else:
            same = _plain(has.get(name)) == _plain(wants.get(name))
        if not same:
            differing[name] = (_plain(has.get(name)), _plain(wants.get(name)))
    return differing


def _plain(value: Any) -> Any:
    """A form in which a saved and a fresh field compare: sets and lists sorted, "nothing" in one spelling."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()} or None
    if isinstance(value, (set, frozenset, list, tuple)):
        return sorted(value, key=str) or None
    return value


def _covers_all_linear(model: Any) -> bool:
    """Whether every linear layer except the output embedding is adapted (PEFT replaces "all-linear" by names)."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    inside = {id(part) for layer in model.modules() if isinstance(layer, BaseTunerLayer) for part in layer.modules()}
    bare = [module for module in model.modules() if isinstance(module, nn.Linear) and id(module) not in inside]
    head = model.get_base_model().get_output_embeddings()
    return all(module is head for module in bare)


def require_trainable(model: nn.Module) -> None:
    """Refuse a model in which nothing would be trained.

    Raises:
        ValueError: no parameter requires a gradient.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "No parameter of this model is trainable: training would change nothing. An adapter loaded for inference "
            "(PeftModel.from_pretrained without is_trainable=True, or inference_mode=True) is frozen: load its folder "
            "with FastModel.from_pretrained, or call model.set_adapter(name)."
        )


def enable_checkpointing(model: Any) -> None:
    """Turn on (non-reentrant) gradient checkpointing on the model under the adapter, by whichever name it has here."""
    base = model.get_base_model()
    if not getattr(base, "supports_gradient_checkpointing", False):
        logger.warning(
            "fastft: %s does not support gradient checkpointing: every activation is kept", type(base).__name__
        )
        return
    options = {"use_reentrant": False}
    if hasattr(base, "activation_checkpointing_enable"):  # transformers >= 5.23, where the old name warns
        base.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


@contextmanager
def ignoring_checkpointing_rename() -> Iterator[None]:
    """Keep PEFT's use of a property that transformers 5.23 renamed from warning users, who can do nothing about it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        yield
