"""The results as PNG files: kernels over length and over models, training steps, and the roofline.

Only the newest row of each measurement is drawn, and only one machine's. A dashed line is the limit: the time that the
machine's measured ceilings allow for the work.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from fastft.bench.results import ResultsError, Row, latest
from fastft.bench.roofline import ceilings_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_all"]

_COLOURS = {
    "fastft": "tab:red",
    "torch": "tab:gray",
    "hf": "tab:gray",
    "torch.compile": "tab:blue",
    "liger": "tab:green",
    "unsloth": "tab:orange",
    "cce": "tab:purple",
    "trl": "tab:brown",
    "bitsandbytes": "tab:cyan",
}
_STYLES = ("-", "--", ":", "-.")
_MARKERS = "osD^vP"
_DPI = 130
_Value = Callable[[Row], float | None]
K = TypeVar("K", bound=Hashable)


def draw_all(rows: Sequence[Row], folder: Path, *, gpu: str | None = None) -> list[Path]:
    """Draw everything `rows` allow.

    Args:
        rows: of a results file.
        folder: made if it is not there.
        gpu: whose rows; None: the newest row's.

    Returns:
        The files written.

    Raises:
        ImportError: matplotlib is not installed.
        ResultsError: there are no measured rows of that machine.
    """
    if gpu is None and rows:
        gpu = max(rows, key=lambda row: row.date).gpu
    chosen = [row for row in latest(rows) if row.gpu == gpu and row.ms_50 is not None]
    if not chosen:
        raise ResultsError(f"there are no measured rows of {gpu or 'any machine'} to draw; run `fastft bench kernels`.")
    pictures = {**_kernel_pictures(chosen), **_training_pictures(chosen), **_roofline_pictures(chosen)}
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in pictures.items():
        paths.append(folder / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', name)}.png")
        figure.savefig(paths[-1], dpi=_DPI)
    return paths


def _kernel_pictures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Speed and memory of each operation over tokens, one figure a model; over models, one a token count."""
    kernels = [row for row in rows if row.kind == "kernels"]
    pictures: dict[str, Figure] = {}
    for (name, model, dtype), group in _grouped(kernels, lambda row: (row.name, row.model, row.dtype)).items():
        if group[0].tokens is None:
            continue
        title = f"{name}, {model}, {dtype}, {group[0].gpu}"
        modes = _grouped(group, lambda row: row.mode)
        speed = _figure(title, len(modes))
        memory = _figure(title, len(modes))
        for axes, (mode, each) in zip(speed.axes, modes.items(), strict=True):
            _lines(axes, each, lambda row: row.tokens, _ms, spread=True)
            _label(axes, mode, "tokens", "ms (device)")
        for axes, (mode, each) in zip(memory.axes, modes.items(), strict=True):
            _lines(axes, each, lambda row: row.tokens, lambda row: row.extra_mib, limit=False)
            _label(axes, mode, "tokens", "added memory at the peak, MiB")
        pictures[f"speed_{name}_{model}_{dtype}"] = speed
        if any(row.extra_mib for row in group):
            pictures[f"memory_{name}_{model}_{dtype}"] = memory
    for (name, tokens, dtype), group in _grouped(kernels, lambda row: (row.name, row.tokens, row.dtype)).items():
        if tokens is None or len({row.model for row in group}) > 1:
            whole = [row for row in group if row.mode == group[-1].mode]  # full, where there is a backward
            at = "" if tokens is None else f", {tokens:,} tokens"
            title = f"{name} {whole[0].mode}{at}, {dtype}, {group[0].gpu}"
            pictures[f"models_{name}_{tokens or 'any'}_{dtype}"] = _over_models(
                title, whole, ("ms (device)", _ms), ("added memory, MiB", lambda row: row.extra_mib)
            )
    return pictures


