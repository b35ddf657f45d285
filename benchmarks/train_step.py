"""One peer, one QLoRA (or LoRA) training configuration: seconds a step, tokens/s, peak memory, losses; one JSON line.

usage: train_step.py IMPL MODEL_DIR --bs 2 --seq 2048 [--gc] [--steps 8] [--bits 4|16] [--out FILE]
IMPL: hf | liger | unsloth | compile | fastft

One peer a process, because some patch globally. The work is the same for all: rank-16 LoRA on the seven projections, no
dropout, bf16 autocast, torch's fused AdamW.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ap = argparse.ArgumentParser()
ap.add_argument("impl")
ap.add_argument("model")
ap.add_argument("--bs", type=int, default=2)
ap.add_argument("--seq", type=int, default=2048)
ap.add_argument("--gc", action="store_true")
ap.add_argument("--steps", type=int, default=8)
ap.add_argument("--warmup", type=int, default=3)
ap.add_argument("--bits", type=int, default=4)
ap.add_argument("--rank", type=int, default=16)
ap.add_argument("--dropout", type=float, default=0.0)
ap.add_argument("--out")
ap.add_argument("--profile")
ap.add_argument("--level", help="fastft: a level for all layers instead of the planner")
ap.add_argument("--memory-budget", help="fastft: what the planner may use, such as 8.45GiB")
a = ap.parse_args()
t_import = time.perf_counter()
if a.impl == "unsloth":
    from unsloth import FastLanguageModel  # noqa: F401  it must come first
elif a.impl == "fastft":
    from fastft import FastModel  # noqa: F401
import torch
from transformers import AutoModelForCausalLM  # noqa: F401
from peft import get_peft_model, prepare_model_for_kbit_training

t_import = time.perf_counter() - t_import
from peers import load_fast, load_stock, say, stock_lora


def load():
    if a.impl in ("unsloth", "fastft"):
        checkpointing = a.gc and (a.level or True)
        return load_fast(
            a.impl,
            a.model,
            max_seq_length=a.seq,
            checkpointing=checkpointing,
            bits=a.bits,
            rank=a.rank,
            dropout=a.dropout,
            memory_budget=a.memory_budget,
        )[0]
    if a.impl == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    model = load_stock(a.model, bits=a.bits)
    model.config.use_cache = False
    if a.bits == 4:
        model = prepare_model_for_kbit_training(
            model, use_gradient_checkpointing=a.gc, gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    elif a.gc:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.manual_seed(0)
    model = get_peft_model(model, stock_lora(a.rank, a.dropout))
    if a.impl == "compile":
        model = torch.compile(model)
    return model


t_load = time.perf_counter()
model = load()
torch.cuda.synchronize()
t_load = time.perf_counter() - t_load
model.train()
params = [p for p in model.parameters() if p.requires_grad]
opt = torch.optim.AdamW(params, lr=1e-4, fused=True)
g = torch.Generator().manual_seed(1)
vocab = model.config.vocab_size


def batch():
    ids = torch.randint(0, vocab, (a.bs, a.seq), generator=g).cuda()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


times, losses = [], []
base = torch.cuda.memory_allocated()
torch.cuda.reset_peak_memory_stats()
prof = None
for i in range(a.warmup + a.steps):
    b = batch()
    torch.cuda.synchronize()
    if a.profile and i == a.warmup + a.steps - 1:
        prof = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
        )
        prof.__enter__()
    t = time.perf_counter()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(**b).loss
    loss.backward()
    opt.step()
    opt.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    times.append(time.perf_counter() - t)
    losses.append(float(loss))
if prof:
    prof.__exit__(None, None, None)
    with open(a.profile, "w") as f:
        f.write(prof.key_averages().table(sort_by="cuda_time_total", row_limit=45, max_name_column_width=90))
steady = sorted(times[a.warmup :])
med = statistics.median(steady)
n = sum(p.numel() for p in params)
row = {
    "impl": a.impl,
    "model": os.path.basename(a.model),
    "bits": a.bits,
    "bs": a.bs,
    "seq": a.seq,
    "gc": a.gc,
    "rank": a.rank,
    "dropout": a.dropout,
    "step_s": round(med, 4),
    "min_s": round(steady[0], 4),
    "tok_s": round(a.bs * a.seq / med),
    "first_s": round(times[0], 2),
    "load_s": round(t_load, 1),
    "import_s": round(t_import, 1),
    "base_gib": round(base / 2**30, 2),
    "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
    "trainable": n,
    "losses": [round(x, 4) for x in losses[:6]],
}
say(row, a.out)
