"""`fastft.verify(model, batch)`: stock against fast on one's own model and batch, loss and every trainable gradient.

The same model runs twice, once inside `stock_only()` and once as planned; with `reference=torch.float64` a dense copy
in that dtype runs a third time and both are measured against it. The verdict is the library's numbers contract:

    per trainable tensor  ‖g − g_ref‖ / ‖g_ref‖  ≤  max(1.5 × stock's, 2 ulp of the compute dtype)

Without a reference, fast and stock are compared with each other, and each may be off by its own rounding: the
tolerance is then a fixed relative difference per dtype. A gradient that is zero proves nothing, so it fails: LoRA
starts with B = 0, which makes every A gradient zero; such B are filled with small random numbers for the comparison
and put back. The tests on a real model call it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastft.kernels.rms_norm import NormMode, rms_norm_torch
from fastft.loading.adapter import seeded
from fastft.patching import bitsandbytes, causal_lm, documents, registry
from fastft.patching.families import FAMILIES
from fastft.patching.plan import inner_model, unplan

# Relative difference of two runs that each round in this dtype, measured on tiny and real models and doubled.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}


@dataclass(frozen=True, slots=True)
class TensorCheck:
    """One trainable tensor.

    Args:
        name: its name in the model.
        difference: ‖fast − stock‖ / ‖stock‖.
        fast_error: ‖fast − reference‖ / ‖reference‖, or None without a reference.
        stock_error: the same of stock.
        passed: within the contract.
        why: what is wrong, or "".
    """

    name: str
    difference: float
    fast_error: float | None
    stock_error: float | None
    passed: bool
    why: str


@dataclass(frozen=True, slots=True)
class Verification:
    """The outcome; `print` it for the table, `passed` is the verdict.

    Args:
        fast_loss: loss of the planned run.
        stock_loss: loss of the stock run.
        reference_loss: loss of the reference run, or None.
        fast_grad_norm: norm over all trainable gradients, planned run.
        stock_grad_norm: the same, stock run.
        dtype: dtype the products ran in.
        tensors: one check per trainable tensor.
    """

    fast_loss: float
    stock_loss: float
    reference_loss: float | None
    fast_grad_norm: float
    stock_grad_norm: float
    dtype: torch.dtype
    tensors: tuple[TensorCheck, ...]

    @property
    def loss_difference(self) -> float:
        """|fast − stock| / |stock| of the loss."""
        return abs(self.fast_loss - self.stock_loss) / max(abs(self.stock_loss), 1e-12)

    @property
    def grad_norm_difference(self) -> float:
        """|fast − stock| / stock of the gradient norm."""
        return abs(self.fast_grad_norm - self.stock_grad_norm) / max(self.stock_grad_norm, 1e-12)

    @property
    def passed(self) -> bool:
        """Whether loss and gradient norm are within `TOLERANCE` of stock's, and every tensor passed its check."""
        limit = TOLERANCE[self.dtype]
        whole = self.loss_difference <= limit and self.grad_norm_difference <= limit
        return whole and bool(self.tensors) and all(t.passed for t in self.tensors)

    def failures(self) -> list[TensorCheck]:
        """The tensors outside the contract."""
        return [t for t in self.tensors if not t.passed]

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        verdict = "PASSED" if self.passed else "FAILED"
        table = Table(
            title=f"fastft verify: {verdict} ({str(self.dtype).removeprefix('torch.')})", title_justify="left"
        )
        for heading in ("site", "tensors", "worst fast−stock", "worst fast error", "its stock error", "verdict"):
            table.add_column(heading, overflow="fold")
        table.add_row(
            "loss", "1", f"{self.loss_difference:.2e}", "", "", f"{self.fast_loss:.6f} / {self.stock_loss:.6f}"
        )
        norms = f"{self.fast_grad_norm:.6f} / {self.stock_grad_norm:.6f}"
        table.add_row("gradient norm", "1", f"{self.grad_norm_difference:.2e}", "", "", norms)
        for site, checks in self._by_site().items():
            worst = max(checks, key=lambda c: c.difference)
            worst_error = max(checks, key=lambda c: c.fast_error or 0.0)
            bad = [c for c in checks if not c.passed]
            table.add_row(
                site,
                str(len(checks)),
                f"{worst.difference:.2e}",
                "" if worst_error.fast_error is None else f"{worst_error.fast_error:.2e}",
                "" if worst_error.stock_error is None else f"{worst_error.stock_error:.2e}",
                "ok" if not bad else f"{bad[0].name}: {bad[0].why}",
            )
        buffer = io.StringIO()
        Console(file=buffer, width=118, color_system=None).print(table)
        return buffer.getvalue()

    def _by_site(self) -> dict[str, list[TensorCheck]]:
        sites: dict[str, list[TensorCheck]] = {}
        for check in self.tensors:
            pieces = ["*" if piece.isdigit() else piece for piece in check.name.split(".")]
            site = ".".join(p for p in pieces if p not in ("base_model", "model", "default", "weight"))
            sites.setdefault(site, []).append(check)
        return sites


