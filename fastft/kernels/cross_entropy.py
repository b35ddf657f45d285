"""Cross-entropy over a chunk of logits, turned in place into its own gradient.

For one row of raw logits x [V] with target t, in float32 whatever the dtype of x:

    z = softcap · tanh(scale · x / softcap) / temperature      (without softcap: scale · x / temperature)
    m = max z        s = Σ exp(z − m)        p = exp(z − m) / s
    loss = (1 − ε) ((m − z_t) + log s) + ε ((m − mean z) + log s)            ε: label smoothing
    d loss / d x = (p − (1 − ε) [v = t] − ε / V) · dz/dx      dz/dx = scale / temperature · (1 − tanh²)

and on request what trainers log: entropy = log s − Σ p (z − m), log Σ p², mean z, and whether t is the argmax (of equal
logits the lowest index wins: t is beaten by any larger z and by an equal z at a lower index).
Differences are taken before sums (m − z_t, not lse − z_t), so a loss near zero under logits near 60 keeps its digits;
p_t − 1 is formed in float32, before the one rounding to the dtype of x.

Bytes moved: the row is read once for m and s (online: a new maximum rescales the running sums), read again for p, and
written once. A row of 128,256 logits fits neither the registers nor the shared memory of one multiprocessor, hence two
reads; of a short row the second one is served by the cache. Loads run a few blocks ahead of the arithmetic. A target
outside the vocabulary is never used as an address: its loss and its gradient row are NaN.

`cross_entropy_backward` serves the recomputing path (a trained head, a gradient through the entropy): with the row's
m and s known, one read and one write give

    d / d x = (g (y − p) − h p (log p + entropy)) · dz/dx          y = (1 − ε) [v = t] + ε / V

for incoming gradients g of the (smoothed) log-probability and h of the entropy.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastft.kernels.backend import cdiv, interpreting, launch_on, next_power_of_2, tl, triton, uses_triton

__all__ = [
    "OPTIONAL_OUTPUTS",
    "STATISTICS",
    "CrossEntropyRows",
    "cross_entropy",
    "cross_entropy_backward",
    "cross_entropy_backward_torch",
    "cross_entropy_torch",
    "named_rows",
]

OPTIONAL_OUTPUTS = ("entropy", "is_top1", "log_sum_sq_probs", "mean_logits")
STATISTICS = ("loss", "maximum", "log_sum", *OPTIONAL_OUTPUTS)  # the rows of a statistics tensor, in this order

# Below any logit, yet finite: a running maximum of −inf would make (−inf) − (−inf) of a masked-out first block.
_LOWEST = -3.0e38
# Float32 scratch elements a twin works on at a time: every pass over a block hits the cache, and memory stays flat.
_TWIN_BLOCK_ELEMENTS = 1 << 20


class CrossEntropyRows(NamedTuple):
    """Per-row results; float32 [rows] (float64 for float64 logits), `is_top1` bool; None where not asked for."""

    loss: Tensor
    maximum: Tensor  # m
    log_sum: Tensor  # log s; the log-sum-exp is m + log s, kept apart because adding them loses digits
    entropy: Tensor | None
    is_top1: Tensor | None
    log_sum_sq_probs: Tensor | None
    mean_logits: Tensor | None


@triton.jit
def _transform(x, logit_scale, softcap, inverse_temperature, HAS_SOFTCAP: tl.constexpr):
    """Raw logits to z and dz/dx."""
    slope = logit_scale * inverse_temperature
    if HAS_SOFTCAP:
        u = x * logit_scale / softcap
        # Near zero the closed form loses its digits: there a polynomial in u², as C libraries have it.
        square = u * u
        series = 2.06390887954e-2 - 5.70498872745e-3 * square
        series = -3.33332819422e-1 + square * (1.33314422036e-1 + square * (-5.37397155531e-2 + square * series))
        far = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(u)) + 1.0)
        tanh = tl.where(tl.abs(u) < 0.625, u + u * square * series, tl.where(u < 0.0, -far, far))
        return softcap * tanh * inverse_temperature, slope * (1.0 - tanh * tanh)
    return x * slope, slope + tl.zeros_like(x)


# Counts, and the alignment of per-row vectors, change from batch to batch: they must not compile a new kernel.
@triton.jit(
    do_not_specialize=["row_count", "statistic_stride"], do_not_specialize_on_alignment=["targets", "statistics"]
)
def _cross_entropy_kernel(
    logits,
    row_stride,
    targets,
    statistics,
    statistic_stride,
    row_count,
    vocabulary,
    logit_scale,
    softcap,
    inverse_temperature,
    label_smoothing,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    WRITE_GRADIENT: tl.constexpr,
    ENTROPY: tl.constexpr,
    IS_TOP1: tl.constexpr,
    LOG_SUM_SQ_PROBS: tl.constexpr,
    MEAN_LOGITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: ROWS rows, from raw logits to statistics and, in place, to the gradient."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    row_mask = rows < row_count
    row_offset = rows.to(tl.int64) * row_stride
    columns = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    target = tl.load(targets + rows, mask=row_mask, other=0)
    in_range = (target >= 0) & (target < vocabulary)
    target_x = tl.load(logits + row_offset + target, mask=row_mask & in_range, other=0.0).to(tl.float32)
    target_z, _target_slope = _transform(target_x, logit_scale, softcap, inverse_temperature, HAS_SOFTCAP)
    target_z = tl.where(in_range, target_z, float("nan"))

    maximum = tl.full([ROWS], -3.0e38, tl.float32)
    # Sums stay spread over the lanes and are reduced once at the end; per block only the maximum is.
    sum_exp = tl.zeros([ROWS, BLOCK], tl.float32)
    sum_weighted = tl.zeros([ROWS, BLOCK], tl.float32)
    sum_squares = tl.zeros([ROWS, BLOCK], tl.float32)
    sum_z = tl.zeros([ROWS, BLOCK], tl.float32)
    beaten = tl.zeros([ROWS], tl.int32)
    for start in tl.range(0, vocabulary, BLOCK, num_stages=4):
        column = start + columns
        in_row = column < vocabulary
        x = tl.load(logits + row_offset[:, None] + column, mask=row_mask[:, None] & in_row, other=0.0).to(tl.float32)
        z, _slope = _transform(x, logit_scale, softcap, inverse_temperature, HAS_SOFTCAP)
        if MEAN_LOGITS or HAS_SMOOTHING:
            sum_z += tl.where(in_row, z, 0.0)
        z = tl.where(in_row, z, float("-inf"))
        block_maximum = tl.max(z, axis=1)
        if IS_TOP1:  # the block that holds the target is looked through below
            equal_ahead = (block_maximum == target_z) & (start + BLOCK <= target)
            beaten = beaten | ((block_maximum > target_z) | equal_ahead).to(tl.int32)
        if tl.max((block_maximum > maximum).to(tl.int32), axis=0) > 0:  # rare after the first blocks
            new_maximum = tl.maximum(maximum, block_maximum)
            shift = maximum - new_maximum
            rescale = tl.exp(shift)[:, None]
            if ENTROPY:  # Σ exp(z − m) (z − m): moving m shifts every term by m_old − m_new
                sum_weighted = (sum_weighted + sum_exp * shift[:, None]) * rescale
            if LOG_SUM_SQ_PROBS:
                sum_squares = sum_squares * rescale * rescale
            sum_exp = sum_exp * rescale
            maximum = new_maximum
        centred = z - maximum[:, None]
        exp = tl.exp(centred)
        sum_exp += exp
        if ENTROPY:
            sum_weighted += exp * tl.maximum(centred, -3.0e38)  # 0 · (−inf) is 0 here
        if LOG_SUM_SQ_PROBS:
            sum_squares += exp * exp

    total = tl.sum(sum_exp, axis=1)
    log_sum = tl.log(total)
    loss = (maximum - target_z) + log_sum
    mean_z = tl.sum(sum_z, axis=1) / vocabulary
    if HAS_SMOOTHING:
        loss = (1.0 - label_smoothing) * loss + label_smoothing * ((maximum - mean_z) + log_sum)
    tl.store(statistics + rows, loss, mask=row_mask)
    tl.store(statistics + statistic_stride + rows, maximum, mask=row_mask)
    tl.store(statistics + 2 * statistic_stride + rows, log_sum, mask=row_mask)
    if ENTROPY:
        entropy = log_sum - tl.sum(sum_weighted, axis=1) / total
        tl.store(statistics + 3 * statistic_stride + rows, entropy, mask=row_mask)
    if IS_TOP1:
        near = (target // BLOCK * BLOCK)[:, None] + columns  # the block that holds the target
        ahead = (row_mask & in_range)[:, None] & (near < target[:, None])
        near_x = tl.load(logits + row_offset[:, None] + near, mask=ahead, other=0.0).to(tl.float32)
        near_z, _near_slope = _transform(near_x, logit_scale, softcap, inverse_temperature, HAS_SOFTCAP)
        tied = tl.sum((ahead & (near_z == target_z[:, None])).to(tl.int32), axis=1)
        is_top1 = in_range & (beaten == 0) & (tied == 0)
        tl.store(statistics + 4 * statistic_stride + rows, is_top1.to(tl.float32), mask=row_mask)
    if LOG_SUM_SQ_PROBS:
        value = tl.log(tl.sum(sum_squares, axis=1)) - 2.0 * log_sum
        tl.store(statistics + 5 * statistic_stride + rows, value, mask=row_mask)
    if MEAN_LOGITS:
        tl.store(statistics + 6 * statistic_stride + rows, mean_z, mask=row_mask)

    if WRITE_GRADIENT:
        inverse_total = 1.0 / total
        blocks = tl.cdiv(vocabulary, BLOCK)
        for step in tl.range(0, blocks, num_stages=4):  # from the end: what was read last may still be in the cache
            column = (blocks - 1 - step) * BLOCK + columns
            mask = row_mask[:, None] & (column < vocabulary)
            x = tl.load(logits + row_offset[:, None] + column, mask=mask, other=0.0).to(tl.float32)
            z, slope = _transform(x, logit_scale, softcap, inverse_temperature, HAS_SOFTCAP)
            gradient = tl.exp(z - maximum[:, None]) * inverse_total[:, None]
            is_target = column == target[:, None]
            if HAS_SMOOTHING:
                gradient -= tl.where(is_target, 1.0 - label_smoothing, 0.0) + label_smoothing / vocabulary
            else:
                gradient -= tl.where(is_target, 1.0, 0.0)
            gradient = tl.where(in_range[:, None], gradient * slope, float("nan"))
            tl.store(logits + row_offset[:, None] + column, gradient.to(logits.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["row_count", "statistic_stride"],
    do_not_specialize_on_alignment=["targets", "statistics", "grad_log_probs", "grad_entropy"],
)
def _cross_entropy_backward_kernel(
    gradients,
    gradient_stride,
    logits,
    row_stride,
    targets,
    statistics,
    statistic_stride,
    grad_log_probs,
    grad_entropy,
    row_count,
    vocabulary,
    logit_scale,
    softcap,
    inverse_temperature,
    label_smoothing,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_LOG_PROBS: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: one block of columns of ROWS rows, logits to gradient; `gradients` may be `logits`."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    row_mask = rows < row_count
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    mask = row_mask[:, None] & (column < vocabulary)
    pointers = logits + rows.to(tl.int64)[:, None] * row_stride + column
    x = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    z, slope = _transform(x, logit_scale, softcap, inverse_temperature, HAS_SOFTCAP)
    centred = z - tl.load(statistics + statistic_stride + rows, mask=row_mask, other=0.0)[:, None]
    log_sum = tl.load(statistics + 2 * statistic_stride + rows, mask=row_mask, other=0.0)
    p = tl.exp(centred) * tl.exp(-log_sum)[:, None]
    gradient = tl.zeros([ROWS, BLOCK], tl.float32)
    if HAS_LOG_PROBS:
        target = tl.load(targets + rows, mask=row_mask, other=0)
        in_range = (target >= 0) & (target < vocabulary)
        grad_row = tl.load(grad_log_probs + rows, mask=row_mask, other=0.0)
        grad_row = tl.where(in_range, grad_row, float("nan"))
        is_target = column == target[:, None]
        if HAS_SMOOTHING:
            label = tl.where(is_target, 1.0 - label_smoothing, 0.0) + label_smoothing / vocabulary
        else:
            label = tl.where(is_target, 1.0, 0.0)
        gradient += grad_row[:, None] * (label - p)
    if HAS_ENTROPY:
        grad_row = tl.load(grad_entropy + rows, mask=row_mask, other=0.0)
        # log p + entropy = (z − m) + (entropy − log s)
        offset = tl.load(statistics + 3 * statistic_stride + rows, mask=row_mask, other=0.0) - log_sum
        centred = tl.maximum(centred, -3.0e38)  # 0 · (−inf) is 0 here
        gradient -= grad_row[:, None] * (p * (centred + offset[:, None]))
    target_pointers = gradients + rows.to(tl.int64)[:, None] * gradient_stride + column
    tl.store(target_pointers, (gradient * slope).to(gradients.dtype.element_ty), mask=mask)


def _launch_settings(vocabulary: int) -> tuple[int, int, int]:
    """(rows per program, columns per block, warps). The interpreter pays per program: there one takes 16 rows."""
    if interpreting():
        return 16, min(1024, next_power_of_2(vocabulary)), 4
    block = min(4096, max(128, next_power_of_2(vocabulary)))
    return 1, block, max(1, block // 512)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    label_smoothing: float = 0.0,
    write_gradient: bool = True,
    outputs: tuple[str, ...] = (),
    out: Tensor | None = None,
) -> CrossEntropyRows:
    """Per-row cross-entropy; with `write_gradient`, `logits` is overwritten with d loss_row / d logits.

    Args:
        logits: [rows, vocabulary], 16-, 32- or 64-bit float, last dimension contiguous, any row stride. Overwritten.
        targets: [rows] int64. One outside [0, vocabulary) makes its row NaN.
        logit_scale: the raw logits are multiplied by this first.
        softcap: then z = softcap · tanh(z / softcap); None for none.
        temperature: then divided by this.
        label_smoothing: ε of the module's formulas.
        write_gradient: False leaves `logits` untouched; the statistics are bit-equal either way.
        outputs: which of `OPTIONAL_OUTPUTS` to compute.
        out: [7, rows] float32 (float64 for float64 logits), last dimension contiguous: receives the `STATISTICS`, so
            that chunks can fill slices of one tensor. What is not asked for is left as it is.

    Returns:
        `CrossEntropyRows`, views of `out` (but `is_top1`).
    """
    if not uses_triton(logits):
        return cross_entropy_torch(
            logits,
            targets,
            logit_scale=logit_scale,
            softcap=softcap,
            temperature=temperature,
            label_smoothing=label_smoothing,
            write_gradient=write_gradient,
            outputs=outputs,
            out=out,
        )
    row_count, vocabulary = logits.shape
    statistics = _statistics(logits) if out is None else out
    rows, block, warps = _launch_settings(vocabulary)
    if row_count:
        with launch_on(logits):
            _cross_entropy_kernel[(cdiv(row_count, rows),)](
                logits,
                logits.stride(0),
                targets.contiguous(),
                statistics,
                statistics.stride(0),
                row_count,
                vocabulary,
                float(logit_scale),
                float(softcap or 1.0),
                1.0 / temperature,
                float(label_smoothing),
                HAS_SOFTCAP=softcap is not None,
                HAS_SMOOTHING=label_smoothing != 0.0,
                WRITE_GRADIENT=write_gradient,
                ENTROPY="entropy" in outputs,
                IS_TOP1="is_top1" in outputs,
                LOG_SUM_SQ_PROBS="log_sum_sq_probs" in outputs,
                MEAN_LOGITS="mean_logits" in outputs,
                ROWS=rows,
                BLOCK=block,
                num_warps=warps,
            )
    return named_rows(statistics, outputs)


def cross_entropy_backward(
    logits: Tensor,
    targets: Tensor,
    statistics: Tensor,
    *,
    grad_log_probs: Tensor | None = None,
    grad_entropy: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    label_smoothing: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Overwrites recomputed `logits` [rows, vocabulary] with the gradient given by the per-row incoming gradients.

    With `out` the logits are left as they are: one read, one write, no copy made first.

    Args:
        logits: as in `cross_entropy`. Overwritten and returned, unless there is an `out`.
        targets: [rows] int64.
        statistics: [7, rows], what `cross_entropy` wrote into its `out`; the entropy is needed with `grad_entropy`.
        grad_log_probs: [rows], gradient of the (smoothed) log-probability, which is −loss; None for none.
        grad_entropy: [rows], gradient of the entropy; None for none.
        logit_scale, softcap, temperature, label_smoothing: as in `cross_entropy`.
        out: [rows, vocabulary] like `logits`, any row stride; receives the gradient and is returned.
    """
    if not uses_triton(logits):
        return cross_entropy_backward_torch(
            logits,
            targets,
            statistics,
            grad_log_probs=grad_log_probs,
            grad_entropy=grad_entropy,
            logit_scale=logit_scale,
            softcap=softcap,
            temperature=temperature,
            label_smoothing=label_smoothing,
            out=out,
        )
    gradients = logits if out is None else out
    row_count, vocabulary = logits.shape
    rows, block, warps = _launch_settings(vocabulary)
    if row_count:
        unused = statistics  # fills the slots of the pointers that the flags switch off
        with launch_on(logits):
            _cross_entropy_backward_kernel[(cdiv(row_count, rows), cdiv(vocabulary, block))](
                gradients,
                gradients.stride(0),
                logits,
                logits.stride(0),
                targets.contiguous(),
                statistics,
                statistics.stride(0),
                unused if grad_log_probs is None else grad_log_probs.contiguous(),
                unused if grad_entropy is None else grad_entropy.contiguous(),
                row_count,
                vocabulary,
                float(logit_scale),
                float(softcap or 1.0),
                1.0 / temperature,
                float(label_smoothing),
                HAS_SOFTCAP=softcap is not None,
                HAS_SMOOTHING=label_smoothing != 0.0,
                HAS_LOG_PROBS=grad_log_probs is not None,
                HAS_ENTROPY=grad_entropy is not None,
                ROWS=rows,
                BLOCK=block,
                num_warps=warps,
            )
    return gradients


