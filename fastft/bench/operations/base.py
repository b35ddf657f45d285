"""What an operation is to the benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastft.bench.registry import ModelShape

__all__ = [
    "COMPILE",
    "MODES",
    "Check",
    "Cost",
    "Function",
    "Inputs",
    "Operation",
    "Problem",
    "compiled",
    "normal",
    "normal_like",
    "outputs_of",
]

COMPILE = "torch.compile"
MODES = ("forward", "backward", "full")  # full: a forward and its backward

# Called with an operation's inputs by name; differentiable unless the operation has no backward.
Function = Callable[..., Any]
# (operation, function, inputs, flops of the operation) → what of the function's results is furthest off, and how far:
# see `checking.worst_error`, which is the usual one.
Check = Callable[["Operation", Function, "Inputs", float], tuple[str, float]]


@dataclass(frozen=True)
class Problem:
    """An operation's size: a model's shape, the tokens in a batch, the dtype of activations."""

    shape: ModelShape
    tokens: int
    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class Cost:
    """What no implementation can do without: floating-point operations, and bytes (each input read once, each output
    written once)."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Inputs:
    """What a call is given.

    Attributes:
        arguments: by name. Tensors that require a gradient are differentiated.
        incoming: the gradient of each output; a mean's is 1, as `.backward()` makes it. Empty without a backward.
        overwritten: names of arguments that are not differentiated and that a call may use up.
    """

    arguments: dict[str, Any]
    incoming: tuple[Tensor, ...] = ()
    overwritten: tuple[str, ...] = ()

    def trained(self) -> dict[str, Tensor]:
        """The arguments that are differentiated."""
        return {
            name: value for name, value in self.arguments.items() if isinstance(value, Tensor) and value.requires_grad
        }

    def exposed(self) -> dict[str, Tensor]:
        """The arguments that a call may write over, the incoming gradients aside."""
        return self.trained() | {name: self.arguments[name] for name in self.overwritten}


@dataclass(frozen=True)
class Operation:
    """An operation to benchmark.

    Attributes:
        name: as typed on the command line.
        draw: the inputs, the same for every provider.
        reference: plain torch, for inputs of any dtype. A scalar it returns is a mean over the rows.
        cost: (shape, tokens, bytes per element, mode) → Cost. None where the mode has none of its own: a loss may
            compute its gradient in the forward or in the backward, so that only both together compare.
        providers: name → loader of the provider's function, which imports what it needs. "torch" is the formula that
            transformers runs, and what "torch.compile" compiles.
        rowwise: inputs whose first dimension is that of independent rows; the check against the reference goes through
            them in pieces of `check_rows`.
        checks: provider → its check, where it cannot be the comparison with `reference`: it draws random numbers of its
            own, or computes exactly what the operation approximates.
        has_backward: whether there is anything to differentiate.
        sized_by_tokens: whether the token count changes the problem.
    """

    name: str
    draw: Callable[[Problem, torch.Generator], Inputs]
    reference: Function
    cost: Callable[[ModelShape, int, int, str], Cost | None]
    providers: Mapping[str, Callable[[], Function]]
    rowwise: tuple[str, ...] = ()
    check_rows: int = 1024
    checks: Mapping[str, Check] = field(default_factory=dict)
    has_backward: bool = True
    sized_by_tokens: bool = True

    def modes(self) -> tuple[str, ...]:
        """The modes there are."""
        return MODES if self.has_backward else ("forward",)

    def provider_names(self) -> tuple[str, ...]:
        """Who can run it, if installed."""
        names = [*self.providers]
        names.insert(names.index("torch") + 1, COMPILE)
        return tuple(names)

    def load(self, provider: str, mode: str) -> Function:
        """The provider's function for that mode.

        Raises:
            ImportError: the provider's library is not installed or does not have what is called here.
        """
        if provider == COMPILE:
            return compiled(self.providers["torch"](), repeat_backward=mode == "backward")
        return self.providers[provider]()


def normal(problem: Problem, generator: torch.Generator, *size: int, scale: float = 1.0, grad: bool = True) -> Tensor:
    """Normal numbers of the problem's dtype and device: a leaf that is differentiated if `grad`."""
    tensor = torch.randn(*size, generator=generator, device=problem.device, dtype=torch.float32)
    return tensor.mul_(scale).to(problem.dtype).requires_grad_(grad)


def normal_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Normal numbers in the layout of `tensor`, without a gradient: an incoming gradient."""
    drawn = torch.empty_like(tensor, requires_grad=False)
    return drawn.detach().normal_(generator=generator)


def outputs_of(result: Any) -> tuple[Tensor, ...]:
    """A function's result as a tuple."""
    return result if isinstance(result, tuple) else (result,)


def compiled(function: Function, *, repeat_backward: bool) -> Function:
    """`function` under torch.compile, for one shape.

    Earlier shapes are forgotten: a second one would compile for dynamic shapes, another program.

    Args:
        function: plain torch.
        repeat_backward: a backward timed by itself runs many times over one forward, which inductor's donated buffers
            forbid; otherwise they are left on, because they save memory.
    """
    import torch._functorch.config

    torch.compiler.reset()
    torch._functorch.config.donated_buffer = not repeat_backward
    return torch.compile(function, dynamic=False)
