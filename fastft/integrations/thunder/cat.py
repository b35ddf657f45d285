"""`torch.cat` of one tensor and empty ones, in Thunder: that tensor.

litgpt turns the first columns of a head and appends the others, `cat((turned, head[..., n:]))`, also where all columns
were turned and nothing is left to append. In one fused kernel with the rotation that costs nothing; beside a rotation
that is one operator it would be a copy of the queries, and another of their gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.transforms import get_grad, put_grad

from fastft.integrations.thunder.executor import executor


def _filled(tensors: Sequence[Any]) -> list[Any]:
    return [tensor for tensor in tensors if 0 not in tuple(tensor.shape)]


# The signature of `thunder.torch.cat`
def _checker(tensors: Sequence[Any], dim: int = 0) -> bool:
    return len(_filled(tensors)) == 1 and all(tensor.dtype == tensors[0].dtype for tensor in tensors)


def _forward(tensors: Sequence[Any], dim: int = 0) -> Any:
    return prims.shallow_copy(_filled(tensors)[0])


def _gradient(tensors: Sequence[Any], dim: int = 0) -> Any:
    output = _forward(tensors, dim)
    put_grad(_filled(tensors)[0], get_grad(output))
    return output


executor.register_implementation(ltorch.cat, checker=_checker, execution_transform=_forward, grad_transform=_gradient)
