"""The longest row that trains under a cap on the GPU's memory, by bisection; every probe is a whole training step.

usage: longest_context.py MODEL_DIR --cap 24GiB [--rank 32] [--low 150000] [--high 200000] [--resolution 0.02] [--out F]

The allocator is capped by `torch.cuda.set_per_process_memory_fraction`, so that what does not fit fails as it would on
a smaller card; its segments can grow, so that fragments are not what decides. One row of random tokens, LoRA on the
seven projections, fused AdamW, the planner's own choice of levels. A probe is forward, backward and optimizer step, the
optimizer's state being there already. Prints one JSON line a probe and one with the result.
"""

import argparse
import gc
import os
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
ap = argparse.ArgumentParser()
ap.add_argument("model")
ap.add_argument("--cap", default="24GiB")
ap.add_argument("--rank", type=int, default=32)
ap.add_argument("--low", type=int, default=1024, help="a length that is known to fit, or the first to try")
ap.add_argument("--high", type=int, default=2**20)
ap.add_argument("--resolution", type=float, default=0.02)
ap.add_argument("--out")
a = ap.parse_args()

import torch

import fastft
from fastft import FastModel
from fastft.memory.budget import parse_budget
from peers import say

cap = parse_budget(a.cap)
torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.get_device_properties(0).total_memory)
model, _ = FastModel.from_pretrained(a.model, max_seq_length=None, load_in_4bit=True, dtype=torch.bfloat16)
model = FastModel.get_peft_model(model, r=a.rank, lora_alpha=a.rank, random_state=0)
model.train()
opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)


def step(length: int) -> float:
    ids = torch.randint(0, model.config.vocab_size, (1, length), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    opt.step()
    opt.zero_grad(set_to_none=True)
    return float(loss.detach())


def fits(length: int) -> bool:
    torch.cuda.reset_peak_memory_stats()
    start, row = time.perf_counter(), {"length": length, "fits": True}
    try:
        row["loss"] = round(step(length), 4)
    except torch.OutOfMemoryError as error:
        row |= {"fits": False, "note": str(error).splitlines()[0][:160]}
    row |= {
        "seconds": round(time.perf_counter() - start, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
    }
    say(row, a.out)
    if not row["fits"]:
        opt.zero_grad(set_to_none=True)
        fastft.release_memory(model)
        gc.collect()
        torch.cuda.empty_cache()
    return row["fits"]


step(512)
low, high = a.low, a.high
if not fits(low):
    low, high = 0, low
while high - low > a.resolution * high:
    middle = (low + high) // 2 // 256 * 256
    if fits(middle):
        low = middle
    else:
        high = middle
say({"model": os.path.basename(a.model), "cap": a.cap, "rank": a.rank, "longest": low, "too_long": high}, a.out)
