"""The head and its loss in one: cross-entropy of hidden @ weightᵀ + bias, without ever holding the logits.

Rows go through the head in chunks. A chunk of logits X = h Wᵀ + b is turned in place into its own gradient
G = (P − Y) dz/dx (kernels/cross_entropy.py), so what leaves the chunk is per-row numbers and one product:

    d loss_i / d h_i = G_i W          d loss / d W = Σ_i w_i G_iᵀ h_i          d loss / d b = Σ_i w_i G_i

where w_i is what autograd sends to row i. Three ways to serve a backward, chosen before `.apply` (inside a Function's
forward grad mode is always off):

* frozen head: keep G W [rows, hidden]; backward scales row i by w_i. Two vocabulary-sized products in all, none
  repeated, also for per-token losses.
* trained head, loss summed here: all w_i are one scalar, so the forward also accumulates Gᵀ h in float32 and backward
  scales: three products in all.
* trained head with per-token gradients, or any gradient through the entropy: w_i is known only in backward, so the
  inputs are kept and the logits of each chunk made again: four products in all.

Rows whose label is ignored never enter a product. Memory above inputs and gradients: one chunk of logits (a byte
budget, not a share of tokens × vocabulary) and G W. Rounding: logits to the compute dtype as a Linear rounds them, G in
float32 and then to the compute dtype, G W to the compute dtype, and once more when scaled.

Where the weight's dtype is not the compute dtype (float32 head under autocast, 16-bit head with float32 hidden) slices
of the weight are cast as they are used: a copy of a whole head, 1 GiB for a Llama-3 8B in 16 bits, is more than the
chunk itself. It costs a quarter of the operator's time; a head kept in the compute dtype costs nothing.

With `skip_below` a frozen head's G W leaves out columns in which no |P − Y| of 256 rows passes that value
(kernels/sparse_product.py): an approximation that is asked for, never a default. `whole_product_reason` says where it
does not apply.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fastft.autograd.autocast import AutocastState, suspended
from fastft.autograd.first_order import first_order
from fastft.autograd.head_arguments import check, check_reduction
from fastft.autograd.head_products import add_head_grads, chunks, project, project_back, put_rows, take_rows
from fastft.kernels.cross_entropy import (
    OPTIONAL_OUTPUTS,
    STATISTICS,
    CrossEntropyRows,
    cross_entropy,
    cross_entropy_backward,
    named_rows,
)
from fastft.kernels.sparse_product import sparse_product

__all__ = ["EMPTY_BATCH", "linear_cross_entropy", "linear_log_probs"]

EMPTY_BATCH = (
    "fastft: a batch had no supervised tokens (all labels -100); it adds 0 to the loss. Common causes: truncation cut "
    "off the answers; wrong response markers."
)


class Tensors(NamedTuple):
    """What the pair reads."""

    hidden: Tensor  # [tokens, hidden]
    weight: Tensor  # [vocabulary, hidden]
    bias: Tensor | None  # [vocabulary]
    labels: Tensor  # [tokens], integers


@dataclass(frozen=True, slots=True)
class Statics:
    """What the pair needs besides tensors.

    `ignore_index` None means that every row counts. `summed`: the first output is the sum over rows, a scalar.
    `skip_below`: columns of P − Y that stay below it are left out of G W; None for the whole product.
    """

    ignore_index: int | None
    outputs: tuple[str, ...]
    summed: bool
    compute_dtype: torch.dtype
    needs_hidden: bool
    needs_weight: bool
    needs_bias: bool
    logit_scale: float
    softcap: float | None
    temperature: float
    label_smoothing: float
    skip_below: float | None = None

    @property
    def trains_head(self) -> bool:
        return self.needs_weight or self.needs_bias

    @property
    def keeps_inputs(self) -> bool:
        """Whether the backward may have to make the logits again."""
        return not self.summed and (self.trains_head or (self.needs_hidden and "entropy" in self.outputs))

    @property
    def keeps_grad_rows(self) -> bool:
        return self.needs_hidden and (self.summed or not self.trains_head)

    @property
    def keeps_head_grads(self) -> bool:
        return self.summed and self.trains_head

    def transform(self) -> dict[str, Any]:
        """From raw logits to the distribution: keywords of the kernels."""
        return {
            "logit_scale": self.logit_scale,
            "softcap": self.softcap,
            "temperature": self.temperature,
            "label_smoothing": self.label_smoothing,
        }


class Outputs(NamedTuple):
    """float32 (float64 for float64 inputs) per token, 0 where ignored; None where not asked for."""

    log_probs: Tensor  # [tokens] or, summed, []
    entropy: Tensor | None
    log_sum_sq_probs: Tensor | None
    mean_logits: Tensor | None
    is_top1: Tensor | None  # bool
    counted: int  # rows that were not ignored


class SavedTensors(NamedTuple):
    """`count` rows: the ignored ones are gone."""

    grad_rows: Tensor | None = None  # G W [count, hidden]
    grad_weight: Tensor | None = None  # Gᵀ h [vocabulary, hidden], at least float32
    grad_bias: Tensor | None = None
    positions: Tensor | None = None  # [count] where the rows were; None: all of them
    hidden: Tensor | None = None  # from here on: for making the logits again
    weight: Tensor | None = None
    bias: Tensor | None = None
    targets: Tensor | None = None
    statistics: Tensor | None = None  # [7, count], see kernels.cross_entropy


class Saved(NamedTuple):
    """What the backward needs."""

    tensors: SavedTensors
    statics: Statics
    hidden_shape: torch.Size
    hidden_dtype: torch.dtype
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None


def forward(tensors: Tensors, statics: Statics) -> tuple[Outputs, Saved]:
    """Log-probabilities of the labels (and what else `statics.outputs` names) under the head.

    Raises:
        ValueError: a label is neither ignored nor a row of the weight.
    """
    hidden, weight, bias, labels = tensors
    vocabulary = weight.shape[0]
    dtype = statics.compute_dtype
    count, index = _supervised_rows(labels, statics.ignore_index, vocabulary)
    targets = labels if index is None else labels.index_select(0, index)  # [count]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    statistics = torch.empty((len(STATISTICS), count), dtype=wide, device=hidden.device)
    grad_rows = hidden.new_empty((count, hidden.shape[1]), dtype=dtype) if statics.keeps_grad_rows else None
    grad_weight, grad_bias = _head_grads(weight, bias, statics, wide) if statics.keeps_head_grads else (None, None)
    write_gradient = statics.keeps_grad_rows or statics.keeps_head_grads
    for start, end, logits in chunks(count, vocabulary, dtype, hidden.device):
        rows = take_rows(hidden, index, start, end).to(dtype)  # [n, hidden]
        project(rows, weight, bias, logits)
        cross_entropy(
            logits,
            targets[start:end],
            write_gradient=write_gradient,
            outputs=statics.outputs,
            out=statistics[:, start:end],
            **statics.transform(),
        )
        if grad_rows is not None:
            _hidden_gradient(logits, weight, statics, grad_rows[start:end])
        add_head_grads(grad_weight, grad_bias, logits, rows)

    kept = SavedTensors(grad_rows, grad_weight, grad_bias, index)
    if statics.keeps_inputs:
        kept = kept._replace(hidden=hidden, weight=weight, bias=bias, targets=targets, statistics=statistics)
    bias_dtype = None if bias is None else bias.dtype
    saved = Saved(kept, statics, hidden.shape, hidden.dtype, weight.dtype, bias_dtype)
    if index is not None:
        statistics = statistics.new_zeros((len(STATISTICS), labels.shape[0])).index_copy_(1, index, statistics)
    return _outputs(named_rows(statistics, statics.outputs), statics.summed, count), saved


def backward(
    saved: Saved, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias; None where `saved.statics` needs none. Reads `saved` only: may run twice.

    Args:
        saved: from `forward`.
        grad_log_probs: [tokens], or [] when summed; None for none.
        grad_entropy: [tokens]; None for none.
    """
    statics, kept = saved.statics, saved.tensors
    if grad_entropy is not None or (grad_log_probs is not None and statics.trains_head and not statics.summed):
        return _backward_again(saved, grad_log_probs, grad_entropy)
    if grad_log_probs is None:
        return None, None, None
    grad_loss = grad_log_probs.neg()  # G is the gradient of the loss
    grad_hidden = _scatter_scaled(kept.grad_rows, grad_loss, saved) if kept.grad_rows is not None else None
    if not statics.summed:
        return grad_hidden, None, None
    grad_weight = _scaled(kept.grad_weight, grad_loss.view(1, 1), saved.weight_dtype)
    grad_bias = _scaled(kept.grad_bias, grad_loss.view(1), saved.bias_dtype)
    return grad_hidden, grad_weight, grad_bias


