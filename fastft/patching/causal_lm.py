"""The causal language model's forward: with labels, a loss that never builds the logits.

    loss = Σ over counted tokens of −log p(label) / count          count: num_items_in_batch, else the counted tokens

No labels: the saved original, real logits. Training with labels: `logits=None`. Evaluation with labels: logits are
there when somebody reads them (`LazyLogits`), and not built when nobody does (accelerate's mixed precision does: it
converts every output to float32, read or not). A batch without a counted token gives 0, joined to the graph; stock
gives NaN. In padding-free packed rows (position_ids, no mask) the first token of a document is not a target: it cannot
be predicted from another document.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from fastft.autograd.autocast import AutocastState, suspended
from fastft.autograd.linear_cross_entropy import EMPTY_BATCH, linear_cross_entropy
from fastft.patching import documents, registry
from fastft.patching.approximations import skip_arguments
from fastft.patching.families import Family
from fastft.patching.peft import hooked

IGNORE_INDEX = -100
CONSUMED = ("labels", "shift_labels", "num_items_in_batch", "return_logits", "return_dict", "logits_to_keep")
_UNREAD = torch.empty(0)


@dataclass
class LazyLogits(CausalLMOutputWithPast):
    """A causal-LM output whose logits are computed when first read: as attribute, key, item, value or tuple element.

    They are computed as the forward would have: in its grad mode and under its autocast, whatever these are by then.
    """

    @classmethod
    def defer(cls, compute: Callable[[], Tensor], **fields: Any) -> LazyLogits:
        """An output with `fields` whose logits will be `compute()`; the key order is stock's."""
        loss = fields.pop("loss")
        output = cls(loss=loss, logits=_UNREAD, **fields)
        output.__dict__["_pending"] = compute
        return output

    def _materialize(self) -> None:
        pending = self.__dict__.pop("_pending", None)
        if pending is not None:
            self.logits = pending()

    def __getattribute__(self, name: str) -> Any:
        if name == "logits":
            self._materialize()
        return super().__getattribute__(name)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            if key == "logits":
                self._materialize()
            return dict(super().items())[key]
        names = list(self.keys())[key]  # the loss alone, by its place, builds nothing
        return self[names] if isinstance(names, str) else tuple(self[name] for name in names)

    def items(self) -> Any:
        self._materialize()
        return super().items()

    def values(self) -> Any:
        self._materialize()
        return super().values()

    def get(self, key: Any, default: Any = None) -> Any:
        self._materialize()
        return super().get(key, default)


