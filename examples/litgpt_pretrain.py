"""Pretrain a litgpt model under Lightning Thunder with fastft's executor: one process, DDP or FSDP.

usage: litgpt_pretrain.py [--config pythia-14m] [--executors sdpa,fastft,torchcompile_cat,torch] [--devices 2]
                          [--strategy ddp] [--steps 10] [--layers 2]

    --config      a name out of litgpt's list ("tiny-llama-1.1b", "Llama-3.2-1B"), or "tiny", which any CPU trains
    --executors   in order; an absent one (nvFuser has no build for current torch) is left out with a note
    --devices     processes: one a GPU, or processes on the CPU over gloo where there is no GPU
    --strategy    plain, ddp or fsdp; left out: plain for one device, ddp for more

Tokens are random: this shows the wiring, not a data pipeline. Gradients are clipped to norm 1; under FSDP a process
holds a shard of each gradient, so the norm is summed over processes first. Each step prints its loss (averaged over the
processes) and its time; the last line says which of our operators the traces hold.
"""

from __future__ import annotations

import argparse
import collections
import os
import socket
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from litgpt.model import GPT, Config
from torch import nn

import fastft.integrations.thunder as fastft_thunder

import thunder  # isort: skip  (after ours, which knows how to import it on every torch)

TINY = {
    "n_layer": 2,
    "n_head": 4,
    "n_query_groups": 2,
    "n_embd": 64,
    "intermediate_size": 128,
    "padded_vocab_size": 512,
    "block_size": 64,
    "rotary_percentage": 1.0,
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "bias": False,
    "parallel_residual": False,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="tiny")
    parser.add_argument("--executors", default="sdpa,fastft,torchcompile_cat,torch")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", choices=["plain", "ddp", "fsdp"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=2, help="rows a process")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--layers", type=int, help="fewer layers than the config has")
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()
    options.strategy = options.strategy or ("ddp" if options.devices > 1 else "plain")
    if options.devices > 1 and options.strategy == "plain":
        parser.error("--strategy plain trains in one process; with --devices > 1 choose ddp or fsdp")
    if torch.cuda.is_available() and options.devices > torch.cuda.device_count():
        parser.error(f"--devices {options.devices}, but this machine has {torch.cuda.device_count()} GPUs")
    return options


class Pretraining(nn.Module):
    """Model and loss in one module, so that head and loss stand in one trace."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.gpt(ids)
        return nn.functional.cross_entropy(logits.reshape(-1, logits.size(-1)), targets.reshape(-1))


def build(options: argparse.Namespace, device: torch.device) -> Pretraining:
    """The same weights in every process."""
    overrides = {} if options.layers is None else {"n_layer": options.layers}
    config = (
        Config(**{**TINY, **overrides}) if options.config == "tiny" else Config.from_name(options.config, **overrides)
    )
    torch.manual_seed(0)
    gpt = GPT(config)
    gpt.apply(lambda m: nn.init.normal_(m.weight, std=0.02) if isinstance(m, nn.Linear | nn.Embedding) else None)
    return Pretraining(gpt.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32))


def compiled(module: Pretraining, options: argparse.Namespace) -> Any:
    """`module` under Thunder, distributed as asked."""
    jitted = thunder.jit(module, executors=fastft_thunder.executors(*options.executors.split(",")))
    if options.strategy == "ddp":
        from thunder.distributed import ddp

        return ddp(jitted)
    if options.strategy == "fsdp":
        from thunder.distributed import fsdp

        return fsdp(jitted, device=next(module.parameters()).device)  # without it Thunder takes a GPU
    return jitted


def clip(parameters: list[nn.Parameter], limit: float, sharded: bool) -> float:
    """Scale the gradients to a total norm of at most `limit`; returns the norm before."""
    grads = [p.grad for p in parameters if p.grad is not None]
    total = torch.stack([g.float().square().sum() for g in grads]).sum()
    if sharded:  # each process holds other elements
        dist.all_reduce(total)
    norm = total.sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(grads, scale)
    return float(norm)


def worker(rank: int, options: argparse.Namespace, port: int) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    distributed = options.strategy != "plain"
    if distributed:
        # How torch.distributed and Thunder's fsdp are told, and what torchrun would set
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
        dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=options.devices)
    with fastft_thunder.patch_litgpt():
        train(rank, options, device)
    if distributed:
        dist.destroy_process_group()


def train(rank: int, options: argparse.Namespace, device: torch.device) -> None:
    module = build(options, device)
    step = compiled(module, options)
    parameters = [p for p in step.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=options.lr)
    length = min(options.length, module.gpt.config.block_size)
    generator = torch.Generator().manual_seed(1 + rank)  # other rows in each process
    tokens = torch.randint(0, module.gpt.config.vocab_size, (options.batch, length + 1), generator=generator)
    tokens = tokens.clamp(max=module.gpt.config.padded_vocab_size - 1).to(device)
    for iteration in range(options.steps):
        start = time.perf_counter()
        loss = step(tokens[:, :-1], tokens[:, 1:].contiguous())
        loss.backward()
        norm = clip(parameters, 1.0, options.strategy == "fsdp")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        shown = loss.detach().float()
        if options.strategy != "plain":
            dist.all_reduce(shown)
            shown /= options.devices
        if rank == 0:
            took = time.perf_counter() - start
            print(f"step {iteration}: loss {shown.item():.4f}, gradient norm {norm:.3f}, {took:.2f} s", flush=True)
    if rank == 0:
        traces = (thunder.last_traces(step)[-1], thunder.last_backward_traces(step)[-1])
        ours = collections.Counter(
            symbol.sym.name for trace in traces for symbol in trace.bound_symbols if "fastft" in symbol.sym.name
        )
        print(f"{options.strategy} on {options.devices} {device.type}: {dict(ours)}", flush=True)


def main() -> None:
    options = arguments()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if options.devices == 1 and options.strategy == "plain":
        worker(0, options, port)
    else:
        mp.spawn(worker, args=(options, port), nprocs=options.devices)


if __name__ == "__main__":
    main()
