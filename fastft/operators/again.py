"""Outputs that a compiled backward makes again instead of keeping: of the norms and of SwiGLU.

To the partitioner that cuts a compiled step into forward and backward an operator is a black box, which it would rather
not run twice: what the next product's gradient reads, a norm's output or silu(gate) · up, it keeps. Stock code fares no
better, since its heuristics keep what a product reads too. At TinyLlama's shape that is three tenths of what a layer
keeps (two norm outputs and one product, 159 of 545 MB at 8,192 tokens), made again for a read and a write.

`torch.utils.checkpoint` says so in public words: a region of one operator, whose output is not kept. Its backward reads
what the operator read. Eagerly there is no such region: fastft's own pairs make these again by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint

__all__ = ["made_again"]


def made_again(operator: Callable[..., Any], *arguments: Any) -> Any:
    """`operator(*arguments)`; in a traced step that is differentiated, made a second time in the backward."""
    if torch.compiler.is_compiling() and torch.is_grad_enabled():
        return torch.utils.checkpoint.checkpoint(operator, *arguments, use_reentrant=False, preserve_rng_state=False)
    return operator(*arguments)
