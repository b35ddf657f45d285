"""Which backend a kernel call runs on: the Triton kernel or its plain-torch twin.

Triton is an optional dependency (no wheel on macOS or Windows, none wanted on a CPU machine), so this file is the
only one that imports it. Kernel files write `from fastft.kernels.backend import tl, triton` and decorate with
`@triton.jit`; where Triton is absent the decorator leaves a plain Python function that nobody calls, because
`uses_triton` is False.
"""

from __future__ import annotations

import functools
import importlib
import threading
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    import triton
    import triton.language as tl

    HAS_TRITON = True
else:
    try:
        import triton
        import triton.language as tl

        HAS_TRITON = True
    except ImportError:  # the twins serve

        def _jit(function: Any = None, **options: Any) -> Any:
            return function if function is not None else lambda decorated: decorated

        triton = types.SimpleNamespace(jit=_jit)
        tl = types.SimpleNamespace(constexpr=Any)
        HAS_TRITON = False

__all__ = [
    "HAS_TRITON",
    "Settings",
    "cdiv",
    "hash_ahead",
    "interpreting",
    "launch",
    "launch_on",
    "next_power_of_2",
    "tl",
    "triton",
    "uses_triton",
]

KERNEL_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})


def cdiv(numerator: int, denominator: int) -> int:
    """numerator / denominator, rounded up. Triton's own, outside a kernel, takes ten times as long."""
    return -(-numerator // denominator)


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least `n` (Triton block extents must be powers of two)."""
    return 1 << max(0, n - 1).bit_length()


def interpreting() -> bool:
    """Whether Triton runs its kernels in the CPU interpreter (`TRITON_INTERPRET=1` when it was imported)."""
    return HAS_TRITON and bool(triton.knobs.runtime.interpret)


_INTERPRETING = interpreting()


_hashing: threading.Thread | None = None


def hash_ahead() -> threading.Thread | None:
    """Have Triton hash itself in a thread, once a process; to be called before a model's weights are read.

    The key of Triton's kernel cache holds a hash of its own library, 400 to 500 MB, computed before a process's first
    kernel: half a second or more of a first step, and as often as there are threads that compile at the time. Reading
    and hashing need no Python lock.

    Returns:
        The thread; None where this Triton has no such function, or there is none.
    """
    global _hashing
    if _hashing is None:
        try:
            key = importlib.import_module("triton.runtime.cache").triton_key
        except (ImportError, AttributeError):
            return None
        _hashing = threading.Thread(target=key, name="fastft-hash", daemon=True)
        _hashing.start()
    return _hashing


def uses_triton(tensor: torch.Tensor) -> bool:
    """Whether a kernel over `tensor` runs as Triton: CUDA (or the interpreter) and a dtype the kernels compute in.

    float64 always takes the twin: it is the reference arithmetic of gradcheck, and the kernels compute in float32.
    """
    return HAS_TRITON and (tensor.is_cuda or _INTERPRETING) and tensor.dtype in KERNEL_DTYPES


def launch_on(tensor: torch.Tensor) -> Any:
    """Context that makes `tensor`'s device current: Triton launches on the current device and stream."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return _SAME_DEVICE


class _SameDevice:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *exception: object) -> None:
        return None


_SAME_DEVICE = _SameDevice()


class Settings:
    """A kernel, its constexpr arguments and its launch settings, by name and always in the same order.

    To be kept by whoever works them out from a shape (`functools.cache`): a launch finds its compiled kernel by them,
    and what is the same object is found without being compared.
    """

    __slots__ = ("_hash", "kernel", "options")

    def __init__(self, kernel: Any, **options: Any) -> None:
        self.kernel, self.options = kernel, options
        self._hash = hash((id(kernel), *options.values()))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and self.kernel is other.kernel and self.options == other.options


