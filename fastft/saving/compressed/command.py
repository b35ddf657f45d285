"""What `fastft compress` does around `compress_checkpoint`: reading calibration rows, and saying what came of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from fastft.saving.compressed.checkpoint import SaveCheckError, SavedCompressed, compress_checkpoint

__all__ = ["read_rows", "run"]


def run(checkpoint: Path, output: Path, calibration: Path | None, **options: Any) -> int:
    """Compress, and print what was done or why not; the exit status."""
    console = Console()
    try:
        rows = None if calibration is None else read_rows(calibration)
        saved = compress_checkpoint(checkpoint, output, calibration=rows, **options)
    except (ImportError, OSError, ValueError, RuntimeError, SaveCheckError) as error:
        console.print(f"[red]not compressed:[/red] {escape(str(error))}", highlight=False)
        return 1
    console.print(escape(_said(saved)), highlight=False)
    return 0


def read_rows(path: Path) -> list[Any]:
    """Rows of a .jsonl, or the paragraphs of a text.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line that is no JSON.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".jsonl":
        return [paragraph.strip() for paragraph in text.split("\n\n") if paragraph.strip()]
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            if line.strip():
                rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is no JSON: {error}") from error
    return rows


def _said(saved: SavedCompressed) -> str:
    data = f", {saved.calibration_rows} calibration rows" if saved.calibration_rows else ""
    return (
        f"{saved.folder}: {saved.scheme} ({saved.algorithm}{data}), {saved.layers} layers, "
        f"{saved.bytes / 2**20:.1f} MiB\n"
        f"logits differ from the checkpoint's by {saved.difference:.2g} of their size (the format explains "
        f"{saved.allowed:.2g}); the worst weight by {saved.largest_error:.2g}"
    )
