"""One operation of one provider at one size in one mode, its inputs drawn, ready to be timed."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fastft.bench.checking import TOLERANCE, check_provider
from fastft.bench.operations.base import Function, Inputs, Operation, Problem, outputs_of
from fastft.bench.timing import Timer, host_times, make_timer, peak_bytes

__all__ = ["Prepared"]

_WARM_ROUNDS = 2  # untimed before each batch of samples: other processes ran in between
_ROTATED_BYTES = 512 * 2**20  # of inputs a round goes through at least, and at least three times the L2 cache
_MOST_SETS = 64


class Prepared:
    """Made in steps: construct, `check`, `make_ready`, then `sample` as often as wanted.

    Several providers write over their inputs or over the incoming gradient, so every set has a copy of all that a call
    may write over (`Inputs.exposed`) and is restored before each round.
    """

    def __init__(self, operation: Operation, provider: str, problem: Problem, mode: str) -> None:
        self._operation, self._provider, self._problem, self._mode = operation, provider, problem, mode
        self._function = operation.load(provider, mode)
        self._generator = torch.Generator(problem.device).manual_seed(0)
        self._sets = [self._draw()]
        self._calls: list[Callable[[], object]] = []
        self._timer: Timer | None = None

    def _draw(self) -> _InputSet:
        return _InputSet(self._operation.draw(self._problem, self._generator))

    def check(self) -> tuple[str, float]:
        """What is wrong with the provider's result ("" if nothing), and its largest relative error."""
        cost = self._operation.cost(
            self._problem.shape, self._problem.tokens, self._problem.dtype.itemsize, self._operation.modes()[-1]
        )
        flops = cost.flops if cost is not None else 0.0
        inputs = self._sets[0].inputs
        name, error = check_provider(self._operation, self._provider, self._function, inputs, flops)
        allowed = TOLERANCE[self._problem.dtype]
        return "" if error <= allowed else f"{name}: relative error {error:.1e}, allowed {allowed:.1e}", error

    def make_ready(self, l2_bytes: int) -> int | None:
        """Draw the other sets, warm up, measure the peak and choose the timer.

        Returns:
            Bytes a call adds to allocated memory at its peak; None on a CPU, where torch does not count them.
        """
        on_gpu = self._problem.device == "cuda"
        wanted = max(3 * l2_bytes, _ROTATED_BYTES) if on_gpu else 0
        count = min(max(1, math.ceil(wanted / self._sets[0].bytes())), _MOST_SETS)
        self._sets += [self._draw() for _ in range(count - 1)]
        self._calls = [each.call(self._function, self._mode) for each in self._sets]
        for _ in range(_WARM_ROUNDS):
            self._restore()
            for call in self._calls:
                call()
        self._restore()
        extra = peak_bytes(self._calls[0]) if on_gpu else None
        self._timer = make_timer(self._calls, self._restore, device=self._problem.device, l2_bytes=l2_bytes)
        return extra

    @property
    def timer(self) -> Timer:
        """How it is timed.

        Raises:
            RuntimeError: `make_ready` has not been called.
        """
        if self._timer is None:
            raise RuntimeError("Prepared.timer: there is none yet; call make_ready first.")
        return self._timer

    def sample(self, count: int) -> tuple[list[float], list[float]]:
        """Device and host milliseconds per call, of `count` rounds each. On a CPU they are the same: no host time."""
        self.timer.sample(_WARM_ROUNDS)
        device_ms = self.timer.sample(count)
        host_ms = host_times(self._calls, self._restore, count) if self._problem.device == "cuda" else []
        return device_ms, host_ms

    def _restore(self) -> None:
        for each in self._sets:
            each.restore()


class _InputSet:
    """One draw of an operation's inputs, and a copy of what may be written over."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self._exposed = [*inputs.exposed().values(), *inputs.incoming]
        self._pristine = [torch.empty_like(each, requires_grad=False).copy_(each.detach()) for each in self._exposed]

    def bytes(self) -> int:
        """Of all tensors a call may read."""
        values = [*self.inputs.arguments.values(), *self.inputs.incoming]
        return sum(value.nbytes for value in values)

    def restore(self) -> None:
        """Everything as drawn. Through `.data`: autograd must not see a change that leaves the values as they were."""
        for exposed, pristine in zip(self._exposed, self._pristine, strict=True):
            exposed.data.copy_(pristine)

    def call(self, function: Function, mode: str) -> Callable[[], object]:
        """A call of `function` on this set in that mode; "backward" runs its forward here, once."""
        arguments, incoming = self.inputs.arguments, list(self.inputs.incoming)
        trained: list[Tensor] = list(self.inputs.trained().values())
        if mode == "forward":
            return lambda: function(**arguments)
        if mode == "full":
            return lambda: torch.autograd.grad(outputs_of(function(**arguments)), trained, incoming)
        outputs = outputs_of(function(**arguments))
        return lambda: torch.autograd.grad(outputs, trained, incoming, retain_graph=True)