def verify(
    model: Any,
    batch: Mapping[str, Any],
    *,
    reference: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    seed: int = 0,
) -> Verification:
    """Run `model` stock and fast on `batch` and compare the loss and the gradient of every trainable tensor.

    Nothing stays changed: gradients, training mode, adapters and random generators are as before; `report` counts
    the runs.

    Args:
        model: a planned transformers or PEFT model with something to train.
        batch: keywords of the model call, with `labels`; tensors on the model's device. Stock lets packed documents
            attend to each other, and learn each other's first token, unless all is said just so; here it is.
        reference: also run a dense copy in this dtype (`torch.float64`; needs that much memory), and measure both
            against it.
        autocast: run both under autocast in this dtype, as Trainer does with `bf16=True`.
        seed: seeds the random B matrices (of adapters that are still at zero) and dropout; but `lora_dropout` is off
            here, because stock draws other masks.

    Returns:
        A `Verification`.

    Raises:
        ValueError: if the model is not planned, nothing trains, or the batch has no labels.
    """
    inner = inner_model(model)
    if registry.site_of(inner) is None:
        raise ValueError("fastft.verify: this model is not planned; call fastft.patch(model) first.")
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise ValueError("fastft.verify: nothing in this model trains (every parameter has requires_grad=False).")
    if batch.get("labels") is None:
        raise ValueError("fastft.verify: the batch has no labels; without them there is no loss to compare.")
    batch = documents.spelled_out(dict(batch))
    with _prepared(model, trainable, seed):
        fast = _run(model, batch, trainable, autocast, seed)
        with registry.stock_only():
            stock = _run(model, batch, trainable, autocast, seed)
        precise = None
        if reference is not None:
            dense = dense_copy(model, reference)
            parameters = {n: p for n, p in dense.named_parameters() if n in trainable}
            precise = _run(dense, batch, parameters, None, seed, loss_of=precise_loss)
    first = next(p for p in model.parameters() if p.is_floating_point())
    return compare(fast, stock, precise, autocast or first.dtype)


Run = tuple[float, dict[str, Tensor | None]]


def compare(fast: Run, stock: Run, precise: Run | None, dtype: torch.dtype) -> Verification:
    """The contract over two or three runs, each (loss, gradient by name)."""
    checks = []
    for name, stock_grad in stock[1].items():
        true = None if precise is None else precise[1].get(name)
        checks.append(_check(name, fast[1].get(name), stock_grad, true, dtype))
    return Verification(
        fast[0],
        stock[0],
        None if precise is None else precise[0],
        _norm(fast[1]),
        _norm(stock[1]),
        dtype,
        tuple(checks),
    )


def _check(
    name: str, fast: Tensor | None, stock: Tensor | None, true: Tensor | None, dtype: torch.dtype
) -> TensorCheck:
    if fast is None or stock is None:
        same = fast is None and stock is None
        why = "no gradient in either run" if same else f"no gradient in the {'fast' if fast is None else 'stock'} run"
        return TensorCheck(name, float("inf"), None, None, False, why)
    if not bool(stock.any()):
        return TensorCheck(name, 0.0, None, None, False, "the gradient is zero: it proves nothing")
    difference = relative_error(fast, stock)
    if true is None:
        passed = difference <= TOLERANCE[dtype]
        return TensorCheck(name, difference, None, None, passed, "" if passed else f"differs by {difference:.1e}")
    fast_error, stock_error = relative_error(fast, true), relative_error(stock, true)
    limit = max(1.5 * stock_error, 2 * torch.finfo(dtype).eps)
    passed = fast_error <= limit
    return TensorCheck(
        name, difference, fast_error, stock_error, passed, "" if passed else f"error {fast_error:.1e} > {limit:.1e}"
    )


