"""fastft alone, under several memory plans in one process: milliseconds a step, peak memory; one JSON line each.

usage: plans_step.py MODEL_DIR BS:PLAN [BS:PLAN ...] [--seq 2048] [--no-graphs] [--out FILE]
PLAN: auto, keep, lean, recompute, offload, or a budget such as 8.45GiB; "+fold" after it folds the adapters. The loop
is train_step.py's; every plan starts with 7 steps that are not counted, in which plans are corrected and graphs
captured. Peaks are of allocated memory; the working memory of CUDA graphs is in `reserved_gib` only.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ap = argparse.ArgumentParser()
ap.add_argument("model")
ap.add_argument("plans", nargs="+")
ap.add_argument("--seq", type=int, default=2048)
ap.add_argument("--steps", type=int, default=10)
ap.add_argument("--no-graphs", action="store_true")
ap.add_argument("--out")
a = ap.parse_args()

import torch

import fastft
from fastft import FastModel
from fastft.patching import levels, registry, size_plans
from peers import say

WARMUP = 7
model, _ = FastModel.from_pretrained(a.model, max_seq_length=a.seq, load_in_4bit=True, dtype=torch.bfloat16)
model = FastModel.get_peft_model(model, r=16, lora_alpha=16, random_state=0)
model.train()
opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
backbone = model.get_base_model().model
for plan in a.plans:
    bs, _, what = plan.partition(":")
    what, _, fold = what.partition("+")
    chosen = {"memory_levels": "auto", "memory_budget": what} if what[0].isdigit() else {"memory_levels": what}
    if what == "auto":
        chosen["memory_budget"] = 1.0  # all there is: a budget named for an earlier plan would stay
    folded = ("fold_adapters",) if fold else ()
    fastft.patch(model, cuda_graphs=not a.no_graphs, approximations=folded, **chosen)
    torch.cuda.empty_cache()
    g = torch.Generator().manual_seed(1)
    times, losses = [], []
    for i in range(WARMUP + a.steps):
        ids = torch.randint(0, model.config.vocab_size, (int(bs), a.seq), generator=g).cuda()
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
        torch.cuda.synchronize()
        if i == WARMUP:
            torch.cuda.reset_peak_memory_stats()
        t = time.perf_counter()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - t)
        losses.append(float(loss.detach()))
        del loss
    steady = sorted(times[WARMUP:])
    row = {
        "model": os.path.basename(a.model),
        "bs": int(bs),
        "seq": a.seq,
        "plan": f"{what}+fold" if fold else what,
        "step_s": round(statistics.median(steady), 4),
        "min_s": round(steady[0], 4),
        "first_s": round(times[0], 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "reserved_gib": round(torch.cuda.memory_reserved() / 2**30, 2),
        "losses": [round(x, 4) for x in losses[:3]],
        "planner": size_plans.summary(registry.site_of(backbone)),
        "graphs": levels.graph_summary(backbone, registry.site_of(backbone)),
    }
    say(row, a.out)
