"""The user's own path: TRL's SFTTrainer over one peer; seconds a step (median), peak memory, losses; one JSON line.

usage: sft_step.py IMPL MODEL_DIR --bs 2 --seq 2048 [--steps 10] [--no-gc] [--out FILE]      IMPL: hf | unsloth | fastft

One peer a process, because some patch globally. Every row is full length, as after packing; what the trainer adds
(collation, metrics, logging, clipping) is part of the work.
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
ap.add_argument("--steps", type=int, default=10)
ap.add_argument("--no-gc", action="store_true")
ap.add_argument("--bits", type=int, default=4)
ap.add_argument("--out")
ap.add_argument("--optim", default="adamw_torch_fused")
ap.add_argument("--ga", type=int, default=1)
ap.add_argument("--save")
ap.add_argument(
    "--ragged", action="store_true", help="rows of --seq / 8 to --seq tokens, as data is that is not packed"
)
ap.add_argument("--level", help="fastft: a level for all layers instead of the planner")
ap.add_argument("--memory-budget", help="fastft: what the planner may use, such as 8.45GiB")
a = ap.parse_args()
if a.impl == "unsloth":
    from unsloth import FastLanguageModel  # noqa: F401  it must come first
elif a.impl == "fastft":
    from fastft import FastModel, patch  # noqa: F401
import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer
from peers import load_fast, load_stock, say, stock_lora

gc = not a.no_gc
peft_config = None
if a.impl == "hf":
    model = load_stock(a.model, bits=a.bits)
    tok = AutoTokenizer.from_pretrained(a.model)
    peft_config = stock_lora()
else:
    checkpointing = gc and (a.level or True)
    model, tok = load_fast(
        a.impl,
        a.model,
        max_seq_length=a.seq,
        checkpointing=checkpointing,
        bits=a.bits,
        memory_budget=a.memory_budget,
    )
    if a.impl == "fastft":
        patch(model, run_comfort=False)  # one JSON line, and nothing else
g = torch.Generator().manual_seed(1)
rows = torch.randint(0, 256, (a.bs * a.ga * (a.steps + 4), a.seq), generator=g).tolist()
if a.ragged:
    lengths = torch.randint(a.seq // 8, a.seq + 1, (len(rows),), generator=g).tolist()
    rows = [row[:n] for row, n in zip(rows, lengths, strict=True)]
ds = Dataset.from_dict({"input_ids": rows})


class Clock(TrainerCallback):
    t, ts = None, []

    def on_step_begin(self, *_, **__):
        torch.cuda.synchronize()
        Clock.t = time.perf_counter()

    def on_step_end(self, *_, **__):
        torch.cuda.synchronize()
        Clock.ts.append(time.perf_counter() - Clock.t)


kw = {
    "output_dir": os.path.join(os.environ.get("TMPDIR", "/tmp"), "out"),
    "per_device_train_batch_size": a.bs,
    "gradient_accumulation_steps": a.ga,
    "max_steps": a.steps,
    "max_length": a.seq,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "bf16": True,
    "gradient_checkpointing": gc,
    "learning_rate": 1e-4,
    "optim": a.optim,
    "lr_scheduler_type": "constant",
    "disable_tqdm": True,
    "dataset_kwargs": {"skip_prepare_dataset": True},
    "remove_unused_columns": False,
}
tr = SFTTrainer(
    model=model,
    args=SFTConfig(**kw),
    train_dataset=ds,
    processing_class=tok,
    callbacks=[Clock()],
    **({"peft_config": peft_config} if peft_config else {}),
)
torch.cuda.reset_peak_memory_stats()
tr.train()
log = [h for h in tr.state.log_history if "loss" in h]
ts = sorted(Clock.ts[3:])
med = statistics.median(ts)
row = {
    "path": "sft",
    "impl": a.impl,
    "model": os.path.basename(a.model),
    "bits": a.bits,
    "bs": a.bs,
    "ga": a.ga,
    "seq": a.seq,
    "ragged": a.ragged,
    "gc": gc,
    "step_s": round(med, 4),
    "mean_s": round(statistics.mean(ts), 4),  # what a new length costs counts here, and not in the median
    "min_s": round(ts[0], 4),
    "tok_s": round(sum(map(len, rows)) / len(rows) * a.bs * a.ga / med),
    "first_s": round(Clock.ts[0], 1),
    "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    "losses": [round(h["loss"], 4) for h in log[:6]],
    "grad_norms": [round(float(h.get("grad_norm", 0)), 3) for h in log[:6]],
    "keys": sorted(log[0]),
}
say(row, a.out)
