"""`fastft.report(model)`: one table of what runs fast, what runs stock and why, and how often each really ran."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fastft.patching import approximations, levels, registry, size_plans
from fastft.patching.plan import inner_model, static_reason


@dataclass(frozen=True, slots=True)
class Row:
    """One site, or several that are alike.

    Args:
        site: path in the model; `*` stands for layer numbers.
        count: how many sites the row stands for.
        runs: "fast", "stock", or "—" for a part that its decoder layer runs.
        reason: why stock, or how it runs.
        fast_runs: forwards that ran fast, over all of them.
        stock_runs: forwards that ran stock.
    """

    site: str
    count: int
    runs: str
    reason: str
    fast_runs: int
    stock_runs: int


@dataclass(frozen=True, slots=True)
class Report:
    """The table; `print(report)` draws it, `report.rows` is for programs.

    Args:
        title: names the model.
        rows: sites, those that are alike together.
        notes: what else there is to know.
        run: the last finished run under a trainer (`fastft.training.run_report.RunReport`), or None.
    """

    title: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    run: Any = None

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table(title=self.title, title_justify="left")
        for name in ("site", "n", "runs", "why / how"):
            table.add_column(name, overflow="fold")
        for name in ("ran fast", "ran stock"):
            table.add_column(name, justify="right")
        for row in self.rows:
            table.add_row(row.site, str(row.count), row.runs, row.reason, str(row.fast_runs), str(row.stock_runs))
        buffer = io.StringIO()
        Console(file=buffer, width=118, color_system=None).print(table)
        last = "" if self.run is None else f"{self.run}\n"
        return buffer.getvalue() + "".join(f"note: {note}\n" for note in self.notes) + last

    __repr__ = __str__


def report(model: Any) -> Report:
    """What fastft does to `model`.

    Args:
        model: a transformers or PEFT model, planned or not.

    Returns:
        A `Report`. Decoder layers that are alike share a row. Counts are forwards since the model was planned: a layer
        at level *recompute* counts one a step, because its recomputation happens inside its own backward.
    """
    inner = inner_model(model)
    found: list[tuple[registry.Site, nn.Module]] = []
    for module in inner.modules():
        site = registry.site_of(module)
        if site is not None:
            found.append((site, module))
    title = f"fastft report: {type(inner).__name__}"
    if not found:
        return Report(title, (), ("this model is not planned: fastft.patch(model) plans it",))
    dtype = next((p.dtype for p in inner.parameters() if p.is_floating_point()), torch.float32)
    layers_fast = all(static_reason(m, dtype) is None for s, m in found if s.part == "decoder layer")
    groups: dict[tuple[str, ...], list[registry.Site]] = {}
    for site, module in found:
        if site.part == "model":
            continue
        runs, reason = _verdict(site, module, dtype, layers_fast)
        groups.setdefault((_pattern(site.path), runs, reason), []).append(site)
    rows = tuple(
        Row(
            _span(key[0], sites),
            len(sites),
            key[1],
            key[2],
            sum(s.fast_runs for s in sites),
            sum(s.stock_runs for s in sites),
        )
        for key, sites in groups.items()
    )
    run = next((site.run for site, _ in found if site.part == "model"), None)
    return Report(title, rows, _notes(found), run)


def _verdict(site: registry.Site, module: nn.Module, dtype: torch.dtype, layers_fast: bool) -> tuple[str, str]:
    reason = static_reason(module, dtype)
    inside_layer = ".layers." in f".{site.path}" and site.part != "decoder layer"
    if reason is None and inside_layer and layers_fast and not site.fast_runs:
        return "—", "inside its decoder layer's node"
    if reason is None and site.stock_runs and site.last_reason != registry.GENERATING and not site.fast_runs:
        reason = site.last_reason
    if reason is not None and site.part == "loss" and site.fast_runs:
        return "fast", f"through TRL's head; the model's own forward runs stock: {reason}"
    if reason is not None:
        return "stock", reason
    undecided = site.level == registry.AUTO and site.assigned is None
    level = site.level if undecided else levels.level_of(site)
    how = {"decoder layer": f"one autograd node, level {level}", "loss": "linear cross-entropy, no logits"}
    note = how.get(site.part, "one kernel each way" if site.part == "norm" else "hand-derived backward")
    if site.stock_runs and site.last_reason is not None:
        note += f"; last stock: {site.last_reason}"
    return "fast", note


def _pattern(path: str) -> str:
    return ".".join("*" if piece.isdigit() else piece for piece in path.split("."))


def _span(pattern: str, sites: list[registry.Site]) -> str:
    if "*" not in pattern:
        return pattern
    numbers = sorted(int(p) for s in sites for p in s.path.split(".") if p.isdigit())
    first, last = numbers[0], numbers[-1]
    contiguous = len(numbers) == last - first + 1
    label = f"[{first}]" if first == last else f"[{first}–{last}]" if contiguous else str(numbers)
    return pattern.replace("*", label, 1)


def _notes(found: list[tuple[registry.Site, nn.Module]]) -> tuple[str, ...]:
    notes = [f"{what}: {why}" for what, why in registry.skipped().items()]
    notes += [note for site, _ in found if site.part == "model" and (note := size_plans.summary(site)) is not None]
    notes += [
        note
        for site, module in found
        if site.part == "model" and (note := levels.graph_summary(module, site)) is not None
    ]
    chosen = approximations.summary([site for site, _ in found])
    if chosen is not None:
        notes.append(chosen)
    if any(site.compiled for site, _ in found):
        notes.append(
            "traced by torch.compile: norms, rotation, SwiGLU and loss are fastft operators in its graph, whose runs "
            "are not counted here; there, every level but keep recomputes, and approximations are off"
        )
    padded, real = (sum(getattr(site, name) for site, _ in found) for name in ("tokens_padded", "tokens_real"))
    if padded:
        notes.append(
            f"padding-free: {1 - real / padded:.0%} of {padded:,} tokens in padded training batches were padding and "
            "did not run (fastft.patch(model, padding_free=False) runs them)"
        )
    empty = sum(site.empty_batches for site, _ in found)
    if empty:
        notes.append(f"{empty} batches had no supervised token and added 0 to the loss")
    from fastft.patching import bitsandbytes

    for site, top in found:
        if site.part == "loss" and site.reason is None and top not in registry.planned_models():
            notes.append(
                "a copy of a planned model: its loss is TRL's own under TRL until fastft.patch is called on it"
            )
    repaired = sum(
        bitsandbytes.repairs(module) for site, top in found if site.part == "loss" for module in top.modules()
    )
    if repaired:
        notes.append(
            f"{repaired} 4-bit layers run on fastft's dequantization: bitsandbytes' CPU kernel is wrong for their width"
        )
    return tuple(notes)
