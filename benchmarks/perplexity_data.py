"""What gguf_perplexity.py and compressed_perplexity.py measure on: a text's rows, and weights off their 4-bit grid."""

import json
import pathlib

import torch


def read(path: str) -> list[str]:
    """A text, or the string fields of each row of a .jsonl."""
    text = pathlib.Path(path).read_text(encoding="utf-8")
    if not path.endswith(".jsonl"):
        return [text]
    rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    return ["\n".join(value for value in row.values() if isinstance(value, str)) for row in rows]


def unround(model: torch.nn.Module) -> None:
    """Move each weight by uniform noise within its q4_1 rounding interval (`--unround`)."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            blocks = parameter.data.view(-1, 32)
            step = (blocks.amax(1, keepdim=True) - blocks.amin(1, keepdim=True)) / 15
            blocks += (torch.rand(blocks.shape, generator=generator) - 0.5) * step