class _Compiled(NamedTuple):
    """A compiled kernel, and all that its launcher wants besides grid, stream and arguments."""

    kernel: Any
    run: Callable[..., Any]  # Triton's launcher, in C
    function: Any
    metadata: Any
    stream_of: Callable[[int], Any]  # the device's current stream
    constants: tuple[Any, ...]


# On AMD Triton also specializes on whether a tensor lies within 2 GiB, which the key of `launch` does not hold.
_LAUNCHES_DIRECTLY = not _INTERPRETING and torch.version.hip is None
_compiled: dict[tuple[Any, ...], _Compiled] = {}


def launch(settings: Settings, grid: tuple[int, ...], *arguments: Any) -> None:
    """`kernel[grid](*arguments, **options)` without what Triton derives anew at every call.

    Triton's own launch binds the signature, specializes each argument and hashes the result to find the compiled
    kernel. A decoder layer launches some twenty, and at a few thousand tokens the host is what a step waits for. So the
    compiled kernel is remembered here, under a key at least as fine as Triton's (dtype and alignment of tensors; 1,
    divisibility by 16 and width of integers), and its launcher called directly. Triton's own launch runs in the
    interpreter, on AMD, and while launch hooks are set (its profiler Proton sets them). Pre-run hooks and debug knobs
    are seen by a kernel's first launch only.

    Args:
        settings: the kernel, and what is constant for it.
        grid: one to three program counts.
        arguments: the kernel's other arguments, by position.
    """
    if not _LAUNCHES_DIRECTLY:
        settings.kernel[grid](*arguments, **settings.options)
        return
    device = torch.cuda.current_device()
    key = (settings, device, *_specialization(arguments))
    known = _compiled.get(key)
    if known is None:
        kernel, options = settings.kernel, settings.options
        constants = tuple(options[name] for name in kernel.arg_names[len(arguments) :])
        compiled = kernel[grid](*arguments, **options)
        stream_of = triton.runtime.driver.active.get_current_stream
        _compiled[key] = _Compiled(
            compiled, compiled.run, compiled.function, compiled.packed_metadata, stream_of, constants
        )
        return
    compiled, run, function, metadata, stream_of, constants = known
    x, y, z = (*grid, 1, 1)[:3]
    if _hooked(triton.knobs.runtime):
        compiled[x, y, z](*arguments, *constants)
        return
    run(x, y, z, stream_of(device), function, metadata, None, None, None, *arguments, *constants)


def _hooked(knobs: Any) -> bool:
    """Whether somebody wants to hear of every launch: a chain of hooks that has any, or a plain one."""
    enter, leave = knobs.launch_enter_hook, knobs.launch_exit_hook
    return (enter is not None and bool(getattr(enter, "calls", True))) or (
        leave is not None and bool(getattr(leave, "calls", True))
    )


@functools.lru_cache(maxsize=4096, typed=True)
def _of_integers(*integers: int) -> tuple[Any, ...]:
    """`_specialization` of a tuple that begins with an integer: strides, of which there are few. It must hold no
    tensor, which would be kept alive here."""
    return tuple(_specialization(integers))


_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


def _specialization(arguments: tuple[Any, ...]) -> list[Any]:
    """What of `arguments` Triton may compile for: two entries for a tensor, one for anything else.

    One loop with the cheapest tests first, since it runs for every argument of every launch.
    """
    found: list[Any] = []
    add = found.append
    for argument in arguments:
        kind = type(argument)
        if argument is None:
            add(None)
        elif kind is int:
            add(-1 if argument == 1 else (argument & 15) + 16 * (-0x80000000 <= argument <= 0x7FFFFFFF))
        elif kind in _TENSORS or isinstance(argument, torch.Tensor):
            add(argument.dtype)
            add(argument.data_ptr() & 15)
        elif kind is tuple:
            add(_of_integers(*argument) if type(argument[0]) is int else tuple(_specialization(argument)))
        else:
            add(kind if kind is float else (kind, argument == 1))  # True is a 1 to Python and a u1 to Triton
    return found
