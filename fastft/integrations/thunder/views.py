"""Views and casts of what the backward makes again, in Thunder: made again too.

A product with an adapter reshapes its input first, and so may a caller before the head. Thunder would keep what such a
view returns, and with it the output that was not to be kept. So the primitives are claimed where their input carries
the tag, with Thunder's own gradient and execution: only the tag is new. One step of them is followed, not a chain.
"""

from __future__ import annotations

from typing import Any

from thunder.core import prims
from thunder.core.transforms import _grad_fn_map

from fastft.integrations.thunder.executor import executor, is_made_again, made_again

__all__: list[str] = []

_PRIMITIVES = (
    prims.broadcast_in_dim,
    prims.convert_element_type,
    prims.reshape,
    prims.shallow_copy,
    prims.squeeze,
    prims.transpose,
)


def _checker(a: Any, *rest: Any, **options: Any) -> bool:
    return is_made_again(a)


def _claim(primitive: Any) -> None:
    rule = _grad_fn_map[primitive.id]

    def gradient(*arguments: Any, **options: Any) -> Any:
        return made_again(rule(*arguments, **options))

    executor.register_implementation(
        primitive, checker=_checker, execution_transform=primitive, grad_transform=gradient
    )


for _primitive in _PRIMITIVES:
    _claim(_primitive)