def _backward_again(
    saved: Saved, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The backward that makes each chunk of logits again."""
    statics, kept = saved.statics, saved.tensors
    hidden, weight, index = kept.hidden, kept.weight, kept.positions
    targets, statistics = kept.targets, kept.statistics
    if hidden is None or weight is None or targets is None or statistics is None:
        raise RuntimeError(
            "linear_cross_entropy: a gradient came through the entropy, or per token to a trained head, but the "
            "forward kept no inputs to make the logits again from: its `Statics.keeps_inputs` was False."
        )
    if index is not None:
        grad_log_probs = None if grad_log_probs is None else grad_log_probs.index_select(0, index)
        grad_entropy = None if grad_entropy is None else grad_entropy.index_select(0, index)
    count = targets.shape[0]
    grad_hidden = hidden.new_zeros(saved.hidden_shape) if statics.needs_hidden else None
    grad_weight, grad_bias = _head_grads(weight, kept.bias, statics, statistics.dtype)
    for start, end, logits in chunks(count, weight.shape[0], statics.compute_dtype, hidden.device):
        rows = take_rows(hidden, index, start, end).to(statics.compute_dtype)
        project(rows, weight, kept.bias, logits)
        part = slice(start, end)
        cross_entropy_backward(
            logits,
            targets[part],
            statistics[:, part],
            grad_log_probs=None if grad_log_probs is None else grad_log_probs[part],
            grad_entropy=None if grad_entropy is None else grad_entropy[part],
            **statics.transform(),
        )
        if grad_hidden is not None:
            grad_rows = torch.empty_like(rows)
            project_back(logits, weight, grad_rows)
            put_rows(grad_hidden, index, start, end, grad_rows)
        add_head_grads(grad_weight, grad_bias, logits, rows)
    return (
        grad_hidden,
        None if grad_weight is None else grad_weight.to(saved.weight_dtype),
        None if grad_bias is None else grad_bias.to(saved.bias_dtype),
    )


def _supervised_rows(labels: Tensor, ignore_index: int | None, vocabulary: int) -> tuple[int, Tensor | None]:
    """How many rows count, and their positions in order (None: all). One host sync, with the range check on board."""
    tokens = labels.shape[0]
    if tokens == 0:
        return 0, None
    valid = torch.ones_like(labels, dtype=torch.bool) if ignore_index is None else labels != ignore_index
    in_play = labels.masked_fill(~valid, 0)  # 0 is always a row of the weight
    count, lowest, highest = torch.stack((valid.sum(), in_play.amin().long(), in_play.amax().long())).tolist()
    if lowest < 0 or highest >= vocabulary:
        wrong = lowest if lowest < 0 else highest
        allowed = "" if ignore_index is None else f" or equal ignore_index ({ignore_index})"
        raise ValueError(
            f"label {wrong} is outside the vocabulary: the head's weight has {vocabulary} rows, so a label must lie in "
            f"[0, {vocabulary - 1}]{allowed}. Check that the tokenizer belongs to the model, resize the embeddings "
            "after adding tokens, and mask tokens that should not be learned with -100, not another negative number."
        )
    if count == tokens:
        return count, None
    # A stable sort instead of nonzero(), which would wait for the device a second time
    return count, torch.argsort(valid.to(torch.uint8), descending=True, stable=True)[:count]


def _hidden_gradient(gradient: Tensor, weight: Tensor, statics: Statics, out: Tensor) -> None:
    """out = gradient @ weight, or what `skip_below` leaves of it: then `gradient` is overwritten."""
    if statics.skip_below is None:
        project_back(gradient, weight, out)
        return
    slope = abs(statics.logit_scale / statics.temperature)  # G is (P − Y) times this
    sparse_product(gradient, weight, statics.skip_below * slope, out=out)


def whole_product_reason(statics: Statics, device: torch.device) -> str | None:
    """Why the hidden gradient multiplies by the whole head although `skip_below` is given; None where it does not."""
    if statics.trains_head:
        return "the head trains"  # its own gradient needs all of G
    if statics.softcap is not None:
        return "the logits are capped"  # G is P − Y times a slope of each element's own
    if statics.label_smoothing:
        return "labels are smoothed"  # every column carries ε / V of each row, and together they count
    if statics.compute_dtype.itemsize != 2:
        return f"the loss is computed in {str(statics.compute_dtype).removeprefix('torch.')}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "Triton has no matrix units on a GPU below compute capability 8.0"
    return None


def _head_grads(
    weight: Tensor, bias: Tensor | None, statics: Statics, wide: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if statics.needs_weight else None
    if not statics.needs_bias or bias is None:
        return grad_weight, None
    return grad_weight, torch.zeros(bias.shape, dtype=wide, device=bias.device)


def _scatter_scaled(grad_rows: Tensor, grad_loss: Tensor, saved: Saved) -> Tensor:
    """[tokens, hidden]: row i of G W times its incoming gradient, 0 where ignored.

    A block at a time, because the product of a 16-bit block and float32 gradients is float32 before it is rounded.
    """
    index = saved.tensors.positions
    count = grad_rows.shape[0]
    scale = grad_loss.view(1, 1).expand(count, 1) if saved.statics.summed else grad_loss.view(-1, 1)
    if index is None:
        result = torch.empty(saved.hidden_shape, dtype=saved.hidden_dtype, device=grad_rows.device)
    else:
        result = torch.zeros(saved.hidden_shape, dtype=saved.hidden_dtype, device=grad_rows.device)
        scale = scale if saved.statics.summed else scale.index_select(0, index)
    for start in range(0, count, 4096):
        end = min(start + 4096, count)
        if index is None:  # [n, 1] float32 times 16 bits is computed in float32 and rounded once
            torch.mul(grad_rows[start:end], scale[start:end], out=result[start:end])
        else:
            put_rows(result, index, start, end, grad_rows[start:end] * scale[start:end])
    return result


def _scaled(total: Tensor | None, scale: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    if total is None:
        return None
    return torch.mul(total, scale, out=torch.empty(total.shape, dtype=dtype, device=total.device))


def _outputs(rows: CrossEntropyRows, summed: bool, counted: int) -> Outputs:
    def copy(row: Tensor | None) -> Tensor | None:  # views of one tensor would share a version counter
        return None if row is None else row.clone()

    log_probs = rows.loss.neg()
    return Outputs(
        log_probs=log_probs.sum() if summed else log_probs,
        entropy=copy(rows.entropy),
        log_sum_sq_probs=copy(rows.log_sum_sq_probs),
        mean_logits=copy(rows.mean_logits),
        is_top1=rows.is_top1,
        counted=counted,
    )


class _LinearLogProbs(torch.autograd.Function):
    """Shell around `forward` and `backward`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, statics: Statics) -> Any:
        ctx.set_materialize_grads(False)  # an unused entropy then arrives as None
        with suspended(hidden.device.type):
            outputs, saved = forward(Tensors(hidden, weight, bias, labels), statics)
        ctx.save_for_backward(*saved.tensors)
        ctx.saved = saved._replace(tensors=SavedTensors())
        ctx.device_type = hidden.device.type
        ctx.mark_non_differentiable(*(x for x in outputs[2:5] if x is not None))
        return tuple(outputs)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, *_: None) -> Any:
        saved = ctx.saved._replace(tensors=SavedTensors(*ctx.saved_tensors))
        with suspended(ctx.device_type):
            return *backward(saved, grad_log_probs, grad_entropy), None, None


