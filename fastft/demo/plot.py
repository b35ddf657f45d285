"""The loss curve as a picture. matplotlib is imported here and nowhere else, and draws to a file without a display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def plot_losses(losses: Sequence[tuple[int, float]], path: Path, *, title: str) -> None:
    """Draw `losses`, pairs of (step, loss), to `path` (the ending chooses the format).

    Raises:
        ImportError: matplotlib is not installed.
        OSError: `path` cannot be written.
    """
    # Figure and not pyplot: pyplot would choose a backend and keep the figure in process-wide state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([step for step, _ in losses], [loss for _, loss in losses], linewidth=1.5)
    axes.set(xlabel="step", ylabel="training loss")
    axes.set_title(title, fontsize=10)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
