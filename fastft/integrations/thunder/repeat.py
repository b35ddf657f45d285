"""Keys and values repeated for grouped queries, in Thunder: `torch.repeat_interleave` along a dimension, `repeat_kv`.

No kernel of ours: a claim for what is kept. Attention's backward reads keys and values with as many heads as the
queries have, and Thunder saves what it reads: with 32 heads over 4, eight times what was projected. So the forward
keeps the heads as they were, and the backward repeats them again, a copy. They are kept in a buffer of their own,
because a projection's output is often one for queries, keys and values, and a view of it would keep all three.
(Before attention that is ours nothing is repeated at all; this is for what it declines.)

Both steps are primitives. Within a fused region Thunder would rather make a copy again, from what it was made of: and
keep that, the whole projection (its cut between regions weighs tensors by dtype, not by size).
"""

from __future__ import annotations

from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core.dtypes import is_float_dtype
from thunder.core.prims import PrimIDs
from thunder.core.trace import get_tracectx
from thunder.core.transforms import get_grad, put_grad
from torch import Tensor

from fastft.integrations.thunder.executor import TensorProxy, executor, made_again

__all__ = ["claim_repeat_kv", "kept"]


def _kept_meta(a: Any, beside: Any, copies: bool) -> Any:
    return TensorProxy(like=a)


def _kept_run(a: Tensor, beside: Tensor | None = None, copies: bool = False) -> Tensor:
    """`a`, in a storage that holds nothing else, or nothing that is not kept for `beside` too.

    A copy keeps the order of `a`'s strides. `copies`: one is made in any case.
    """
    storage = a.untyped_storage()
    kept_anyway = beside is not None and storage.data_ptr() == beside.untyped_storage().data_ptr()
    return a if not copies and (storage.nbytes() <= a.nbytes or kept_anyway) else a.clone()


def _repeat_meta(a: Any, repeats: int, dim: int) -> Any:
    shape = list(a.shape)
    shape[dim] *= repeats
    return TensorProxy(like=a, shape=tuple(shape))


_kept = executor.register_operator("fastft_kept", meta=_kept_meta, fn=_kept_run)
_repeat = executor.register_operator("fastft_repeat", meta=_repeat_meta, fn=torch.repeat_interleave)


def kept(a: Any, beside: Any = None) -> Any:
    """`a` as the backward is to have it, without what else lies in its storage; to be asked in a gradient transform.

    Programs that write in place may write to `a` later; they get a copy. Thunder has marked them before gradients.
    """
    writes = any(symbol.sym.id == PrimIDs.UPDATE_ALIASES for symbol in get_tracectx().bound_symbols)
    return _kept(a, beside, writes)


# The signature of `thunder.torch.repeat_interleave`
def _checker(input: Any, repeats: Any, dim: int | None = None, *, output_size: int | None = None) -> bool:
    whole = isinstance(repeats, int) and isinstance(dim, int) and output_size is None
    return whole and repeats > 1 and is_float_dtype(input.dtype)


def _forward(input: Any, repeats: Any, dim: Any = None, *, output_size: int | None = None) -> Any:
    return _repeat(input, repeats, dim % input.ndim)


def _gradient(input: Any, repeats: Any, dim: Any = None, *, output_size: int | None = None) -> Any:
    dim = dim % input.ndim
    output = _repeat(kept(input), repeats, dim)
    shape = tuple(input.shape)
    grouped = ltorch.reshape(get_grad(output), (*shape[: dim + 1], repeats, *shape[dim + 1 :]))
    put_grad(input, ltorch.sum(grouped, dim + 1))
    return made_again(output)


executor.register_implementation(
    ltorch.repeat_interleave, checker=_checker, execution_transform=_forward, grad_transform=_gradient
)


def _repeat_kv(hidden_states: Any, n_rep: int) -> Any:
    """transformers' function in a trace."""
    return hidden_states if n_rep == 1 else ltorch.repeat_interleave(hidden_states, n_rep, 1)


def claim_repeat_kv() -> None:
    """Claim the `repeat_kv` of transformers' sdpa attention."""
    from transformers.integrations import sdpa_attention

    executor.substitute(sdpa_attention.repeat_kv, _repeat_kv)
