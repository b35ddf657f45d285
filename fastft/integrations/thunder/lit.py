"""litgpt's own modules on our functions: its RMSNorm, its SwiGLU and its rotation.

litgpt writes these three out in torch operations. Thunder would see `pow`, `mean`, `mul`; an executor can only claim
what has a name (`apply_rope` has one, and is claimed as it is). So the two forwards are exchanged for ones that call
`fastft.functional`, on the classes (litgpt builds its models from them), and the rotation for one that runs our
operator in eager torch and under `torch.compile` too: for the duration of a context, or until `restore()`.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from fastft import functional
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


_ORIGINALS: dict[str, Any] = {}  # litgpt's own function, filled in when litgpt is first imported here


class LitgptPatch:
    """The exchange, in force from the moment it is made; leaving it as a context or `restore()` ends it."""

    def __init__(self) -> None:
        import litgpt.model

        if litgpt.model.apply_rope is not _rotate:
            _ORIGINALS["apply_rope"] = litgpt.model.apply_rope
        executor.substitute((_ORIGINALS["apply_rope"], _rotate), rope_one)
        wanted = (
            (litgpt.model.RMSNorm, "forward", _norm_forward),
            (litgpt.model.LLaMAMLP, "forward", _mlp_forward),
            (litgpt.model, "apply_rope", _rotate),
        )
        self._originals: list[tuple[Any, str, Any, Any]] = []
        for owner, name, replacement in wanted:
            if vars(owner)[name] is not replacement:  # nested: the outer one restores
                self._originals.append((owner, name, vars(owner)[name], replacement))
                setattr(owner, name, replacement)

    def restore(self) -> None:
        """Put litgpt's own methods back, unless somebody has replaced ours since."""
        for owner, name, original, replacement in self._originals:
            if vars(owner)[name] is replacement:
                setattr(owner, name, original)
        self._originals.clear()

    def __enter__(self) -> LitgptPatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()


def patch_litgpt() -> LitgptPatch:
    """Have litgpt's RMSNorm, LLaMAMLP and apply_rope run on fastft: in Thunder, under `torch.compile`, in eager torch.

    Models that exist and models built later are both concerned. Tracing happens at a jitted model's first call, which
    has to lie inside the context; and then the list of executors has to hold "fastft", because Thunder alone knows
    nothing of the functions that are called.

    Returns:
        A context manager; `with patch_litgpt(): …` or `.restore()` ends the exchange.

    Raises:
        ImportError: where litgpt is not installed.
    """
    return LitgptPatch()