def _training_pictures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Time and memory of a step over the length of a row, one figure a model; over models, one a batch."""
    training = [row for row in rows if row.kind in ("step", "sft")]
    pictures: dict[str, Figure] = {}
    for (kind, model, name, batch, dtype), group in _grouped(
        training, lambda row: (row.kind, row.model, row.name, row.batch, row.dtype)
    ).items():
        figure = _figure(f"{kind}: {model}, {name}, {batch} rows, {group[0].gpu}", 2)
        _lines(figure.axes[0], group, lambda row: row.length, _ms, spread=True)
        _label(figure.axes[0], "time", "tokens in a row", "ms a step")
        _lines(figure.axes[1], group, lambda row: row.length, lambda row: row.peak_gib, limit=False)
        _label(figure.axes[1], "memory", "tokens in a row", "peak, GiB")
        pictures[f"{kind}_{model}_{name}_{batch}_rows_{dtype}"] = figure
    for (kind, name, batch, length, dtype), group in _grouped(
        training, lambda row: (row.kind, row.name, row.batch, row.length, row.dtype)
    ).items():
        if len({row.model for row in group}) > 1:
            title = f"{kind}: {name}, {batch} × {length} tokens, {group[0].gpu}"
            pictures[f"models_{kind}_{name}_{batch}x{length}_{dtype}"] = _over_models(
                title, group, ("ms a step", _ms), ("peak, GiB", lambda row: row.peak_gib)
            )
    return pictures


def _roofline_pictures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Achieved TFLOP/s over operations per byte, below the machine's two ceilings; the largest size of each kernel."""
    pictures: dict[str, Figure] = {}
    kernels = [row for row in rows if row.kind == "kernels" and row.tflops and row.gbps]
    for dtype, group in _grouped(kernels, lambda row: row.dtype).items():
        ceilings = ceilings_of(rows, group[0].gpu, dtype)
        if ceilings is None:
            continue
        figure = _figure(f"roofline, {dtype}, {group[0].gpu}", 1)
        axes = figure.axes[0]
        names = sorted({row.name for row in group})
        seen: set[str] = set()
        for row in sorted(group, key=lambda row: row.tokens or 0, reverse=True):
            key = f"{row.name} {row.mode} {row.provider}"
            if key in seen or row.mode == "backward" or not row.tflops or not row.gbps:
                continue
            seen.add(key)
            marker = _MARKERS[names.index(row.name) % len(_MARKERS)]
            filled = _COLOURS.get(row.provider, "black") if row.mode == "full" else "none"
            axes.plot(
                1e3 * row.tflops / row.gbps,
                row.tflops,
                marker,
                color=_COLOURS.get(row.provider),
                markerfacecolor=filled,
                zorder=3 if row.provider == "fastft" else 2,  # where points meet, ours stays visible
            )
        lowest, highest = axes.get_xlim()
        knee = 1e3 * ceilings.tflops / ceilings.gbps
        points = [min(lowest, knee / 100) if lowest > 0 else knee / 1000, knee, max(highest, 10 * knee)]
        axes.plot(points, [min(ceilings.tflops, point * ceilings.gbps / 1e3) for point in points], "k--", label="limit")
        for name in names:
            axes.plot([], [], _MARKERS[names.index(name) % len(_MARKERS)], color="black", label=name)
        for provider in dict.fromkeys(row.provider for row in group):
            axes.plot([], [], color=_COLOURS.get(provider), label=provider)
        _label(axes, "filled: full; hollow: forward", "operations per byte", "TFLOP/s", base=10)
        pictures[f"roofline_{dtype}"] = figure
    return pictures


class _Series(NamedTuple):
    """What a legend calls by one name: a provider's rows, of a training run those that keep the same."""

    name: str
    colour: str
    style: str
    rows: list[Row]


def _series(rows: Iterable[Row]) -> list[_Series]:
    series = []
    for provider, each in _grouped(rows, lambda row: row.provider).items():
        modes = {"": each} if each[0].kind == "kernels" else _grouped(each, lambda row: f", {row.mode}")
        for index, (mode, some) in enumerate(modes.items()):
            style = _STYLES[index % len(_STYLES)]
            series.append(_Series(f"{provider}{mode}", _COLOURS.get(provider, "black"), style, some))
    return series


def _over_models(title: str, rows: Sequence[Row], *values: tuple[str, _Value]) -> Figure:
    """Bars: a group a model, a bar a series."""
    figure = _figure(title, len(values))
    models = list(dict.fromkeys(row.model for row in rows))
    all_series = _series(rows)
    width = 0.8 / len(all_series)
    for axes, (label, value) in zip(figure.axes, values, strict=True):
        for index, series in enumerate(all_series):
            places = [models.index(row.model) + index * width for row in series.rows]
            heights = [value(row) or 0.0 for row in series.rows]
            axes.bar(places, heights, width, label=series.name, color=series.colour)
        centre = 0.4 - width / 2
        axes.set_xticks([place + centre for place in range(len(models))], models, rotation=30, ha="right")
        axes.set_ylabel(label)
        axes.legend(fontsize="small")
        axes.grid(axis="y", alpha=0.3)
    return figure


def _lines(axes: Axes, rows: Sequence[Row], x: _Value, y: _Value, *, spread: bool = False, limit: bool = True) -> None:
    """A line for each series, with its 20–80 % band if `spread`; the limit dashed."""
    for series in _series(rows):
        drawn = sorted((row for row in series.rows if y(row) is not None), key=lambda row: x(row) or 0.0)
        if not drawn:
            continue
        places = [x(row) or 0.0 for row in drawn]
        heights = [y(row) or 0.0 for row in drawn]
        axes.plot(places, heights, f"o{series.style}", color=series.colour, label=series.name, markersize=4)
        if spread:
            low, high = [row.ms_20 or 0.0 for row in drawn], [row.ms_80 or 0.0 for row in drawn]
            axes.fill_between(places, low, high, color=series.colour, alpha=0.15)
    floors = {x(row) or 0.0: row.roofline_share * row.ms_50 for row in rows if row.roofline_share and row.ms_50}
    if limit and floors:
        places = sorted(floors)
        axes.plot(places, [floors[place] for place in places], "k--", linewidth=1, label="limit")


def _figure(title: str, columns: int) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("`fastft bench plot` needs matplotlib: pip install 'fastft[bench]'.") from error
    figure = Figure(figsize=(5.2 * columns, 4.4), layout="constrained")
    figure.subplots(1, columns)
    figure.suptitle(title)
    return figure


def _label(axes: Axes, title: str, x: str, y: str, *, base: int = 2) -> None:
    axes.set_xscale("log", base=base)
    axes.set_yscale("log")
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(which="both", alpha=0.2)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
    if base == 2:
        axes.xaxis.set_major_formatter("{x:,.0f}")


def _grouped(rows: Iterable[Row], key: Callable[[Row], K]) -> dict[K, list[Row]]:
    groups: dict[K, list[Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return dict(groups)


def _ms(row: Row) -> float | None:
    return row.ms_50