def _run(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    ignore_index: int | None,
    outputs: tuple[str, ...] = (),
    summed: bool = False,
    softcap: float | None,
    logit_scale: float,
    temperature: float,
    label_smoothing: float,
    skip_below: float | None,
    on_skip: Callable[[str | None], None] | None,
) -> Outputs:
    """Reads grad mode and autocast, decides what the backward will need, and runs the pair on [tokens, hidden]."""
    check(hidden, weight, bias, labels, softcap, temperature, label_smoothing, outputs, skip_below)
    grad = torch.is_grad_enabled()
    statics = Statics(
        ignore_index=ignore_index,
        outputs=tuple(outputs),
        summed=summed,
        compute_dtype=AutocastState.current(hidden.device.type).compute_dtype(hidden.dtype),
        needs_hidden=grad and hidden.requires_grad,
        needs_weight=grad and weight.requires_grad,
        needs_bias=grad and bias is not None and bias.requires_grad,
        logit_scale=float(logit_scale),
        softcap=None if softcap is None else float(softcap),
        temperature=float(temperature),
        label_smoothing=float(label_smoothing),
        skip_below=skip_below,
    )
    if skip_below is not None and statics.needs_hidden:
        reason = whole_product_reason(statics, hidden.device)
        if reason is not None:
            statics = dataclasses.replace(statics, skip_below=None)
        if on_skip is not None:
            on_skip(reason)
    tensors = Tensors(hidden, weight, bias, labels.to(device=hidden.device, dtype=torch.int64))
    if statics.needs_hidden or statics.trains_head:
        return Outputs(*_LinearLogProbs.apply(*tensors, statics))
    with suspended(hidden.device.type):
        return forward(tensors, statics)[0]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    num_items_in_batch: int | float | Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    label_smoothing: float = 0.0,
    on_empty: Callable[[], None] | None = None,
    skip_below: float | None = None,
    on_skip: Callable[[str | None], None] | None = None,
) -> Tensor:
    """Cross-entropy of `hidden @ weightᵀ + bias` against `labels`, without building the logits.

    Row i is scored against label i: shift before the call. A batch in which every label is ignored gives 0, joined to
    the graph with zero gradients, and a warning; torch's cross-entropy gives NaN there.

    Args:
        hidden: [..., hidden], any strides; 16-, 32- or 64-bit float.
        weight: [vocabulary, hidden]; may be of another dtype than `hidden`. Gets a gradient only if it requires one.
        labels: [...] integers, one per row of `hidden`.
        bias: [vocabulary].
        ignore_index: rows with this label count for nothing and cost nothing.
        reduction: "mean" divides the sum by `num_items_in_batch` if given, else by the rows that count; "sum" and
            "none" as in torch, "none" with 0 where ignored.
        num_items_in_batch: what "mean" divides by, as Trainer counts it over a whole accumulated batch; a number or a
            one-element tensor of any dtype on any device.
        softcap: logits become softcap · tanh(logits / softcap); None for none.
        logit_scale: the raw logits are multiplied by this first.
        temperature: the (capped) logits are divided by this.
        label_smoothing: ε in [0, 1]: (1 − ε) · loss + ε · mean over the vocabulary of −log p.
        on_empty: called instead of the warning when every label is ignored (the operator knows the count anyway; asking
            again would wait for the device).
        skip_below: an approximation, for a frozen head in 16 bits: the gradient of `hidden` leaves out rows of `weight`
            whose |probability − label| stays at or below this in a whole block of 256 rows. None computes all of it;
            docs/approximations.md has the errors.
        on_skip: called where `skip_below` is given and `hidden` needs a gradient: with None, or with the reason why the
            product is whole after all.

    Returns:
        A scalar, or [...] for "none"; float32 (float64 for float64 inputs). The computation runs in autocast's dtype if
        autocast is on, else in `hidden`'s.

    Raises:
        ValueError: a label outside the vocabulary that is not `ignore_index`; shapes that do not match; an unknown
            reduction, or `num_items_in_batch` with a reduction other than "mean"; a softcap or temperature ≤ 0; a
            label_smoothing outside [0, 1]; a skip_below < 0.
    """
    check_reduction(hidden, labels, reduction, num_items_in_batch)
    outputs = _run(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        labels.reshape(-1),
        ignore_index=ignore_index,
        summed=reduction != "none",
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=temperature,
        label_smoothing=label_smoothing,
        skip_below=skip_below,
        on_skip=on_skip,
    )
    if outputs.counted == 0:
        if on_empty is None:
            warnings.warn(EMPTY_BATCH, stacklevel=2)
        else:
            on_empty()
        return outputs.log_probs.view(labels.shape) if reduction == "none" else outputs.log_probs
    if reduction == "none":
        return outputs.log_probs.neg().view(labels.shape)
    if reduction == "sum":
        return outputs.log_probs.neg()
    divisor = outputs.counted if num_items_in_batch is None else num_items_in_batch
    if isinstance(divisor, Tensor):
        # A 0-d tensor on the CPU is read as a number, without a sync
        device = divisor.device if divisor.device.type == "cpu" else hidden.device
        divisor = divisor.reshape(()).to(device=device, dtype=outputs.log_probs.dtype)
    return outputs.log_probs / -divisor


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    outputs: tuple[str, ...] = OPTIONAL_OUTPUTS,
    skip_below: float | None = None,
    on_skip: Callable[[str | None], None] | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Per-row log-probability of `targets` under the head, and what trainers log beside it.

    Args:
        hidden: [rows, hidden]; rows may be 0.
        weight: [vocabulary, hidden].
        bias: [vocabulary] or None.
        targets: [rows] integers; every row counts.
        temperature, softcap, logit_scale: as in `linear_cross_entropy`.
        outputs: which of "entropy", "log_sum_sq_probs", "mean_logits", "is_top1" to compute; "log_probs" is understood.
        skip_below, on_skip: as in `linear_cross_entropy`; a gradient through the entropy takes the whole product.

    Returns:
        (log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1), each [rows]; None where not asked for. The first
        two are differentiable. `is_top1` is bool, ties going to the lowest index.

    Raises:
        ValueError: a target outside the vocabulary, shapes that do not match, a softcap or temperature ≤ 0, a
            skip_below < 0.
    """
    result = _run(
        hidden,
        weight,
        bias,
        targets,
        ignore_index=None,
        outputs=outputs,
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=temperature,
        label_smoothing=0.0,
        skip_below=skip_below,
        on_skip=on_skip,
    )
    return result[:5]
