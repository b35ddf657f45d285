"""An Ollama Modelfile beside a GGUF: where the weights are and at which tokens an answer ends.

The chat template is not translated. Ollama reads the one inside of the GGUF, and a hand-made Go template that differs
from it in a space changes what the model sees.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["write_modelfile"]


def write_modelfile(gguf_file: Path, tokenizer: Any) -> Path:
    """Write `Modelfile` into the folder of `gguf_file`; returns its path."""
    lines = [f"FROM ./{gguf_file.name}"]
    if tokenizer.eos_token:
        lines.append(f"PARAMETER stop {json.dumps(tokenizer.eos_token, ensure_ascii=False)}")
    path = gguf_file.with_name("Modelfile")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
