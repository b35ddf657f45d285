"""`fastft bench …`: the command line. Nothing but typer is imported until a command runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fastft.bench.session import Session

app = typer.Typer(
    name="bench",
    help="Measure speed and memory: kernels, whole training steps, and the machine's own limits.",
    no_args_is_help=True,
)


_WIDTH = 150  # of tables that go to a file or a pipe


class Sweep(StrEnum):
    """What `bench kernels` varies."""

    tokens = "tokens"
    models = "models"


class Dtype(StrEnum):
    """Of activations."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class Checkpointing(StrEnum):
    """What fastft keeps of each layer for its backward."""

    auto = "auto"
    recompute = "recompute"
    offload = "offload"
    keep = "keep"


CsvOption = Annotated[
    Path | None, typer.Option("--csv", help="Results file, updated by key. Without it nothing is written.")
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Measure again what the file already has.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print rows as JSON instead of tables.")]
CommitOption = Annotated[str | None, typer.Option(help="What the commit column says. Default: git's, or the version.")]
ProviderOption = Annotated[
    list[str] | None, typer.Option("--provider", "-p", help="Who is measured; may be given again. Default: all.")
]
DtypeOption = Annotated[Dtype | None, typer.Option(help="Default: bfloat16 on a GPU, float32 on a CPU.")]
SamplesOption = Annotated[int, typer.Option(min=20, help="Timed samples of each.")]
ModelOption = Annotated[
    list[str] | None,
    typer.Option("--model", help="A model of the registry (Llama-3.1-8B, llama-1b, …); may be given again."),
]


@app.command()
def kernels(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="rms_norm, rope, swiglu, dequantize, cross_entropy, lora_linear, dropout, sparse_product. "
            "Default: all."
        ),
    ] = None,
    provider: ProviderOption = None,
    model: ModelOption = None,
    sweep_mode: Annotated[Sweep, typer.Option(help="Over token counts, or over the registry's models.")] = Sweep.tokens,
    bt: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens in a batch; may be given again. Default: 1,024 to 65,536 as memory allows."),
    ] = None,
    dtype: DtypeOption = None,
    samples: SamplesOption = 25,
    csv: CsvOption = None,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
    commit: CommitOption = None,
) -> None:
    """Time each provider's kernels: forward, backward and both, and the memory they add.

    Each provider runs in its own process and is compared with a reference before it is timed. On a CPU the times are
    wall clock: good for trying the benchmark, not for figures.
    """
    from fastft.bench.measure import measure_kernels
    from fastft.bench.tables import kernel_table

    with _session(csv, overwrite, commit) as session:
        groups = measure_kernels(
            session,
            names=names or [],
            providers=provider,
            models=model or [],
            over_models=sweep_mode is Sweep.models,
            tokens=bt or [],
            dtype=dtype,
            samples=samples,
        )
        _show(groups, kernel_table, json)


def _training_command(kind: str, description: str) -> Callable[..., None]:
    """`step` and `sft` take the same options."""

    def command(
        provider: ProviderOption = None,
        model: ModelOption = None,
        model_dir: Annotated[
            Path | None,
            typer.Option(help="Checkpoint folder. With --model too, a random one is written there if there is none."),
        ] = None,
        bs: Annotated[int, typer.Option("--bs", min=1, help="Rows in a batch.")] = 2,
        seq: Annotated[
            list[int] | None, typer.Option(min=2, help="Tokens in a row; may be given again. [2048]")
        ] = None,
        gc: Annotated[bool, typer.Option("--gc/--no-gc", help="Gradient checkpointing.")] = True,
        checkpointing: Annotated[
            Checkpointing | None,
            typer.Option(help="For fastft alone. Default: auto (the planner) with --gc, keep with --no-gc."),
        ] = None,
        memory_budget: Annotated[str, typer.Option(help="For fastft's planner: 20GiB, 80%.")] = "",
        steps: Annotated[int, typer.Option(min=1, help="Timed steps.")] = 20,
        warmup: Annotated[int, typer.Option(min=1, help="Untimed steps before.")] = 3,
        bits: Annotated[int, typer.Option(help="4 (NF4) or 16.")] = 4,
        rank: Annotated[int, typer.Option(min=1, help="Of the adapters.")] = 16,
        rounds: Annotated[int, typer.Option(min=1, help="Runs of each provider, in turn; samples are pooled.")] = 1,
        cold_cache: Annotated[
            bool, typer.Option("--cold-cache", help="Empty Triton and inductor caches for each process.")
        ] = False,
        dtype: DtypeOption = None,
        csv: CsvOption = None,
        overwrite: OverwriteOption = False,
        json: JsonOption = False,
        commit: CommitOption = None,
    ) -> None:
        from fastft.bench.measure import measure_training
        from fastft.bench.providers import Settings
        from fastft.bench.tables import training_table

        if bits not in (4, 16):
            raise typer.BadParameter(f"{bits} bits; there are 4 (NF4) and 16.", param_hint="--bits")
        template = Settings(
            kind=kind,
            batch=bs,
            checkpointing=checkpointing or (Checkpointing.auto if gc else Checkpointing.keep),
            memory_budget=memory_budget,
            steps=steps,
            warmup=warmup,
            bits=bits,
            rank=rank,
            dtype=dtype or "",
        )
        with _session(csv, overwrite, commit, cold_cache=cold_cache) as session:
            groups = measure_training(
                session,
                template,
                providers=provider,
                models=model or [],
                folder=model_dir,
                lengths=seq or [2048],
                peers_checkpoint=gc,
                rounds=rounds,
            )
            _show(groups, training_table, json)

    command.__doc__ = description
    return command


