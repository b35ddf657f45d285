"""fastft's kernels under Lightning Thunder: the executor "fastft", registered by importing this package.

    import fastft.integrations.thunder as fastft_thunder
    import thunder

    with fastft_thunder.patch_litgpt():
        model = thunder.jit(gpt, executors=fastft_thunder.executors("sdpa", "fastft", "torchcompile_cat", "torch"))

What is claimed with no further word: `F.cross_entropy`, `F.rms_norm` and `nn.RMSNorm`, attention by
`F.scaled_dot_product_attention`, and every function of `fastft.functional` but `dequantize`. `patch_litgpt` and
`prepare_hf` bring litgpt's and transformers' own modules to these functions. docs/compilers.md walks through all of it.
"""

from __future__ import annotations

from fastft.integrations.thunder.shim import import_thunder

import_thunder()

from fastft.integrations.thunder import (  # noqa: E402
    add,
    attention,
    cat,
    cross_entropy,
    linear_cross_entropy,
    lora_linear,
    repeat,
    rms_norm,
    rope,
    swiglu,
    views,
)
from fastft.integrations.thunder.choice import executors  # noqa: E402
from fastft.integrations.thunder.executor import FastftExecutor, executor  # noqa: E402
from fastft.integrations.thunder.huggingface import prepare_hf  # noqa: E402
from fastft.integrations.thunder.in_place import InPlaceLoss  # noqa: E402
from fastft.integrations.thunder.lit import patch_litgpt  # noqa: E402
from fastft.integrations.thunder.plugin import Plugin  # noqa: E402

__all__ = ["FastftExecutor", "InPlaceLoss", "Plugin", "executor", "executors", "patch_litgpt", "prepare_hf"]

# Each registers its own
_OPERATIONS = (
    add,
    attention,
    cat,
    cross_entropy,
    linear_cross_entropy,
    lora_linear,
    repeat,
    rms_norm,
    rope,
    swiglu,
    views,
)
