"""For test_compile.py: compiles one kernel file's launches for every GPU, and says what the compiler made of each.

Nothing is executed and no GPU is needed: Triton carries its own assembler. A launch is recorded where it would reach
the driver, and its arguments are specialized as the just-in-time path does (pointers and widths by 16, one as a
constant).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastft.kernels import backend
from tests.kernels.compile_table import TABLE

CAPABILITIES = (75, 80, 86, 89, 90, 100, 120)
ONE_GPU = {
    torch.float16: (75,),
    torch.bfloat16: (90,),
    torch.float32: (),
}  # for launches that vary a kernel's first one
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")

INT64_OFFSET = re.compile(r"tt\.addptr .*, (tensor<[^>]*xi64>|i64)")  # scalar where a program takes one row

Recorded = tuple[triton.JITFunction, tuple[object, ...], dict[str, object]]


def record(call: Callable[[], object]) -> list[Recorded]:
    """The kernel launches `call` makes, instead of making them."""
    launches: list[Recorded] = []

    def run(self: triton.JITFunction, *arguments: object, grid: object, warmup: bool, **settings: object) -> None:
        launches.append((self, arguments, settings))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_INTERPRETING", True)  # meta tensors take the kernel's path; nothing is interpreted
        patch.setattr(backend, "_LAUNCHES_DIRECTLY", False)  # every launch reaches `run`, and no device is asked for
        patch.setattr(triton.JITFunction, "run", run)
        call()
    return launches


def source(kernel: triton.JITFunction, arguments: tuple[object, ...], settings: dict[str, object]) -> ASTSource:
    """The launch as the compiler takes it."""
    signature: dict[str, object] = {}
    constants: dict[tuple[int, ...], object] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    values = {name: value for name, value in settings.items() if name not in OPTIONS}
    values.update(zip(kernel.arg_names, arguments, strict=False))

    def specialize(path: tuple[int, ...], value: object, fixed: bool) -> object:
        if isinstance(value, tuple) and not fixed:
            return tuple(specialize((*path, i), item, fixed) for i, item in enumerate(value))
        specialized = not kernel.params[path[0]].do_not_specialize
        if fixed or value is None or (specialized and type(value) is int and value == 1):
            constants[path] = value
            return "constexpr"
        if isinstance(value, float):
            return "fp32"
        if isinstance(value, torch.Tensor) or (specialized and value % 16 == 0):
            attributes[path] = [["tt.divisibility", 16]]
        return (
            POINTERS[value.dtype] if isinstance(value, torch.Tensor) else "i32" if -(2**31) <= value < 2**31 else "i64"
        )

    for index, parameter in enumerate(kernel.params):
        signature[parameter.name] = specialize((index,), values[parameter.name], parameter.is_constexpr)
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)


def compiled(file: str) -> Iterator[dict[str, object]]:
    """One record a compile: where it came from, and what the compiler says about it."""
    seen: set[tuple[str, str]] = set()
    for dtype_name, dtype in DTYPES.items():
        for launch in TABLE[file](dtype):
            for kernel, arguments, settings in record(launch.call):
                first = (kernel.__name__, dtype_name) not in seen
                seen.add((kernel.__name__, dtype_name))
                for capability in CAPABILITIES if first else ONE_GPU[dtype]:
                    if capability < 80 and dtype == torch.bfloat16:
                        continue  # bf16 begins with Ampere
                    options = {name: settings[name] for name in OPTIONS if name in settings}
                    target = GPUTarget("cuda", capability, 32)
                    binary = triton.compile(source(kernel, arguments, settings), target=target, options=options)
                    ptx, ttir = binary.asm["ptx"], binary.asm["ttir"]
                    yield {
                        "kernel": kernel.__name__,
                        "launch": launch.name,
                        "dtype": dtype_name,
                        "capability": capability,
                        "shared": binary.metadata.shared,
                        "cubin": len(binary.asm["cubin"]),
                        "atomics": "tt.atomic" in ttir,
                        "int64_offsets": bool(INT64_OFFSET.search(ttir)),
                        "wide": _moves_128_bits(ptx, "ld.global") and _moves_128_bits(ptx, "st.global"),
                        "must_be_wide": launch.wide,
                    }


def _moves_128_bits(ptx: str, instruction: str) -> bool:
    return any(instruction in line and (".v4.b32" in line or ".v2.b64" in line) for line in ptx.splitlines())
