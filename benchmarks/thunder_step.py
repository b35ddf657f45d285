"""One compiler, one pretraining step of a TinyLlama-1.1B-shaped litgpt model: ms an iteration and peak memory.

usage: thunder_step.py ROW [ROW …] [--batch 4] [--seq 2048] [--layers 22] [--iterations 10] [--out rows.jsonl]
       thunder_step.py --all

ROW is how the step runs and, after a plus, what of fastft is in it:

    eager             PyTorch as it is                    eager+fastft          our functions, called eagerly
    compile           torch.compile                       compile+fastft        our operators in its graph
    thunder           thunder.jit, sdpa and torch.compile as the fuser
    thunder+fastft    the same, with our executor before the fuser
    thunder-cat       litgpt's own list, less nvFuser: sdpa, torchcompile_cat, torch; next to nothing is fused
    thunder-cat+fastft                                    ours between sdpa and these: what `executors()` gives
    …+linear          head and loss as one operator too: no logits (compile, thunder, thunder-cat)

Each row is a process of its own, because patches and caches are global to one; the rows print one JSON line each. All
compile at the same time (`--at-once` says how many at most: a row takes up to 28 GB); only when the last has done so
are they timed, five iterations in turn, while the others wait: nothing else runs beside a timing. The work is the same
for all: bf16 weights, random tokens, mean loss over all of them, gradient norm clipped to 1, torch's fused AdamW. Time
is the median of the iterations after two that compile and warm up; `first_s` is what the compiling one took beside the
others, and `after_forward_gb` what is allocated when the backward begins, weights and optimizer included. On a machine
without CUDA it runs all the same, for a look: `--tiny` shrinks the model.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

ROWS = (
    "eager",
    "eager+fastft",
    "compile",
    "compile+fastft",
    "compile+fastft+linear",
    "thunder",
    "thunder+fastft",
    "thunder+fastft+linear",
    "thunder-cat",
    "thunder-cat+fastft",
    "thunder-cat+fastft+linear",
)
WARM = 2  # iterations that compile and warm up
TURN = 5  # iterations timed in a row
READY = "ready for my turn"
TINY_LLAMA = {
    "n_layer": 22,
    "n_head": 32,
    "n_query_groups": 4,
    "n_embd": 2048,
    "intermediate_size": 5632,
    "padded_vocab_size": 32000,
    "block_size": 2048,
}
TINY = {
    "n_layer": 2,
    "n_head": 4,
    "n_query_groups": 2,
    "n_embd": 64,
    "intermediate_size": 128,
    "padded_vocab_size": 128,
    "block_size": 64,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", choices=[*ROWS, []], metavar="ROW")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--masked", type=float, default=0.0, help="share of the labels that is ignored")
    parser.add_argument(
        "--timeout", type=int, default=400, help="seconds that a row may take to compile, or for a turn"
    )
    parser.add_argument("--at-once", type=int, default=4, help="rows on the device at the same time")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def build(options: argparse.Namespace) -> Any:
    """The litgpt model, on the device, in bf16."""
    import torch
    from litgpt.model import GPT, Config

    sizes = {**(TINY if options.tiny else TINY_LLAMA)}
    if options.layers:
        sizes["n_layer"] = options.layers
    config = Config(
        **sizes,
        bias=False,
        parallel_residual=False,
        rotary_percentage=1.0,
        norm_class_name="RMSNorm",
        norm_eps=1e-5,
        mlp_class_name="LLaMAMLP",
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT(config).to(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=math.sqrt(2.0 / 5 / config.n_embd))
    return model


def step_of(model: Any, row: str) -> Any:
    """Model and loss as one module: `(ids, targets) -> loss`, compiled as `row` says."""
    import torch
    from torch import nn

    kind, *parts = row.split("+")
    linear, ours = "linear" in parts, "fastft" in parts

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = model
            if linear:  # the model then ends in its hidden states
                self.head = model.lm_head
                model.lm_head = nn.Identity()

        def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            if linear:
                from fastft import functional

                return functional.linear_cross_entropy(self.gpt(ids), self.head.weight, targets)
            logits = self.gpt(ids)
            logits, targets = logits.reshape(-1, logits.size(-1)), targets.reshape(-1)
            if ours and not kind.startswith("thunder"):
                from fastft import operators

                return operators.cross_entropy(logits, targets)
            return torch.nn.functional.cross_entropy(logits, targets)  # Thunder's executor claims this name

    step = Step()
    if kind == "compile":
        return step, torch.compile(step, fullgraph=True)
    if kind.startswith("thunder"):
        from fastft.integrations.thunder import executors
        from fastft.integrations.thunder.shim import import_thunder

        fuser = ("torchcompile_cat", "torch") if kind == "thunder-cat" else ("torchcompile", "torch")
        thunder = import_thunder()
        transforms = []
        if ours and not linear:
            from fastft.integrations.thunder import InPlaceLoss

            transforms = [InPlaceLoss()]
        chosen = executors("sdpa", *(["fastft"] if ours else []), *fuser)
        return step, thunder.jit(step, executors=chosen, transforms=transforms)
    return step, step


def run(row: str, options: argparse.Namespace) -> dict[str, Any]:
    import torch

    context: Any = contextlib.nullcontext()
    if "fastft" in row:
        from fastft.integrations.thunder import patch_litgpt

        context = patch_litgpt()
    cuda = torch.cuda.is_available()
    model = build(options)
    device = next(model.parameters()).device
    vocabulary, length = model.config.padded_vocab_size, min(options.seq, model.config.block_size)
    ids = torch.randint(0, vocabulary, (options.batch, length), device=device)
    targets = torch.randint(0, vocabulary, (options.batch, length), device=device)
    if options.masked:
        targets[:, : int(length * options.masked)] = -100
    times, losses, result = [], [], {"row": row, "batch": options.batch, "seq": length, "layers": model.config.n_layer}
    with context:
        module, step = step_of(model, row)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=cuda)
        for iteration in range(WARM + options.iterations):
            if cuda:
                torch.cuda.synchronize()
            if iteration >= WARM and (iteration - WARM) % TURN == 0:
                wait_for_turn()
            if cuda and iteration == WARM:
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            loss = step(ids, targets)
            if cuda and iteration == WARM:  # weights and optimizer included
                result["after_forward_gb"] = round(torch.cuda.memory_allocated() / 1e9, 2)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
            losses.append(round(float(loss), 4))
    result |= {
        "ms": round(1e3 * statistics.median(times[WARM:]), 2),
        "first_s": round(times[0], 1),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if cuda else None,
        "losses": losses[:3] + losses[-1:],
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
    }
    if row.startswith("thunder"):
        result["fastft_in_traces"] = ours_in_traces(step)
    return result


def ours_in_traces(step: Any) -> dict[str, int]:
    """How often each of our operators stands in the forward and backward traces."""
    import thunder

    counts: dict[str, int] = {}
    for trace in (thunder.last_traces(step)[-1], thunder.last_backward_traces(step)[-1]):
        for symbol in trace.bound_symbols:
            if symbol.sym.name.startswith("fastft"):
                counts[symbol.sym.name] = counts.get(symbol.sym.name, 0) + 1
    return counts


def wait_for_turn() -> None:
    """Tell the parent that the next iterations can be timed, and wait until nobody else's are."""
    print(READY, flush=True)
    sys.stdin.readline()


