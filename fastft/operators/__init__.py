"""The kernels as operators of the dispatcher, `torch.ops.fastft.*`: what a compiler keeps whole.

A compiler that traces through a Triton launch, or through an autograd Function around one, either breaks its graph
there or takes the kernel apart. An operator is opaque to it: a name, a schema of tensors and numbers, a *fake* that
says what shapes come out, and a backward that is an operator too. That is all that `torch.compile` (full graph, dynamic
lengths) and Thunder (fastft/integrations/thunder) need to leave a kernel alone and still differentiate around it.

    operator                       backward                              also
    fastft::rms_norm               fastft::rms_norm_backward
    fastft::swiglu                 fastft::swiglu_backward
    fastft::rope                   fastft::rope (inverse=True)
    fastft::cross_entropy          fastft::cross_entropy_backward        over logits
    fastft::linear_cross_entropy   fastft::linear_cross_entropy_backward  no logits; fastft::…_backward_again
    fastft::lora_linear_4bit       fastft::lora_linear_4bit_backward     fastft::dequantize

Every operator is pure: it writes to nothing it was given and returns nothing that shares memory with it. What would be
an in-place trick of the eager path (a gradient over a buffer the pair owns) costs a buffer here, which the compiler is
free to place.

The eager path does not come through here. The dispatcher's layers cost the host 36 µs a forward and 95 µs with its
backward (a small RMSNorm on one CPU core: 28 and 114 µs without), and a decoder layer launches some twenty kernels:
`fastft.functional` calls its thin autograd Functions, and these operators only while `torch.compile` is tracing.
Importing this package registers them; `import fastft` does not import it.
"""

from __future__ import annotations

from fastft.operators.cross_entropy import cross_entropy
from fastft.operators.linear_cross_entropy import linear_cross_entropy
from fastft.operators.lora_linear import dequantize, lora_linear, lora_linear_4bit, lora_linear_4bit_flat
from fastft.operators.rms_norm import rms_norm
from fastft.operators.rope import rope
from fastft.operators.swiglu import swiglu

__all__ = [
    "cross_entropy",
    "dequantize",
    "linear_cross_entropy",
    "lora_linear",
    "lora_linear_4bit",
    "lora_linear_4bit_flat",
    "rms_norm",
    "rope",
    "swiglu",
]
