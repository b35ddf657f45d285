"""Linear projections with low-rank adapters, alone or in a group that shares its input.

    Y_i = X W_iᵀ + b_i + s_i (X A_iᵀ) B_iᵀ      X [tokens, in], W_i [out_i, in], A_i [rank_i, in], B_i [out_i, rank_i]

The backward, with U_i = s_i dY_i B_i  [tokens, rank_i]:

    dX   = Σ_i dY_i W_i + U A        (A, U: the A_i stacked and the U_i side by side, so one product serves the group)
    dA   = Uᵀ X                      (one product for the group, then cut)
    dB_i = s_i dY_iᵀ (X A_iᵀ)
    dW_i = dY_iᵀ X,  db_i = Σ_tokens dY_i      where the base trains

What it saves is X Aᵀ [tokens, Σ rank], a few per cent of Y; X is the caller's (rebuilt by the caller from x and 1/rms
when it is a norm's output).

4-bit weights are dequantized together with their adapters into one matrix (`JoinedProducts`, kernels/join.py), so that
the whole group is one product each way and the adapter's share is added inside its accumulator: Y is written once and
rounded once, where stock rounds the base's output, the adapter's two, and their sum. The matrix is made once for the
forward and once for the backward and never kept, unless the two are neighbours in time (a recomputation). Dense weights
are used where they lie (`SeparateProducts`): each adapter reads X once for the whole group and then reads and writes
Y_i once, inside the product that adds to it in fp32. Adapters kept in another dtype are cast to the compute dtype;
their gradients are cast back. s·B is rounded once more where s is not a power of two (joined; for separate products the
scale is the product's alpha). `FoldedProducts`, on request, are joined ones that add s·B·A to the dense copy of W
itself: faster, and less precise (kernels/fold.py). Dropout of the adapters' inputs is in dropped_products.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fastft.autograd.projection import LEAVES, Projection
from fastft.autograd.room import room
from fastft.kernels.join import Adapter, join
from fastft.kernels.nf4 import QuantizedWeight


class Products(Protocol):
    """The matrix products of a group of projections that share their input: made for a forward, a backward, or both.

    Y, dY: the outputs (and their gradients) of the group side by side, [tokens, Σ out]. `columns` is what an input
    needs beyond its own width, and a gradient of Y beyond its own, for the adapters to ride along in the same product
    (0 where they do not): buffers with that room come from `input_room` and `grad_room`. Tensors without the room are
    taken too.
    """

    columns: int

    def from_row(self, first: int) -> Products:
        """The same for rows of a batch that begin at row `first`; only dropout tells rows apart."""

    def input_room(self, tokens: int) -> Tensor:
        """An input [tokens, in + columns] (room.py), of which the caller fills the first `in` columns."""

    def grad_room(self, tokens: int) -> Tensor:
        """A gradient [tokens, Σ out + columns] (room.py), of which the caller fills the first Σ out columns."""

    def forward(self, x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Y [tokens, Σ out] in the compute dtype and X Aᵀ [tokens, rank], None without adapters.

        Args:
            x: [tokens, in], or with room [tokens, in + columns]: then X Aᵀ is written there, and a view is returned.
            out: receives Y.
        """

    def input_grad(
        self, grad: Tensor, needs_x: bool = True, out: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """dX [tokens, in] (None where it is not needed), and dY sB [tokens, rank], None without adapters.

        Args:
            grad: dY [tokens, Σ out], read only, or with room [tokens, Σ out + columns]: the room is written to.
            needs_x: whether dX is wanted.
            out: receives dX.
        """

    def leaf_grads(
        self,
        grad: Tensor,
        grad_low_rank: Tensor | None,
        x: Tensor,
        low_rank: Tensor | None,
        needs_leaves: Sequence[bool],
    ) -> list[Tensor | None]:
        """`LEAVES` gradients per projection, in the compute dtype (None where `needs_leaves` says so).

        Args:
            grad: as in `input_grad`.
            grad_low_rank: what `input_grad` returned.
            x: the forward's input, with or without room.
            low_rank: X Aᵀ from the forward; None: it is made again.
            needs_leaves: `LEAVES` flags per projection.
        """


def products(group: Sequence[Projection], dtype: torch.dtype) -> Products:
    """How the products of `group` are done: joined where every weight is 4-bit, else one projection after another."""
    if any(projection.dropout is not None for projection in group):
        from fastft.autograd import dropped_products  # which is made of the classes here

        return dropped_products.products(group, dtype)
    if all(isinstance(projection.weight, QuantizedWeight) for projection in group):
        folds = any(projection.fold and projection.rank for projection in group)
        return FoldedProducts(group, dtype) if folds else JoinedProducts(group, dtype)
    return SeparateProducts(group, dtype)


class _ThroughA:
    """What goes through the stacked A_i, which dropout makes another thing (dropped_products.py)."""

    rides_back = True  # whether U A may be part of the product dY W
    _lora_a: Any  # [rank, in]; None without adapters

    def from_row(self, first: int) -> Any:
        return self

    def low_rank(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """X Aᵀ [tokens, rank]."""
        return torch.mm(x, self._lora_a.t(), out=out)

    def add_low_rank(self, grad_x: Tensor, grad_low_rank: Tensor) -> Tensor:
        """dX with U A added, in place."""
        return grad_x.addmm_(grad_low_rank, self._lora_a)

    def grad_a(self, grad_low_rank: Tensor, x: Tensor) -> Tensor:
        """dA [rank, in]."""
        return torch.mm(grad_low_rank.t(), x)


class JoinedProducts(_ThroughA):
    """One matrix for the group, made by one launch (kernels/join.py): weights, s·B along a diagonal, A."""

    def __init__(self, group: Sequence[Projection], dtype: torch.dtype, fold: bool = False) -> None:
        self._group = group
        adapters = [None if p.lora_a is None else Adapter(p.lora_a, p.lora_b, p.scale) for p in group]  # type: ignore[arg-type]
        self._matrix = join([p.weight for p in group], adapters, dtype, fold)  # type: ignore[misc]
        rows, columns = self._matrix.shape
        self._width = group[0].weight.shape[1]
        self.columns = self._rank = columns - self._width
        self._out = rows - self._rank
        self._lora_a = self._matrix[self._out :, : self._width]

    def input_room(self, tokens: int) -> Tensor:
        return room(tokens, self._width, self.columns, self._matrix.dtype, self._matrix.device)

    def grad_room(self, tokens: int) -> Tensor:
        return room(tokens, self._out, self.columns, self._matrix.dtype, self._matrix.device)

    def forward(self, x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        width, matrix = self._width, self._matrix
        low_rank = None
        weight = matrix[: self._out]
        if self.columns and x.shape[1] > width:
            low_rank = self.low_rank(x[:, :width], x[:, width:])
        elif self.columns:
            low_rank = self.low_rank(x)
            weight = weight[:, :width]
        bias = self._bias(x.dtype)
        if bias is None:
            y = torch.mm(x, weight.t(), out=out)
        else:
            y = torch.addmm(bias, x, weight.t(), out=out)
        if low_rank is not None and x.shape[1] == width:
            y.addmm_(low_rank, matrix[: self._out, width:].t())
        return y, low_rank

    def _bias(self, dtype: torch.dtype) -> Tensor | None:
        if all(p.bias is None for p in self._group):
            return None
        rows = [self._matrix.new_zeros(p.out_features) if p.bias is None else p.bias.to(dtype) for p in self._group]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def input_grad(
        self, grad: Tensor, needs_x: bool = True, out: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        width, end, matrix = self._width, self._out, self._matrix
        has_room = grad.shape[1] > end
        outer = grad[:, :end]
        grad_low_rank = None
        if self.columns:
            grad_low_rank = torch.mm(outer, matrix[:end, width:], out=grad[:, end:] if has_room else None)
        if not needs_x:
            return None, grad_low_rank
        if grad_low_rank is None or (has_room and self.rides_back):
            return torch.mm(grad, matrix[: grad.shape[1], :width], out=out), grad_low_rank
        grad_x = torch.mm(outer, matrix[:end, :width], out=out)
        return self.add_low_rank(grad_x, grad_low_rank), grad_low_rank

    def leaf_grads(
        self,
        grad: Tensor,
        grad_low_rank: Tensor | None,
        x: Tensor,
        low_rank: Tensor | None,
        needs_leaves: Sequence[bool],
    ) -> list[Tensor | None]:
        outer, x = grad[:, : self._out], x[:, : self._width]
        found: list[Tensor | None] = [None] * (LEAVES * len(self._group))
        if grad_low_rank is not None and any(needs_leaves[2::LEAVES]):
            _cut_grad_a(self.grad_a(grad_low_rank, x), self._group, needs_leaves, found)
        if self._rank and any(needs_leaves[3::LEAVES]):
            if low_rank is None:
                low_rank = self.low_rank(x)
            _cut_grad_b(torch.mm(outer.t(), low_rank), self._group, needs_leaves, found)
        _add_bias_grads(outer, self._group, needs_leaves, found)
        return found


class FoldedProducts(JoinedProducts):
    """The joined matrix with W + s·B·A in the place of W: products of the base's own shape, and X Aᵀ only for dB."""

    def __init__(self, group: Sequence[Projection], dtype: torch.dtype) -> None:
        super().__init__(group, dtype, fold=True)
        self.columns = 0  # nothing rides along with X or dY

    def forward(self, x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        weight, bias = self._matrix[: self._out, : self._width], self._bias(x.dtype)
        y = torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)
        return y, None

    def input_grad(
        self, grad: Tensor, needs_x: bool = True, out: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        matrix = self._matrix[: self._out]
        grad_low_rank = torch.mm(grad, matrix[:, self._width :])
        return torch.mm(grad, matrix[:, : self._width], out=out) if needs_x else None, grad_low_rank


class SeparateProducts(_ThroughA):
    """Each weight as it lies (a 16-bit base is not copied), each adapter added to its projection's output."""

    columns = 0

    def __init__(self, group: Sequence[Projection], dtype: torch.dtype) -> None:
        self._group, self._dtype = group, dtype
        self._weights = [p.dense(dtype) for p in group]  # [out_i, in]
        matrices = [p.lora_a.to(dtype) for p in group if p.lora_a is not None]
        self._lora_a = None if not matrices else matrices[0] if len(matrices) == 1 else torch.cat(matrices)
        self._lora_b = [None if p.lora_b is None else p.lora_b.to(dtype) for p in group]  # [out_i, rank_i]

    def input_room(self, tokens: int) -> Tensor:
        return self._weights[0].new_empty((tokens, self._weights[0].shape[1]))

    def grad_room(self, tokens: int) -> Tensor:
        return self._weights[0].new_empty((tokens, sum(w.shape[0] for w in self._weights)))

    def forward(self, x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        low_rank = None if self._lora_a is None else self.low_rank(x)
        y = self.grad_room(x.shape[0]) if out is None else out
        column = 0
        for part, projection, weight, lora_b in zip(
            self._cut(y), self._group, self._weights, self._lora_b, strict=True
        ):
            if projection.bias is None:
                torch.mm(x, weight.t(), out=part)
            else:
                torch.addmm(projection.bias.to(x.dtype), x, weight.t(), out=part)
            if low_rank is not None and lora_b is not None:
                end = column + lora_b.shape[1]
                part.addmm_(low_rank[:, column:end], lora_b.t(), alpha=projection.scale)
                column = end
        return y, low_rank

    def input_grad(
        self, grad: Tensor, needs_x: bool = True, out: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        grad_low_rank = None
        if self._lora_a is not None:
            grad_low_rank = grad.new_empty((grad.shape[0], self._lora_a.shape[0]))
        grad_x: Tensor | None = None
        column = 0
        for part, projection, weight, lora_b in zip(
            self._cut(grad), self._group, self._weights, self._lora_b, strict=True
        ):
            if lora_b is not None and grad_low_rank is not None:
                end = column + lora_b.shape[1]
                grad_low_rank[:, column:end].addmm_(part, lora_b, beta=0, alpha=projection.scale)
                column = end
            if needs_x:
                grad_x = torch.mm(part, weight, out=out) if grad_x is None else grad_x.addmm_(part, weight)
        if grad_x is not None and grad_low_rank is not None:
            self.add_low_rank(grad_x, grad_low_rank)
        return grad_x, grad_low_rank

    def leaf_grads(
        self,
        grad: Tensor,
        grad_low_rank: Tensor | None,
        x: Tensor,
        low_rank: Tensor | None,
        needs_leaves: Sequence[bool],
    ) -> list[Tensor | None]:
        found: list[Tensor | None] = [None] * (LEAVES * len(self._group))
        if low_rank is None and self._lora_a is not None and any(needs_leaves[3::LEAVES]):
            low_rank = self.low_rank(x)
        column = 0
        for index, (part, projection) in enumerate(zip(self._cut(grad), self._group, strict=True)):
            needs_weight, _, _, needs_b = needs_leaves[LEAVES * index : LEAVES * (index + 1)]
            if needs_weight:
                found[LEAVES * index] = torch.mm(part.t(), x)
            end = column + projection.rank
            if needs_b and low_rank is not None and projection.rank:
                product = grad.new_empty((projection.out_features, projection.rank))
                product.addmm_(part.t(), low_rank[:, column:end], beta=0, alpha=projection.scale)
                found[LEAVES * index + 3] = product
            column = end
        if grad_low_rank is not None and any(needs_leaves[2::LEAVES]):
            _cut_grad_a(self.grad_a(grad_low_rank, x), self._group, needs_leaves, found)
        _add_bias_grads(grad, self._group, needs_leaves, found)
        return found

    def _cut(self, y: Tensor) -> tuple[Tensor, ...]:
        return y.split([w.shape[0] for w in self._weights], 1)


def _cut_grad_a(
    grad_a: Tensor, group: Sequence[Projection], needs_leaves: Sequence[bool], leaf_grads: list[Tensor | None]
) -> None:
    """Hand each projection its rows of dA [rank, in]."""
    row = 0
    for index, projection in enumerate(group):
        if projection.lora_a is None:
            continue
        end = row + projection.rank
        if needs_leaves[LEAVES * index + 2]:
            leaf_grads[LEAVES * index + 2] = grad_a[row:end]
        row = end


def _cut_grad_b(
    grad_b: Tensor, group: Sequence[Projection], needs_leaves: Sequence[bool], leaf_grads: list[Tensor | None]
) -> None:
    """Hand each projection its block of dYᵀ (X Aᵀ) [Σ out, rank], times its scale: that is its dB."""
    row = column = 0
    for index, projection in enumerate(group):
        end, stop = row + projection.out_features, column + projection.rank
        if projection.lora_b is not None and needs_leaves[LEAVES * index + 3]:
            block = grad_b[row:end, column:stop]
            leaf_grads[LEAVES * index + 3] = block if projection.scale == 1.0 else block * projection.scale
        row, column = end, stop


def _add_bias_grads(
    grad: Tensor, group: Sequence[Projection], needs_leaves: Sequence[bool], leaf_grads: list[Tensor | None]
) -> None:
    """db_i, the sum of dY_i over tokens."""
    column = 0
    for index, projection in enumerate(group):
        end = column + projection.out_features
        if needs_leaves[LEAVES * index + 1]:
            leaf_grads[LEAVES * index + 1] = grad[:, column:end].sum(0, dtype=sum_dtype(grad.dtype))
        column = end


def add_leaf_grads(total: list[Tensor | None], part: Sequence[Tensor | None]) -> None:
    """Add the leaf gradients of some tokens to those of others, in float32 at least; both may be written over."""
    known = [i for i, grad in enumerate(part) if grad is not None and total[i] is not None]
    if known:
        torch._foreach_add_([total[i] for i in known], [part[i] for i in known])
    for i, grad in enumerate(part):
        if grad is not None and total[i] is None:
            total[i] = grad.to(sum_dtype(grad.dtype))


def to_leaf_dtypes(grads: Sequence[Tensor | None], leaves: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients in their leaves' dtypes and contiguous; those that are not are copied by one kernel."""
    result = list(grads)
    places = [
        i
        for i, (g, t) in enumerate(zip(grads, leaves, strict=True))
        if g is not None and (g.dtype != t.dtype or not g.is_contiguous())  # type: ignore[union-attr]
    ]
    if places:
        targets = [torch.empty_like(leaves[i], memory_format=torch.contiguous_format) for i in places]  # type: ignore[arg-type]
        torch._foreach_copy_(targets, [grads[i] for i in places])
        for i, target in zip(places, targets, strict=True):
            result[i] = target
    return result


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype a sum over tokens is accumulated in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
