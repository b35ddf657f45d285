"""Two processes under DistributedDataParallel (gloo, CPU): their averaged gradients are those of one process."""

from __future__ import annotations

import os
import pathlib
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import fastft
from tests import support

WORLD = 2
LEVELS = ("keep", "recompute")


def planned_model(level: str) -> torch.nn.Module:
    model = fastft.patch(support.add_lora(support.build_model()), memory_levels=level)
    if level == "recompute":
        model.enable_input_require_grads()
        model.base_model.model._set_gradient_checkpointing(True, torch.utils.checkpoint.checkpoint)
    return model


def halves() -> list[dict[str, torch.Tensor]]:
    """One batch a process, with the same number of counted tokens: the mean of means is then the mean."""
    batches = [support.random_batch(seed) for seed in range(WORLD)]
    for batch in batches:
        batch["labels"] = batch["input_ids"].clone()
        batch["labels"][:, :3] = -100
    return batches


def work(rank: int, port: int, folder: str) -> None:
    """One rank: forward and backward of a fresh model at each level, and rank 0 writes what DDP averaged."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    try:
        for level in LEVELS:
            model = planned_model(level)
            wrapped = torch.nn.parallel.DistributedDataParallel(model)
            for _ in range(2):  # the second step shows that buckets and hooks survived the first
                model.zero_grad()
                wrapped(**halves()[rank]).loss.backward()
            if rank == 0:
                torch.save(support.trainable_gradients(model), pathlib.Path(folder) / f"{level}.pt")
            dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_gradients_are_averaged_over_ranks(tmp_path: pathlib.Path) -> None:
    """At both levels in the same two processes, whose imports are what this test takes its time for."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(work, args=(port, str(tmp_path)), nprocs=WORLD)
    for level in LEVELS:
        averaged = torch.load(tmp_path / f"{level}.pt")
        model = planned_model(level)
        for batch in halves():
            (model(**batch).loss / WORLD).backward()
        expected = support.trainable_gradients(model)
        assert averaged.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(
                averaged[name], gradient, rtol=1e-5, atol=1e-7, msg=lambda m, n=f"{level}, {name}": f"{n}: {m}"
            )