def relative_error(value: Tensor, reference: Tensor) -> float:
    """‖value − reference‖ / ‖reference‖ in float64; NaN counts as infinite."""
    a, b = value.double(), reference.double().to(value.device)
    error = float((a - b).norm() / b.norm().clamp(min=1e-300))
    return error if error == error else float("inf")


def _norm(grads: Mapping[str, Tensor | None]) -> float:
    return (
        float(torch.stack([g.double().norm().cpu() for g in grads.values() if g is not None]).norm()) if grads else 0.0
    )


def _model_loss(model: Any, batch: Mapping[str, Any]) -> Tensor:
    return model(**batch).loss


def precise_loss(model: Any, batch: Mapping[str, Any]) -> Tensor:
    """The causal-LM loss in the logits' own dtype: transformers casts them to float32 first, whatever they are."""
    targets = causal_lm.shifted_labels(dict(batch)).reshape(-1)
    loss_only = ("labels", "shift_labels", "num_items_in_batch")
    logits = model(**{name: value for name, value in batch.items() if name not in loss_only}).logits
    logits = logits.reshape(-1, logits.shape[-1])
    count = batch.get("num_items_in_batch")
    if count is None:
        return nn.functional.cross_entropy(logits, targets, ignore_index=causal_lm.IGNORE_INDEX)
    total = nn.functional.cross_entropy(logits, targets, ignore_index=causal_lm.IGNORE_INDEX, reduction="sum")
    return total / count


def _run(
    model: Any,
    batch: Mapping[str, Any],
    parameters: Mapping[str, Tensor],
    autocast: Any,
    seed: int,
    loss_of: Callable[[Any, Mapping[str, Any]], Tensor] = _model_loss,
) -> Run:
    """Loss and gradients of one forward and backward, without touching `.grad`."""
    device = next(iter(parameters.values())).device
    cast = torch.autocast(device.type, autocast) if autocast is not None else contextlib.nullcontext()
    with seeded(model, seed):
        with cast:
            loss = loss_of(model, {"use_cache": False, **batch})
        grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return float(loss), dict(zip(parameters, grads, strict=True))


@contextlib.contextmanager
def _prepared(model: nn.Module, trainable: Mapping[str, nn.Parameter], seed: int) -> Iterator[None]:
    """Training mode less `lora_dropout`, and adapters whose B is zero filled with small numbers; all put back."""
    modes = {module: module.training for module in model.modules()}
    zero = {n: p for n, p in trainable.items() if "lora_B" in n and not bool(p.any())}
    generator = torch.Generator().manual_seed(seed)
    try:
        model.train()
        for name, module in model.named_modules():
            if "lora_dropout" in name.split("."):
                module.training = False
        with torch.no_grad():
            for parameter in zero.values():
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
        yield
    finally:
        with torch.no_grad():
            for parameter in zero.values():
                parameter.zero_()
        for module, mode in modes.items():
            module.training = mode


def dense_copy(model: Any, dtype: torch.dtype) -> Any:
    """An unplanned deep copy in `dtype`: 4-bit layers are dense layers of the dequantized weights.

    Its norms compute in `dtype` too: transformers' own compute in float32, which would tie the reference to stock's.
    """
    twin = copy.deepcopy(model)
    for module in twin.modules():
        site = registry.site_of(module)
        if site is not None and site.part == "norm":
            mode = FAMILIES[site.model_type].norm_mode
            module.forward = functools.partial(_norm_in_own_dtype, module, mode)
    unplan(twin)
    for module in list(twin.modules()):
        for name, child in list(module.named_children()):
            if bitsandbytes.is_linear4bit(child):
                setattr(module, name, _dense_linear(child, dtype))
    return twin.to(dtype)


def _norm_in_own_dtype(module: Any, mode: NormMode, x: Tensor) -> Tensor:
    return rms_norm_torch(x, module.weight, module.variance_epsilon, mode=mode)[0]


def _dense_linear(layer: Any, dtype: torch.dtype) -> nn.Linear:
    weight = bitsandbytes.dense_weight(layer, layer.weight.quant_state.dtype).to(dtype)
    dense = nn.utils.skip_init(
        nn.Linear, weight.shape[1], weight.shape[0], bias=layer.bias is not None, device=weight.device, dtype=dtype
    )
    with torch.no_grad():
        dense.weight.copy_(weight)
        if layer.bias is not None:
            dense.bias.copy_(layer.bias)
    return dense.requires_grad_(False)
