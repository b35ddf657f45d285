"""Sums of two 16-bit tensors in Thunder, as torch makes them: one kernel, and the sum's gradient is each one's.

No kernel of ours: a claim for what stands between ours, the residual sums. Thunder's gradient rules take a 16-bit sum
apart into casts to float32, a sum and a cast back, and its backward casts there and back again. In a fused region that
costs nothing. Where nothing is fused it is seven kernels and 42 bytes an element, for one kernel and 6. The numbers are
the same: torch adds in float32 and rounds once. So the claim is made only where no executor fuses everything.
"""

from __future__ import annotations

from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core.compile_data import get_compile_data
from thunder.core.transforms import get_grad, put_grad

from fastft.integrations.thunder.executor import TensorProxy, executor, torch_dtype

_FUSES_ALL = frozenset({"torchcompile", "nvfuser"})


def _meta(a: Any, b: Any) -> Any:
    return TensorProxy(like=a)


_symbol = executor.register_operator("fastft_add", meta=_meta, fn=torch.add)


def _is_fused_anyway() -> bool:
    """Whether an executor of this compilation would fuse a sum with what is around it."""
    compilation = get_compile_data()
    return compilation is not None and any(str(one.name) in _FUSES_ALL for one in compilation.executors_list)


# The signature of `thunder.torch.add`
def _checker(a: Any, b: Any, *, alpha: Any = None) -> bool:
    if not (isinstance(a, TensorProxy) and isinstance(b, TensorProxy)) or alpha not in (None, 1):
        return False
    alike = tuple(a.shape) == tuple(b.shape) and a.dtype == b.dtype and a.device == b.device
    return alike and torch_dtype(a) in (torch.float16, torch.bfloat16) and not _is_fused_anyway()


def _forward(a: Any, b: Any, *, alpha: Any = None) -> Any:
    return _symbol(a, b)


def _gradient(a: Any, b: Any, *, alpha: Any = None) -> Any:
    total = _symbol(a, b)
    grad = get_grad(total)
    put_grad(a, grad)
    put_grad(b, grad)
    return total


executor.register_implementation(ltorch.add, checker=_checker, execution_transform=_forward, grad_transform=_gradient)
