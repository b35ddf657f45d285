"""`fastft validate KERNEL`: the steps in order, and what each ends with."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
import sys

from rich.console import Console
from rich.markup import escape

from fastft.bench.validate.checkout import find_kernel, find_root
from fastft.bench.validate.context import Context, ExitCode, StepError, run_in
from fastft.bench.validate.gate import diff_since_green, judge
from fastft.bench.validate.lint import lint
from fastft.bench.validate.measure import ON_CPU, ON_GPU, Sizes, assess, benchmark, plot
from fastft.bench.validate.profile import profile
from fastft.bench.validate.report import Report, attempts_left, show_failures, show_locked, show_report
from fastft.bench.validate.state import load_state, save_state

WIDTH = 150  # of what goes to a file or a pipe


def run(name: str, *, reset: bool, ncu: bool, model: str | None, tokens: tuple[int, ...]) -> ExitCode:
    """Validate the kernel `name` of the checkout this fastft runs from.

    Args:
        name: a file of fastft/kernels, without its ending.
        reset: forget the failed attempts first.
        ncu: profile with Nsight Compute too.
        model: a name of the benchmark's registry; None: Llama-3.1-8B on a GPU, a tiny one on a CPU.
        tokens: token counts to measure at; empty: the default.
    """
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    try:
        context = make_context(name, console)
    except StepError as error:
        console.print(f"[bold red]Error:[/] {escape(str(error))}", soft_wrap=True)
        return ExitCode.USAGE
    default = ON_GPU if context.on_gpu else ON_CPU
    sizes = Sizes(model or default.model, tokens or default.tokens, default.samples)
    try:
        return validate(context, sizes, reset=reset, ncu=ncu)
    except StepError as error:
        console.print(f"[bold red]Stopped:[/] {escape(str(error))}", soft_wrap=True)
        return ExitCode.FAILED


def make_context(name: str, console: Console) -> Context:
    """The context of a real run.

    Raises:
        StepError: this is no checkout, or it has no such kernel.
    """
    import torch

    root = find_root()
    has_triton = importlib.util.find_spec("triton") is not None
    on_gpu = torch.cuda.is_available()
    known = ("torch", "triton") if has_triton else ("torch",)
    versions = [
        f"python {platform.python_version()}",
        *(f"{each} {importlib.metadata.version(each)}" for each in known),
    ]
    if on_gpu:
        versions.append(torch.cuda.get_device_name())
    return Context(
        root=root,
        kernel=find_kernel(root, name),
        run=run_in(root),
        console=console,
        on_gpu=on_gpu,
        has_triton=has_triton,
        find_program=shutil.which,
        versions=", ".join(versions),
    )


def validate(context: Context, sizes: Sizes, *, reset: bool, ncu: bool) -> ExitCode:
    """The six steps.

    Raises:
        StepError: a step cannot go on.
    """
    console, name = context.console, context.kernel.name
    state = load_state(context.state_file)
    if reset:
        state.reset()
        save_state(state, context.state_file)
    if state.locked:
        show_locked(console, name, state, diff_since_green(context, state))
        return ExitCode.LOCKED

    with console.status("Lint"):
        mended = lint(context)
    if mended:
        console.print(f"ruff mended {escape(', '.join(mended))}")

    verdict, repeated = judge(context, state)
    if repeated:
        console.print(
            f"The tests have judged this very code on {verdict.date}; that verdict stands. To run them again: --reset"
        )
    if not verdict.green:
        if state.locked:
            show_locked(console, name, state, diff_since_green(context, state))
            return ExitCode.LOCKED
        show_failures(console, verdict.failures)
        console.print(f"[bold]{attempts_left(state)}[/]")
        return ExitCode.FAILED

    comparisons, place = benchmark(context, sizes)
    no_plots = plot(context)
    profiles, no_profiles = profile(context, sizes) if ncu else ([], None)
    assessment = assess(comparisons, on_gpu=context.on_gpu)
    report = Report(mended, verdict, repeated, comparisons, place, assessment, no_plots, profiles, no_profiles)
    show_report(context, report)
    return ExitCode.CATASTROPHE if assessment.alarms else ExitCode.PASSED
