"""The banner: what is about to be trained, how, and on what, in one box at the first step.

It is drawn in the first training forward, after the memory plan and before the layers: earlier there is no batch, and
so no plan; later the user has waited for it.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import nn

from fastft.memory.budget import device_memory, format_bytes
from fastft.patching import documents, levels, registry, size_plans, trl
from fastft.patching.report import report

_STOCK_LINES = 3

__all__ = ["banner", "facts"]


def banner(
    trainer: Any, backbone: nn.Module, site: registry.Site, shape: tuple[int, int], *, saves_on_interrupt: bool
) -> str:
    """The box, drawn for the terminal's width.

    Args:
        trainer: the one that trains.
        backbone: the planned backbone.
        site: its plan.
        shape: `[rows, length]` of the first batch, as the collator made it.
        saves_on_interrupt: whether Ctrl-C saves.
    """
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table

    import fastft

    rows = facts(trainer, backbone, site, shape)
    if saves_on_interrupt:
        rows.append(("Ctrl-C", "finishes the step, saves a checkpoint, stops; twice stops at once"))
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(name, value)
    buffer = io.StringIO()
    width = min(Console().width, 118)
    console = Console(file=buffer, width=width, color_system=None, highlight=False, markup=False)
    console.print(Panel(table, title=f"fastft {fastft.__version__}", title_align="left", expand=False))
    return buffer.getvalue().rstrip("\n")


def facts(trainer: Any, backbone: nn.Module, site: registry.Site, shape: tuple[int, int]) -> list[tuple[str, str]]:
    """The banner's lines: (name, what there is to say)."""
    model = trainer.model
    rows = [("model", _model(model)), ("device", _device(backbone)), *_speed(trainer)]
    rows.append(("memory", _memory(backbone, site)))
    if site.memory is not None and site.memory.sizes and not site.memory.sizes[max(site.memory.sizes)].plan.fits:
        rows.append(("", size_plans.NO_PLAN_FITS))
    padding = _padding(backbone, site)
    if padding is not None:
        rows.append(("padding", padding))
    rows.append(("tokens", _tokens(trainer.args, site, shape)))
    return rows


def _model(model: Any) -> str:
    from fastft.patching.plan import inner_model

    inner = inner_model(model)
    if hasattr(model, "get_nb_trainable_parameters"):  # PEFT's: counts 4-bit weights as what they stand for
        trained, total = model.get_nb_trainable_parameters()
    else:
        trained, total = model.num_parameters(only_trainable=True), model.num_parameters()
    line = f"{type(inner).__name__}, {_count(total)} parameters, {_count(trained)} trained ({trained / total:.2%})"
    if getattr(inner, "is_loaded_in_4bit", False):
        line += ", base in 4 bits"
    return line


def _device(backbone: nn.Module) -> str:
    devices = sorted({str(p.device) for p in backbone.parameters()})
    names = []
    for name in devices:
        device = torch.device(name)
        if device.type == "cuda":
            names.append(f"{torch.cuda.get_device_name(device)}, {format_bytes(device_memory(device).limit)}")
        else:
            names.append("CPU" if name == "cpu" else name)
    return "; ".join(dict.fromkeys(names)) + (f" ({', '.join(devices)})" if len(devices) > 1 else "")


def _speed(trainer: Any) -> list[tuple[str, str]]:
    """What is fast and what is stock, from the report; parts that a fast layer runs are in it."""
    found = report(trainer.model).rows
    # A TRL trainer brings its own way to the loss, which ours is behind: the model's own is then not asked for.
    bypassed = trl.installed() and any(c.__module__.startswith("trl.") for c in type(trainer).__mro__)
    layers = [row for row in found if row.site.endswith("]")]  # model.layers.[0–31]
    count = sum(row.count for row in layers if row.runs == "fast")
    fast = [f"{count} of {sum(row.count for row in layers)} decoder layers, each one autograd node"] if layers else []
    fast += [row.site for row in found if row.runs == "fast" and ".layers." not in f".{row.site}"]
    rows = [("fast", "; ".join(fast) or "nothing")]
    stock = [
        f"{row.site}{f' ×{row.count}' if row.count > 1 else ''}"
        f"{', where TRL does not bring its own' if bypassed and row.site == 'lm_head + loss' else ''}: {row.reason}"
        for row in found
        if row.runs == "stock"
    ]
    rows += [("stock", line) for line in stock[:_STOCK_LINES]]
    if len(stock) > _STOCK_LINES:
        rows.append(("", f"and {len(stock) - _STOCK_LINES} more: print(fastft.report(model))"))
    return rows


def _memory(backbone: nn.Module, site: registry.Site) -> str:
    planned = size_plans.summary(site)
    if planned is not None:
        return planned.removeprefix("memory plan for ")
    found = [
        levels.level_of(one)
        for module in backbone.modules()
        if (one := registry.site_of(module)) is not None and one.part == "decoder layer"
    ]
    return ", ".join(f"{found.count(level)} layers at level {level}" for level in dict.fromkeys(found))


def _padding(backbone: nn.Module, site: registry.Site) -> str | None:
    if documents.implementation_of(backbone) != "sdpa":
        return None
    if not site.padding_free:
        return "runs as it is: padding_free=False"
    return "left out of the layers in training; fastft.patch(model, padding_free=False) keeps it"


def _tokens(arguments: Any, site: registry.Site, shape: tuple[int, int]) -> str:
    """The most tokens of an optimizer step, over all processes."""
    accumulated, processes = arguments.gradient_accumulation_steps, arguments.world_size
    rows, length = shape
    longest = getattr(arguments, "max_length", None) or site.max_seq_length
    rows = max(rows, arguments.per_device_train_batch_size)  # a packed or padding-free batch is one long row
    times = f"{f' × {accumulated} accumulated' if accumulated > 1 else ''}"
    times += f"{f' × {processes} processes' if processes > 1 else ''}"
    if longest is None or length > rows * longest:
        return f"{shape[0] * length * accumulated * processes:,} in the first step: {shape[0]} × {length:,}{times}"
    return f"at most {rows * longest * accumulated * processes:,} a step: {rows} × {longest:,}{times}"


def _count(number: int) -> str:
    """`1.24 B`, `11.3 M`, `4,608`."""
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,}"
