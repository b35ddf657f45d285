"""Two GPUs under DistributedDataParallel (NCCL), layers captured: the averaged gradients are those of one process.

tests/test_ddp.py does the same on two CPU processes. Needs a machine with two GPUs; skipped on one.
"""

from __future__ import annotations

import os
import pathlib
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import fastft
from fastft.patching import levels
from tests import support
from tests.gpu import models

WORLD = 2
STEPS = 8  # the layers are captured on the way: the last steps are replays

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason="needs two GPUs")]


def draw_batch(seed: int) -> dict[str, Tensor]:
    """One rank's rows, 160 of 256 labels counted in each: the mean of the ranks' means is then the mean."""
    ids = torch.randint(3, 2048, (2, 256), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, :96] = -100
    return models.on_gpu({"input_ids": ids, "labels": labels})


def planned_model(folder: str, level: str) -> Any:
    """A 4-bit model of middle size on the current GPU, every rank the same adapters."""
    torch.manual_seed(0)
    model = models.load_qlora(pathlib.Path(folder), torch.bfloat16, **models.MIDDLE)
    return fastft.patch(model, memory_levels=level)


def work(rank: int, port: int, level: str, folder: str) -> None:
    """One rank: forward, backward, and each rank writes what DDP averaged and what was captured."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    model = planned_model(f"{folder}/{rank}", level)  # first: in a group, only rank 0 writes its checkpoint
    dist.init_process_group("nccl", rank=rank, world_size=WORLD, device_id=torch.device("cuda", rank))
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
        for _ in range(STEPS):
            model.zero_grad()
            wrapped(**draw_batch(rank)).loss.backward()
        graphs = levels.graphs_of(model.get_base_model().model)
        found = {name: gradient.cpu() for name, gradient in support.trainable_gradients(model).items()}
        torch.save({"gradients": found, "captured": graphs.captured, "reason": graphs.reason}, f"{folder}/{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("level", ["keep", "recompute"])
def test_gradients_are_averaged_over_gpus(level: str, tmp_path: pathlib.Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(work, args=(port, level, str(tmp_path)), nprocs=WORLD)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(WORLD)]
    model = planned_model(str(tmp_path / "one"), level)
    for rank in range(WORLD):
        (model(**draw_batch(rank)).loss / WORLD).backward()
    for found in ranks:
        assert found["captured"], f"no layer was captured under DDP: {found['reason']}"
        for name, expected in support.trainable_gradients(model).items():
            gradient = found["gradients"][name].to(expected.device)
            error = (gradient - expected).norm() / expected.norm()
            assert error < 0.02, f"{name}: {error:.1e} of the norm away from one process' gradient"
