"""The only place that knows the internals of transformers, peft, trl and bitsandbytes.

`install()` is what `import fastft` does; everything else is imported when first used, because it brings the kernels.
"""

from fastft.patching import checkpointing, inert
from fastft.patching.families import FAMILIES


def install() -> None:
    """Install the inert patches of Llama's classes and of gradient checkpointing."""
    checkpointing.install()
    inert.install(FAMILIES["llama"])


__all__ = ["install"]