def cross_entropy_torch(
    logits: Tensor,
    targets: Tensor,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    label_smoothing: float = 0.0,
    write_gradient: bool = True,
    outputs: tuple[str, ...] = (),
    out: Tensor | None = None,
) -> CrossEntropyRows:
    """Plain-torch twin of `cross_entropy`: same arguments, same formulas, any device; float64 stays float64."""
    row_count, vocabulary = logits.shape
    statistics = _statistics(logits) if out is None else out
    step = max(1, _TWIN_BLOCK_ELEMENTS // vocabulary)
    for start in range(0, row_count, step):
        block = logits[start : start + step]  # [step, V], a view: the gradient is written through it
        target = targets[start : start + step]
        values = statistics[:, start : start + step]
        in_range = (target >= 0) & (target < vocabulary)
        index = target.clamp(0, vocabulary - 1).unsqueeze(1)  # [step, 1]
        z, slope = _transform_torch(block.to(statistics.dtype), logit_scale, softcap, temperature)
        target_z = z.gather(1, index).squeeze(1).masked_fill(~in_range, float("nan"))
        maximum = z.amax(1)
        if "is_top1" in outputs:
            values[4] = z.argmax(1) == target  # argmax returns the first of equal maxima
        mean_z = z.mean(1) if "mean_logits" in outputs or label_smoothing else maximum  # read only if asked for
        centred = z - maximum.unsqueeze(1)
        exp = centred.exp()
        total = exp.sum(1)
        log_sum = total.log()
        loss = (maximum - target_z) + log_sum
        if label_smoothing:
            loss = (1.0 - label_smoothing) * loss + label_smoothing * ((maximum - mean_z) + log_sum)
        values[0] = loss
        values[1] = maximum
        values[2] = log_sum
        if "entropy" in outputs:
            # clamped: 0 · (−inf) is 0 here
            values[3] = log_sum - centred.clamp_(min=_LOWEST).mul_(exp).sum(1) / total
        if "log_sum_sq_probs" in outputs:
            values[5] = exp.square().sum(1).log() - 2.0 * log_sum
        if "mean_logits" in outputs:
            values[6] = mean_z
        if write_gradient:
            gradient = exp.div_(total.masked_fill(~in_range, float("nan")).unsqueeze(1))
            _subtract_labels(gradient, index, label_smoothing)
            block.copy_(gradient if slope is None else gradient.mul_(slope))
    return named_rows(statistics, outputs)


def cross_entropy_backward_torch(
    logits: Tensor,
    targets: Tensor,
    statistics: Tensor,
    *,
    grad_log_probs: Tensor | None = None,
    grad_entropy: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    label_smoothing: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Plain-torch twin of `cross_entropy_backward`."""
    gradients = logits if out is None else out
    row_count, vocabulary = logits.shape
    step = max(1, _TWIN_BLOCK_ELEMENTS // vocabulary)
    for start in range(0, row_count, step):
        rows = slice(start, start + step)
        block = logits[rows]
        z, slope = _transform_torch(block.to(statistics.dtype), logit_scale, softcap, temperature)
        _, maximum, log_sum, entropy, *_ = statistics[:, rows].unsqueeze(2)  # [step, 1] each
        centred = z - maximum
        p = centred.exp().mul_(log_sum.neg().exp())
        gradient = torch.zeros_like(p)
        if grad_entropy is not None:
            # log p + entropy = (z − m) + (entropy − log s); clamped: 0 · (−inf) is 0 here
            centred.clamp_(min=_LOWEST).add_(entropy - log_sum)
            gradient -= centred.mul_(p).mul_(grad_entropy[rows].unsqueeze(1))
        if grad_log_probs is not None:
            target = targets[rows]
            in_range = (target >= 0) & (target < vocabulary)
            _subtract_labels(p, target.clamp(0, vocabulary - 1).unsqueeze(1), label_smoothing)
            gradient -= p.mul_(grad_log_probs[rows].masked_fill(~in_range, float("nan")).unsqueeze(1))
        gradients[rows].copy_(gradient if slope is None else gradient.mul_(slope))
    return gradients


def _transform_torch(
    x: Tensor, logit_scale: float, softcap: float | None, temperature: float
) -> tuple[Tensor, Tensor | float | None]:
    """Raw logits to z and dz/dx; x itself and None where nothing is to be done."""
    slope = logit_scale / temperature
    if softcap is not None:
        tanh = torch.tanh(x * (logit_scale / softcap))
        return tanh * (softcap / temperature), (1.0 - tanh.square()) * slope
    return (x, None) if slope == 1.0 else (x * slope, slope)


def _subtract_labels(p: Tensor, index: Tensor, label_smoothing: float) -> None:
    """p − y in place; `index` [rows, 1]."""
    p.scatter_(1, index, p.gather(1, index) - (1.0 - label_smoothing))
    if label_smoothing:
        p.sub_(label_smoothing / p.shape[1])


def _statistics(logits: Tensor) -> Tensor:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return torch.empty((len(STATISTICS), logits.shape[0]), dtype=dtype, device=logits.device)


def named_rows(statistics: Tensor, outputs: tuple[str, ...]) -> CrossEntropyRows:
    """A statistics tensor [7, rows] by names: views, but `is_top1`; None for what is not in `outputs`."""
    optional = {name: statistics[STATISTICS.index(name)] if name in outputs else None for name in OPTIONAL_OUTPUTS}
    is_top1 = optional["is_top1"]
    optional["is_top1"] = None if is_top1 is None else is_top1.bool()
    return CrossEntropyRows(*statistics[:3], **optional)