class Row:
    """A row's process: it compiles at once, and is timed when told to."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.line = name, ""
        given = (a for a in sys.argv[1:] if a not in (*ROWS, "--all"))
        command = [sys.executable, __file__, name, *given, "--in-process"]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it lives as long as the row)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        self._timeout, self._timed_out = options.timeout, False
        self._watch()

    def _watch(self) -> None:
        """Kill it unless `wait` ends within the timeout."""
        self._killer = threading.Timer(self._timeout, self._kill)
        self._killer.start()

    def _kill(self) -> None:
        self._timed_out = True
        self._process.kill()

    def wait(self) -> None:
        """Until it is ready for its next turn, or its line is there: the result, or what went wrong."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == READY:
                self._killer.cancel()  # it may wait for the others as long as they take
                return
            if line.startswith("{"):
                self.line = line.strip()
        self._killer.cancel()
        status = self._process.wait()
        if not self.line:
            self._errors.seek(0)
            why = f"killed after {self._timeout} s" if self._timed_out else f"exit status {status}"
            error = f"{why}; {self._errors.read().strip()[-1500:]}"
            self.line = json.dumps({"row": self.name, "error": error})

    def turn(self) -> None:
        """Let it run its next iterations, and wait for their end."""
        assert self._process.stdin is not None
        self._watch()
        with contextlib.suppress(BrokenPipeError):  # it has died, and `wait` finds out of what
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        self.wait()


def run_together(names: Sequence[str], options: argparse.Namespace) -> Iterator[str]:
    """The rows' JSON lines: compiled at the same time, timed in turns."""
    rows = [Row(name, options) for name in names]
    with concurrent.futures.ThreadPoolExecutor(len(rows)) as pool:  # at once: one that hangs keeps no other's time
        list(pool.map(Row.wait, rows))
    while waiting := [row for row in rows if not row.line]:
        for row in waiting:
            row.turn()
    yield from (row.line for row in rows)


def main() -> int:
    """Exit status: 0 if no row failed."""
    options = arguments()
    rows = ROWS if options.all or not options.rows else options.rows
    if options.in_process:
        print(json.dumps(run(rows[0], options)), flush=True)
        return 0
    failed = 0
    for first in range(0, len(rows), options.at_once):
        for line in run_together(rows[first : first + options.at_once], options):
            print(line, flush=True)
            failed += "error" in json.loads(line)
            if options.out:
                with open(options.out, "a", encoding="utf-8") as file:
                    file.write(line + "\n")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
