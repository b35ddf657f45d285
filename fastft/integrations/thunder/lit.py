"""litgpt's own modules on our functions: its RMSNorm, its SwiGLU and its rotation.

litgpt writes these three out in torch operations. Thunder would see `pow`, `mean`, `mul`; an executor can only claim
what has a name. So the two forwards are exchanged for ones that call `fastft.functional`, on the classes (litgpt builds
its models from them) and for the duration of a context, or until `restore()`.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from fastft import functional
from fastft.integrations.thunder.rope import claim_apply_rope

__all__ = ["LitgptPatch", "patch_litgpt"]


def _norm_forward(self: Any, x: Any) -> Any:
    """`litgpt.model.RMSNorm.forward`; it normalizes the last dimension in every model litgpt has."""
    return functional.rms_norm(x, self.weight, self.eps, "gemma" if self.add_unit_offset else "fp32")


def _mlp_forward(self: Any, x: Any) -> Any:
    """`litgpt.model.LLaMAMLP.forward`, its LoRA version's too: that inherits it."""
    return self.proj(functional.swiglu(self.fc_1(x), self.fc_2(x)))


class LitgptPatch:
    """The exchange, in force from the moment it is made; leaving it as a context or `restore()` ends it."""

    def __init__(self) -> None:
        import litgpt.model

        claim_apply_rope()
        wanted = ((litgpt.model.RMSNorm, _norm_forward), (litgpt.model.LLaMAMLP, _mlp_forward))
        self._originals: list[tuple[type, Any, Any]] = []
        for owner, replacement in wanted:
            if owner.__dict__["forward"] is not replacement:  # nested: the outer one restores
                self._originals.append((owner, owner.__dict__["forward"], replacement))
                owner.forward = replacement

    def restore(self) -> None:
        """Put litgpt's own methods back, unless somebody has replaced ours since."""
        for owner, original, replacement in self._originals:
            if owner.__dict__["forward"] is replacement:
                owner.forward = original  # type: ignore[attr-defined]
        self._originals.clear()

    def __enter__(self) -> LitgptPatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()


def patch_litgpt() -> LitgptPatch:
    """Have litgpt's RMSNorm, LLaMAMLP and apply_rope run on fastft, in Thunder and (the first two) in eager torch.

    Models that exist and models built later are both concerned. Tracing happens at a jitted model's first call, which
    has to lie inside the context.

    Returns:
        A context manager; `with patch_litgpt(): …` or `.restore()` ends the exchange.

    Raises:
        ImportError: where litgpt is not installed.
    """
    return LitgptPatch()