app.command("step")(
    _training_command(
        "step",
        """Time whole LoRA training steps, forward, backward and optimizer by hand, and their peak memory.

        Each provider loads the same checkpoint in its own process: --model-dir's, or a random-weight one of --model's
        size, made in a temporary folder.
        """,
    )
)
app.command("sft")(
    _training_command("sft", """The same as `step` through TRL's SFTTrainer, on full rows, as after packing.""")
)


@app.command()
def limit(
    dtype: DtypeOption = None,
    samples: SamplesOption = 25,
    csv: CsvOption = None,
    json: JsonOption = False,
    commit: CommitOption = None,
) -> None:
    """Measure the machine's own ceilings: copy, matrix product, launch, transfers. Newer figures replace older ones."""
    from fastft.bench.tables import limit_table

    with _session(csv, True, commit) as session:
        rows = session.measure_limits(dtype, samples)
        _show(iter([rows]), limit_table, json)


@app.command()
def plot(
    csv: Annotated[Path, typer.Option("--csv", exists=True, dir_okay=False, help="Results file.")],
    out: Annotated[Path, typer.Option("--out", file_okay=False, help="Folder for the PNG files.")] = Path(
        "fastft-bench-plots"
    ),
    gpu: Annotated[str | None, typer.Option(help="Which machine's rows. Default: the newest row's.")] = None,
) -> None:
    """Draw the results: speed and memory over length, training steps, roofline."""
    with _errors():
        from fastft.bench.plots import draw_all
        from fastft.bench.results import read_rows

        for path in draw_all(read_rows(csv), out, gpu=gpu):
            typer.echo(path)


@contextmanager
def _session(csv: Path | None, overwrite: bool, commit: str | None, *, cold_cache: bool = False) -> Iterator[Session]:
    """A session that tells on stderr what it does; its errors end the command."""
    import functools

    from rich.console import Console

    with _errors():
        from fastft.bench.processes import ProcessWorker
        from fastft.bench.results import ResultsFile
        from fastft.bench.session import Session

        console = Console(stderr=True)
        yield Session(
            results=ResultsFile(csv, overwrite=overwrite),
            commit=commit,
            start=functools.partial(ProcessWorker, cold_cache=cold_cache),
            tell=lambda text: console.print(text, style="dim", markup=False, highlight=False),
        )


@contextmanager
def _errors() -> Iterator[None]:
    """What can be explained, in one line and exit status 1; the rest is a defect and keeps its traceback."""
    from fastft.bench.processes import WorkerError
    from fastft.bench.results import ResultsError
    from fastft.bench.session import BenchError

    try:
        yield
    except (BenchError, ResultsError, WorkerError, ImportError) as error:
        typer.secho(f"Error: {error}", err=True, fg="red", bold=True)
        raise typer.Exit(1) from error


def _show(groups: Iterator[Any], table: Callable[[Any], Any], json: bool) -> None:
    """Print each group of rows as a table when it is there, or all of them as JSON at the end."""
    from rich.console import Console

    from fastft.bench.tables import as_json

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    rows = []
    for group in groups:
        rows += group
        if not json and group:
            console.print(table(group))
    if json:
        typer.echo(as_json(rows))
