"""litgpt's own modules on our functions: its RMSNorm, its SwiGLU, its rotation, and its grouped queries.

litgpt writes the first three out in torch operations. Thunder would see `pow`, `mean`, `mul`; an executor can only
claim what has a name (`apply_rope` has one, and is claimed as it is). So two forwards are exchanged for ones that call
`fastft.functional`, on the classes (litgpt builds its models from them), and the rotation for one that runs our
operator in eager torch and under `torch.compile` too. Keys and values of grouped queries it repeats for each query's
head, eight times what was projected in TinyLlama's shape; torch's attention takes them as they are (`enable_gqa`), and
so does ours. All of this for the duration of a context, or until `restore()`.
"""

from __future__ import annotations

import math
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F

from fastft import functional
from fastft.integrations.thunder.attention import gpu_reason
from fastft.integrations.thunder.executor import executor
from fastft.integrations.thunder.rope import rope_one
from fastft.operators.rope import rope_one_op

__all__ = ["LitgptPatch", "patch_litgpt"]


def _norm_forward(self: Any, x: Any) -> Any:
    """`litgpt.model.RMSNorm.forward`; it normalizes the last dimension in every model litgpt has."""
    return functional.rms_norm(x, self.weight, self.eps, "gemma" if self.add_unit_offset else "fp32")


def _mlp_forward(self: Any, x: Any) -> Any:
    """`litgpt.model.LLaMAMLP.forward`, its LoRA version's too: that inherits it."""
    return self.proj(functional.swiglu(self.fc_1(x), self.fc_2(x)))


def _rotate(x: Any, cos: Any, sin: Any) -> Any:
    """`litgpt.model.apply_rope`, by the operator where heads are [B, heads, T, R], else as litgpt has it."""
    fits = x.dim() == 4 and cos.dim() == 3 and cos.shape[0] in (1, x.shape[0]) and cos.shape[1:] == x.shape[2:]
    if not fits or cos.shape != sin.shape or x.shape[-1] % 2:
        return _ORIGINALS["apply_rope"](x, cos, sin)
    return rope_one_op(x, cos, sin, False)


def _unrepeated(query: Any) -> bool:
    """Whether torch's attention takes grouped queries by a fused kernel; else it writes out every score."""
    return not query.is_cuda or gpu_reason(query.dtype, query.shape[-1], query.device.index) is None


executor.substitute(_unrepeated, lambda query: True)  # our claim sees to it


def _attention_forward(
    self: Any, x: Any, cos: Any, sin: Any, mask: Any = None, input_pos: Any = None, *rest: Any, **options: Any
) -> Any:
    """`litgpt.model.CausalSelfAttention.forward` where it would repeat keys and values; else litgpt's own."""
    import litgpt.model

    config = self.config
    if (
        mask is not None
        or input_pos is not None  # of generation with a cache
        or config.n_query_groups == config.n_head
        or config.attention_logit_softcapping is not None
        or self.apply_sliding_window_attention
        or getattr(self.scaled_dot_product_attention, "__func__", None)
        is not _ORIGINALS["scaled_dot_product_attention"]
    ):
        return _ORIGINALS["attention"](self, x, cos, sin, mask, input_pos, *rest, **options)
    batch, length, _ = x.size()
    sizes = [heads * config.head_size for heads in (config.n_head, config.n_query_groups, config.n_query_groups)]
    q, k, v = self.qkv(x).split(sizes, dim=-1)
    if config.norm_qk and config.norm_qk_type == "olmo2":
        q, k = self.norm_q(q), self.norm_k(k)
    q, k, v = (part.view(batch, length, -1, config.head_size).transpose(1, 2) for part in (q, k, v))
    if config.norm_qk and config.norm_qk_type == "default":
        q, k = self.norm_q(q), self.norm_k(k)
    rotate = litgpt.model.apply_rope_interleave if config.rope_interleave else litgpt.model.apply_rope
    turned = config.rope_n_elem
    q, k = (torch.cat((rotate(x[..., :turned], cos, sin), x[..., turned:]), dim=-1) for x in (q, k))
    scale = self.mscale * self.mscale / math.sqrt(config.attention_scores_scalar or config.head_size)
    grouped = _unrepeated(q)
    if not grouped:
        k, v = (part.repeat_interleave(config.n_head // config.n_query_groups, dim=1) for part in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return self.proj(y.transpose(1, 2).reshape(batch, length, -1))


_ORIGINALS: dict[str, Any] = {}  # litgpt's own functions, filled in when litgpt is first imported here
_in_force: list[LitgptPatch] = []


def _is_litgpts(function: Any) -> bool:
    """Whether it is the function that litgpt defines, and not somebody's in its place."""
    return getattr(function, "__module__", None) == "litgpt.model" and not hasattr(function, "__wrapped__")


def _holder(owner: Any, name: str) -> Any:
    """Whose own `name` is: `owner`'s, or a class's that it inherits it from."""
    return next((base for base in getattr(owner, "__mro__", ()) if name in vars(base)), owner)


class LitgptPatch:
    """The exchange, in force from the moment it is made; leaving it as a context or `restore()` ends it."""

    def __init__(self) -> None:
        import litgpt.model

        if litgpt.model.apply_rope is not _rotate:
            _ORIGINALS["apply_rope"] = litgpt.model.apply_rope
        executor.substitute((_ORIGINALS["apply_rope"], _rotate), rope_one)
        wanted = [
            (litgpt.model.RMSNorm, "forward", _norm_forward),
            (litgpt.model.LLaMAMLP, "forward", _mlp_forward),
            (litgpt.model, "apply_rope", _rotate),
        ]
        attention = litgpt.model.CausalSelfAttention
        own = attention.forward, attention.scaled_dot_product_attention
        if all(map(_is_litgpts, own)):  # a forward of ours has no part that somebody exchanged
            _ORIGINALS["attention"], _ORIGINALS["scaled_dot_product_attention"] = own
            wanted.append((attention, "forward", _attention_forward))
        self._originals: list[tuple[Any, str, Any, Any]] = []
        for owner, name, replacement in wanted:
            holder = _holder(owner, name)
            if vars(holder)[name] is not replacement:  # nested: the outer one restores
                self._originals.append((holder, name, vars(holder)[name], replacement))
                setattr(holder, name, replacement)
        _in_force.append(self)

    def restore(self) -> None:
        """Put litgpt's own methods back, unless somebody has replaced ours since; with the last that is in force."""
        if self not in _in_force:
            return
        place = _in_force.index(self)
        _in_force.remove(self)
        if later := _in_force[place:]:  # made within this one, and not left yet
            later[0]._originals.extend(self._originals)
            return
        for owner, name, original, replacement in self._originals:
            if vars(owner)[name] is replacement:
                setattr(owner, name, original)

    def __enter__(self) -> LitgptPatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()


def patch_litgpt() -> LitgptPatch:
    """Have litgpt's RMSNorm, LLaMAMLP and apply_rope run on fastft: in Thunder, under `torch.compile`, in eager torch.

    CausalSelfAttention, where queries are grouped, hands its keys and values to torch's attention unrepeated.

    Models that exist and models built later are both concerned. Tracing happens at a jitted model's first call, which
    has to lie inside the context; and then the list of executors has to hold "fastft", because Thunder alone knows
    nothing of the functions that are called.

    Returns:
        A context manager; `with patch_litgpt(): …` or `.restore()` ends the exchange.

    Raises:
        ImportError: where litgpt is not installed.
    """
    return LitgptPatch()
