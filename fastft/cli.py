"""The `fastft` command. Beyond what `import fastft` brings, nothing is imported until a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from fastft import __version__
from fastft.bench.commands import app as bench_app

app = typer.Typer(
    name="fastft",
    help="Fine-tune Hugging Face models faster and in less memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.add_typer(bench_app)
DEFAULT_OUTPUT = Path("fastft-demo")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fastft {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Fine-tune Hugging Face models faster and in less memory."""


@app.command()
def demo(
    model: Annotated[
        str | None,
        typer.Option(
            help="Hub name, folder or .gguf file. Default: SmolLM2-135M-Instruct, from its package or the hub."
        ),
    ] = None,
    dataset: Annotated[
        Path | None,
        typer.Option(
            help="JSONL file of your own: rows with prompt and completion, or with messages. A tenth is held out."
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Optimizer steps of 8 rows. Default: 120; with --dataset three passes, at most 300."),
    ] = None,
    output: Annotated[
        Path, typer.Option(help="Folder for the adapter, metrics.json and the loss plot.")
    ] = DEFAULT_OUTPUT,
) -> None:
    """Fine-tune a model in 4 bits with LoRA through TRL, and show what it learned.

    It answers held-out questions before and after, beside a nearest-neighbour baseline. Without options it teaches a
    small model to turn requests ("remind me at 7:45 pm to feed the cat") into compact JSON.
    """
    from fastft.demo.model_source import ModelSourceError, resolve_model
    from fastft.demo.rows import DatasetError, builtin_data, user_data

    try:
        data = builtin_data() if dataset is None else user_data(dataset)
    except DatasetError as error:
        raise typer.BadParameter(str(error), param_hint="--dataset") from error
    try:
        source = resolve_model(model)
    except ModelSourceError as error:
        raise typer.BadParameter(str(error), param_hint="--model") from error
    if output.exists() and not output.is_dir():
        raise typer.BadParameter(f"{output} is a file; a folder is needed", param_hint="--output")

    from fastft.demo.run import DemoError, run_demo

    try:
        run_demo(source, data, steps=steps, output=output, console=Console())
    except DemoError as error:
        Console(stderr=True).print(f"[bold red]Error:[/] {escape(str(error))}")
        raise typer.Exit(1) from error


@app.command()
def validate(
    kernel: Annotated[str, typer.Argument(help="A file of fastft/kernels without its ending: swiglu, rope, …")],
    model: Annotated[
        str | None, typer.Option(help="Shapes to measure at, from the benchmark's registry. Default: an 8B Llama's.")
    ] = None,
    bt: Annotated[list[int] | None, typer.Option(min=1, help="Tokens to measure at; may be given again.")] = None,
    ncu: Annotated[bool, typer.Option("--ncu", help="Profile with Nsight Compute too, where it is installed.")] = False,
    reset: Annotated[bool, typer.Option("--reset", help="Forget the failed attempts and verdicts, then run.")] = False,
) -> None:
    """Put an added or changed kernel through lint, tests, benchmark and plots, and say what got better or worse.

    Needs a checkout. State and report lie in its .fastft/validate. Exit status: 0 passed; 1 lint or tests failed, or a
    step could not run; 2 unknown kernel or no checkout; 3 three versions failed since the last green one: nothing runs
    until --reset; 4 in the benchmark wrong, failing, or at least twice torch's time or memory.
    """
    from fastft.bench.validate.command import run

    raise typer.Exit(run(kernel, reset=reset, ncu=ncu, model=model, tokens=tuple(bt or ())))


@app.command()
def compress(
    checkpoint: Annotated[Path, typer.Argument(help="Folder with an unquantized checkpoint, as of save_merged.")],
    output: Annotated[Path, typer.Argument(help="Folder for the compressed one; an earlier save there is replaced.")],
    scheme: Annotated[
        str, typer.Option(help="fp8_dynamic, fp8, int8, w4a16, nvfp4, nvfp4a16, mxfp4 or mxfp4a16.")
    ] = "fp8_dynamic",
    calibration: Annotated[
        Path | None,
        typer.Option(help="JSONL of rows with text, messages, or prompt and completion; or a text of paragraphs."),
    ] = None,
    algorithm: Annotated[str | None, typer.Option(help="rtn or gptq. Default: what is usual for the scheme.")] = None,
    group_size: Annotated[int | None, typer.Option(help="For w4a16: 128 (default), 64 or 32.")] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="Module to leave as it is. Default: lm_head.")] = None,
    max_calibration_samples: Annotated[int, typer.Option(min=1)] = 512,
    max_seq_length: Annotated[int, typer.Option(min=1)] = 2048,
) -> None:
    """Compress a merged checkpoint for serving with llm-compressor, and check it.

    For environments that hold the versions llm-compressor is tied to. Exit status: 0 saved and checked; 1 refused or
    failed, nothing was written.
    """
    from fastft.saving.compressed.command import run

    raise typer.Exit(
        run(
            checkpoint, output, calibration, scheme=scheme, algorithm=algorithm, group_size=group_size,
            ignore=tuple(ignore or ["lm_head"]), max_calibration_samples=max_calibration_samples,
            max_seq_length=max_seq_length,
        )
    )  # fmt: skip


if __name__ == "__main__":
    app()