def causal_lm_forward(self: Any, family: Family, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`ForCausalLM.forward` with our loss."""
    site = self.__dict__[registry.PLAN]
    kwargs.update(zip(positional_names(original), args, strict=False))
    reason = None
    if kwargs.get("labels") is not None:
        reason = _stock_reason(self, site, kwargs)
        if reason is None:
            site.ran_fast()
            with _padding_kept(self) if kwargs.get("return_logits") else contextlib.nullcontext():
                return _forward(self, site, kwargs)
        site.ran_stock(reason)
    kwargs.pop("return_logits", None)
    with _padding_kept(self):
        return original(self, **kwargs)


@contextlib.contextmanager
def _padding_kept(model: Any) -> Iterator[None]:
    """The backbone runs padding inside: who reads logits may read those of pads (ORPO logs the mean of them all)."""
    site = registry.site_of(getattr(model, model.base_model_prefix))
    if site is None:
        yield
        return
    wanted, site.padding_free = site.padding_free, False
    try:
        yield
    finally:
        site.padding_free = wanted


@functools.cache
def positional_names(original: Callable[..., Any]) -> tuple[str, ...]:
    parameters = inspect.signature(original).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)[1:]


def _stock_reason(model: Any, site: registry.Site, kwargs: dict[str, Any]) -> str | None:
    """Why this call's loss cannot be ours, or None."""
    if registry.runs_stock_only():
        return registry.DISABLED
    if site.reason is not None:
        return site.reason
    keep = kwargs.get("logits_to_keep")
    if isinstance(keep, Tensor) or keep:
        return "logits_to_keep with labels"
    if model.__dict__.get("_loss_function") is not None or getattr(model, "loss_type", None) != "ForCausalLM":
        return "the model has its own loss function"
    return head_reason(model.get_output_embeddings())


def head_reason(head: Any) -> str | None:
    """Why the output embedding is not the plain linear layer that the loss multiplies with, or None."""
    layer = trained_copy(head)
    if type(layer) is not nn.Linear:
        return f"lm_head is {type(layer).__module__}.{type(layer).__qualname__}, not a plain linear layer"
    if hooked(layer.__dict__) or hooked(head.__dict__):
        return "lm_head has a hook or its own forward"
    return None


def trained_copy(head: Any) -> Any:
    """The module that answers for the output embedding: of PEFT's `modules_to_save` the copy in use, else itself.

    Which copy that is, is the wrapper's own rule: the active adapter's, or the original with adapters switched off.
    """
    if type(head).__qualname__ != "ModulesToSaveWrapper" or type(head).__module__ != "peft.utils.other":
        return head
    active = list(head.active_adapters)
    if head.disable_adapters or any(name not in head.modules_to_save for name in active):
        return head.original_module
    return head.modules_to_save[active[0]] if active else head.original_module


def _forward(model: Any, site: registry.Site, kwargs: dict[str, Any]) -> Any:
    """Backbone, then loss over its hidden states."""
    return_dict = kwargs.get("return_dict")
    if return_dict is None:
        return_dict = getattr(model.config, "return_dict", True)
    backbone = getattr(model, model.base_model_prefix)
    outputs = backbone(**{k: v for k, v in kwargs.items() if k not in CONSUMED}, return_dict=True)
    hidden = outputs.last_hidden_state  # [batch, sequence, hidden]
    head = trained_copy(model.get_output_embeddings())
    loss = causal_lm_loss(hidden, head, kwargs, site)
    others = {k: v for k, v in outputs.items() if k != "last_hidden_state"}
    if kwargs.get("return_logits"):
        output = CausalLMOutputWithPast(loss=loss, logits=head(hidden), **others)
    elif model.training:
        output = CausalLMOutputWithPast(loss=loss, **others)
    else:
        output = LazyLogits.defer(_deferred_logits(head, hidden), loss=loss, **others)
    return output if return_dict else output.to_tuple()


def _deferred_logits(head: nn.Module, hidden: Tensor) -> Callable[[], Tensor]:
    """`head(hidden)` in the grad mode and the autocast state of now, for later."""
    grad_enabled, autocast = torch.is_grad_enabled(), AutocastState.current(hidden.device.type)

    def compute() -> Tensor:
        with torch.set_grad_enabled(grad_enabled), suspended(hidden.device.type), autocast.restored():
            return head(hidden)  # type: ignore[no-any-return]

    return compute


def causal_lm_loss(hidden: Tensor, head: nn.Module, kwargs: dict[str, Any], site: registry.Site) -> Tensor:
    """The loss, fp32 `[]`.

    Args:
        hidden: `[batch, sequence, hidden]`.
        head: the output embedding, a plain linear layer.
        kwargs: the model call's keywords: labels, shift_labels, num_items_in_batch, position_ids, attention_mask,
            cu_seq_lens_q.
        site: the loss's plan: counts batches without a counted label.

    Raises:
        ValueError: for a label outside the vocabulary.
    """
    targets = shifted_labels(kwargs).to(hidden.device)

    def count_empty() -> None:
        site.empty_batches += 1
        if site.empty_batches == 1:
            warnings.warn(EMPTY_BATCH, stacklevel=2)

    return linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]),
        head.weight,  # type: ignore[arg-type]
        targets.reshape(-1),
        bias=head.bias,  # type: ignore[arg-type]
        ignore_index=IGNORE_INDEX,
        reduction="mean",
        num_items_in_batch=kwargs.get("num_items_in_batch"),
        on_empty=count_empty,
        **skip_arguments(site),
    )


def shifted_labels(kwargs: dict[str, Any]) -> Tensor:
    """`[batch, sequence]`: the label of each position's next token; the last position has none.

    Explicit `shift_labels` are used as they are. In packed rows a document's first token is no target: the token before
    it is another document's (`cu_seq_lens_q` and `position_ids` both say where one begins). Where that token is a pad
    (left padding), stock counts the first token, and so do we.
    """
    shifted = kwargs.get("shift_labels")
    if shifted is not None:
        return shifted  # type: ignore[no-any-return]
    labels: Tensor = kwargs["labels"]
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    boundaries = kwargs.get("cu_seq_lens_q")
    if isinstance(boundaries, Tensor):
        starts = boundaries.flatten()[:-1].to(labels.device, torch.long)
        labels = labels.flatten().index_fill(0, starts, IGNORE_INDEX).view(labels.shape)
    two_dimensional = isinstance(mask, Tensor) and mask.shape == labels.shape
    if isinstance(positions, Tensor) and positions.shape[-1] == labels.shape[-1] and (mask is None or two_dimensional):
        starts = documents.first_tokens(positions, mask)
        labels = labels.masked_fill(starts.to(labels.device), IGNORE_INDEX)
    return nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORE_INDEX)
