"""The loss's gradient over the logits themselves, where the traces prove that nobody else reads them.

Logits are the largest tensor of a step (8,192 tokens of a 32,000-token vocabulary: 0.5 GB in 16 bits), and at the start
of the backward they and their gradient exist side by side. The kernel could write the one over the other; whether it
may is a question about the whole program, so it is answered there: after Thunder has optimized both traces,
`InPlaceLoss` looks for

* logits that a matrix product made in this trace, with nothing but views between it and the loss;
* no other reader of them or of those views in the forward, and none among what it returns to the caller;
* no other reader in the backward than the loss's own.

Only then is the backward operator exchanged for the one in place. Anything it does not know is a no, kept in `refused`.
The write raises the tensor's version, so a second backward (`retain_graph=True`) raises as it does in eager torch, and
is not silently wrong.

    thunder.jit(step, executors=…, transforms=[InPlaceLoss()])
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy
from thunder.core.pytree import tree_flatten
from thunder.core.trace import TraceProvenance, from_trace
from thunder.core.transform_common import Transform
from torch import Tensor

from fastft.integrations.thunder.cross_entropy import (
    backward_meta,
    cross_entropy_backward_symbol,
    cross_entropy_symbol,
)
from fastft.integrations.thunder.executor import executor
from fastft.operators.cross_entropy import write_gradient

__all__ = ["InPlaceLoss"]

_PRODUCTS = frozenset({"linear", "matmul"})
_VIEWS = frozenset({"reshape", "torch_prims_reshape_impl", "view", "flatten", "unsqueeze", "squeeze", "contiguous"})
_BOOKKEEPING = frozenset({PrimIDs.DEL, PrimIDs.RETURN, PrimIDs.UNPACK_TRIVIAL, PrimIDs.UNPACK_SEQUENCE})


def _run(
    grad: Tensor, logits: Tensor, target: Tensor, statistics: Tensor, counted: Tensor, ignore_index: int, reduction: str
) -> Tensor:
    out = logits if logits.stride(-1) == 1 else torch.empty_like(logits, memory_format=torch.contiguous_format)
    write_gradient(grad, logits, target, statistics, counted, ignore_index, reduction, out)
    torch.autograd.graph.increment_version(logits)
    return out


_symbol = executor.register_operator("fastft_cross_entropy_backward_in_place", meta=backward_meta, fn=_run)


class InPlaceLoss(Transform):
    """Transform for `thunder.jit(…, transforms=[…])`; serves one jitted function.

    Attributes:
        refused: why the last traces' losses were left as they are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refused: list[str] = []
        self._private: set[str] = set()  # logits that only the loss reads

    def transform_trace_post_optimization(self, computation_trace: Any, **kwargs: Any) -> Any:
        """Called by Thunder with the forward trace, then with the backward trace."""
        symbols = list(_flat(computation_trace.bound_symbols))
        losses = [s for s in symbols if s.sym.id == cross_entropy_symbol.id]
        if losses:
            self.refused, self._private = [], set()
            for loss in losses:
                name = loss.args[0].name
                reason = _reason(name, symbols)
                if reason is None:
                    self._private.add(name)
                else:
                    self.refused.append(f"{name}: {reason}")
            return computation_trace
        return self._exchange(computation_trace, symbols)

    def _exchange(self, trace: Any, symbols: list[Any]) -> Any:
        """The backward trace with in-place operators."""
        exchanged, new_symbols = False, []
        for symbol in trace.bound_symbols:
            if symbol.sym.id == cross_entropy_backward_symbol.id and symbol.args[1].name in self._private:
                name = symbol.args[1].name
                if sum(name in _argument_names(s) for s in symbols) == 1:
                    symbol, exchanged = _symbol.bind(*symbol.args, output=symbol.output, **symbol.kwargs), True
                else:
                    self.refused.append(f"{name}: read by more than the loss in the backward")
            new_symbols.append(symbol)
        if not exchanged:
            return trace
        result = from_trace(trace)
        result.bound_symbols = new_symbols
        result.set_provenance(TraceProvenance("fastft: the loss's gradient over the logits"))
        return result


def _flat(symbols: Any) -> Iterator[Any]:
    """Bound symbols, those of a fused region in the region's place."""
    for symbol in symbols:
        if symbol.sym.is_fusion:
            yield from symbol.subsymbols
        else:
            yield symbol


def _argument_names(symbol: Any) -> set[str]:
    """Names a symbol reads; deleting, unpacking and returning are no reading."""
    if symbol.sym.id in _BOOKKEEPING:
        return set()
    return {proxy.name for proxy in symbol.flat_proxy_args}


def _reason(name: str, symbols: list[Any]) -> str | None:
    """Why logits `name` may be read by others than their loss, or None."""
    producers = {proxy.name: symbol for symbol in symbols for proxy in symbol.flat_proxy_outs}
    aliases = {name}
    while True:
        producer = producers.get(name)
        if producer is None or producer.sym.id in _BOOKKEEPING:
            return "an input of the program"
        if producer.sym.name in _PRODUCTS:
            break
        if producer.sym.name not in _VIEWS:
            return f"made by {producer.sym.name}, which is no matrix product"
        name = producer.flat_proxy_args[0].name
        aliases.add(name)
    readers = [s for s in symbols if _argument_names(s) & aliases]
    losses = sum(s.sym.id == cross_entropy_symbol.id for s in readers)
    others = [s for s in readers if s.sym.id != cross_entropy_symbol.id and not _is_link(s, aliases)]
    if others or losses != 1:
        return f"read by {', '.join(sorted({s.sym.name for s in others})) or 'several losses'} too"
    for symbol in symbols:
        if symbol.sym.id == PrimIDs.RETURN and aliases & _returned(symbol):
            return "returned to the caller"
    return None


def _is_link(symbol: Any, aliases: set[str]) -> bool:
    """Whether a symbol is a view within the chain from the product to the loss."""
    return symbol.sym.name in _VIEWS and all(proxy.name in aliases for proxy in symbol.flat_proxy_outs)


def _returned(symbol: Any) -> set[str]:
    """Names of what the caller gets; beside it a forward trace returns what it saves for the backward."""
    outputs = symbol.args[0] if len(symbol.args) == 2 else symbol.args
    return {leaf.name for leaf in tree_flatten(outputs)[0] if isinstance(leaf, Proxy)}
