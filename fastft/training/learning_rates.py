"""An optimizer whose learning rates differ: LoRA+, and embeddings that learn more slowly.

The groups are PEFT's (`peft.optimizers.create_loraplus_optimizer`) or transformers' own; from them the embeddings are
split off. The optimizer's class and settings are those that the trainer would have taken from its arguments, and it
goes in by the argument that every trainer has:

    SFTTrainer(model=model, args=args, optimizers=(fastft.create_optimizer(model, args, loraplus_lr_ratio=16), None), …)

`None` lets the trainer make its scheduler, which scales each group's own rate.

Groups and their order follow from the model and the arguments alone, so a run that resumes finds each moment where it
was; with other arguments PyTorch refuses the checkpoint, because the groups do not fit. What is logged as
`learning_rate` is the first group's: A's, and other weights'.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["create_optimizer"]


def create_optimizer(
    model: Any,
    args: Any,
    *,
    loraplus_lr_ratio: float | None = None,
    embedding_learning_rate: float | None = None,
) -> torch.optim.Optimizer:
    """The optimizer that `args` asks for, with a rate of its own for LoRA's B, for embeddings, or both.

    Args:
        model: the model that is trained, adapters in place and on its device.
        args: `TrainingArguments` (`SFTConfig`, …): `optim`, `learning_rate`, `weight_decay` and the rest are read.
        loraplus_lr_ratio: B learns this many times faster than A (LoRA+, https://huggingface.co/papers/2402.12354).
        embedding_learning_rate: of the input embedding and the output head where they are trained themselves
            (`modules_to_save`, or a full fine-tuning) and of adapters on the input embedding. An adapter on the head is
            an adapter like others. With LoRA+ and without this, adapters on embeddings have PEFT's rate, 1e-6.

    Returns:
        The optimizer, for `optimizers=(optimizer, None)`.

    Raises:
        ValueError: nothing asked for; a rate or ratio that is not positive; a ratio without LoRA adapters that train;
            an embedding rate where no embedding trains; an optimizer that makes its own groups (GaLore, LOMO, …).
    """
    if loraplus_lr_ratio is None and embedding_learning_rate is None:
        raise ValueError(
            "create_optimizer was given neither loraplus_lr_ratio nor embedding_learning_rate: the trainer's own "
            "optimizer does that; leave `optimizers` out."
        )
    for name, value in (
        ("loraplus_lr_ratio", loraplus_lr_ratio),
        ("embedding_learning_rate", embedding_learning_rate),
    ):
        if value is not None and not value > 0:
            raise ValueError(f"{name}={value!r} is not positive; leave it out (None) to do without.")
    embeddings = _trained_embeddings(model)
    if embedding_learning_rate is not None and not embeddings:
        raise ValueError(
            "embedding_learning_rate was given, but no embedding is trained. "
            'get_peft_model(model, modules_to_save=["embed_tokens", "lm_head"]) trains them.'
        )
    optimizer_class, settings = _class_and_settings(model, args)
    if loraplus_lr_ratio is None:
        optimizer = optimizer_class(_decay_groups(model, args.weight_decay), **settings)
    else:
        optimizer = _loraplus(model, optimizer_class, settings, loraplus_lr_ratio, args.weight_decay)
    if embedding_learning_rate is not None:
        _split_off(optimizer, {id(p) for p in embeddings}, embedding_learning_rate)
    if settings.get("optim_bits") == 8:
        _keep_embeddings_in_32_bits(model)
    return optimizer


def _trained_embeddings(model: Any) -> list[nn.Parameter]:
    """Trained weights of the input embedding and the output head, and adapters on the former; tied ones once."""
    found: dict[int, nn.Parameter] = {}
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        for name, parameter in [] if module is None else module.named_parameters():
            if parameter.requires_grad and "lora_A" not in name and "lora_B" not in name:
                found[id(parameter)] = parameter
    return list(found.values())


def _class_and_settings(model: Any, args: Any) -> tuple[Any, dict[str, Any]]:
    """The class and keywords that a trainer would take from `args`.

    Raises:
        ValueError: the optimizer is made by a factory or brings its own groups.
    """
    from transformers import Trainer
    from transformers.trainer_optimizer import is_optimizer_factory

    optimizer_class, settings = Trainer.get_optimizer_cls_and_kwargs(args, model)
    if is_optimizer_factory(optimizer_class) or {"params", "model", "optimizer_dict"} & settings.keys():
        raise ValueError(
            f"optim={str(args.optim)!r} makes its own parameter groups, which cannot be combined with LoRA+ or "
            "embedding_learning_rate. Take optim='adamw_torch_fused', 'adamw_8bit' or another plain optimizer."
        )
    return optimizer_class, settings


def _decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """transformers' two groups: with weight decay, and without (biases, norms)."""
    from transformers import Trainer

    # A method that reads nothing of its trainer, of which there is none yet.
    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in trained if name in decayed], "weight_decay": weight_decay},
        {"params": [p for name, p in trained if name not in decayed], "weight_decay": 0.0},
    ]


def _loraplus(
    model: Any, optimizer_class: Any, settings: dict[str, Any], ratio: float, weight_decay: float
) -> torch.optim.Optimizer:
    """PEFT's four groups: A and other weights; embedding adapters; B; B and vectors without weight decay.

    Raises:
        ValueError: there is no LoRA B to train.
    """
    if not any("lora_B" in name and p.requires_grad for name, p in model.named_parameters()):
        raise ValueError(
            f"loraplus_lr_ratio={ratio} was given, but the model trains no LoRA adapter. Add one first "
            "(FastModel.get_peft_model); a trainer's own `peft_config` would add it too late."
        )
    from peft.optimizers import create_loraplus_optimizer

    return create_loraplus_optimizer(
        model, optimizer_class, loraplus_lr_ratio=ratio, loraplus_weight_decay=weight_decay, **settings
    )


def _split_off(optimizer: torch.optim.Optimizer, embeddings: set[int], rate: float) -> None:
    """Move the embeddings of each group into a group of their own behind the others, its other settings kept."""
    for group in list(optimizer.param_groups):
        moved = [p for p in group["params"] if id(p) in embeddings]
        if moved:
            group["params"] = [p for p in group["params"] if id(p) not in embeddings]
            optimizer.add_param_group({**group, "params": moved, "lr": rate})


def _keep_embeddings_in_32_bits(model: nn.Module) -> None:
    """An 8-bit optimizer's state for embeddings stays in 32 bits, as transformers' trainer has it."""
    from bitsandbytes.optim.optimizer import GlobalOptimManager

    manager = GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})
