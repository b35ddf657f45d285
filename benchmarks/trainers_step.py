"""TRL's trainers over one implementation: seconds a step (median), peak memory, tokens a second; one JSON line.

usage: trainers_step.py TRAINER IMPL MODEL_DIR [--bs 8] [--steps 10] [--out FILE]
TRAINER: sft-padded | sft-packed | dpo | grpo            IMPL: hf | fastft | unsloth

sft-padded and sft-packed train on the same documents of log-normal lengths (mean 300, sigma 0.6, at most 2,048):
batches of 8 padded to the longest, or rows that bfd packing has filled, as many as make the same most tokens a step;
what counts is real tokens a second. dpo: pairs of 256 + 256 tokens, the reference is the policy without its adapter.
grpo: 8 completions of 128 random tokens to a prompt of 128, by `generate`, temperature 1, no vLLM. QLoRA r=16 over NF4,
bf16, fused AdamW. One peer a process, because some patch globally.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ap = argparse.ArgumentParser()
ap.add_argument("trainer", choices=("sft-padded", "sft-packed", "dpo", "grpo"))
ap.add_argument("impl", choices=("hf", "fastft", "unsloth"))
ap.add_argument("model")
ap.add_argument("--bs", type=int, default=8)
ap.add_argument("--steps", type=int, default=10)
ap.add_argument("--length", type=int, default=512, help="dpo: tokens of a prompt and an answer")
ap.add_argument("--completion", type=int, default=128, help="grpo: tokens generated")
ap.add_argument("--no-gc", action="store_true")
ap.add_argument("--out")
a = ap.parse_args()
gc = not a.no_gc
if a.impl == "unsloth":
    from unsloth import FastLanguageModel  # noqa: F401  it must come first
elif a.impl == "fastft":
    from fastft import FastModel  # noqa: F401
import numpy as np
import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from peers import load_fast, load_stock, say, stock_lora

WARMUP = 4
LONGEST = 2048
random = np.random.default_rng(0)
lora = None
if a.impl == "hf":
    model = load_stock(a.model, device_map="auto")
    tokenizer = AutoTokenizer.from_pretrained(a.model)
    lora = stock_lora()
else:
    model, tokenizer = load_fast(a.impl, a.model, max_seq_length=LONGEST, checkpointing=gc)


class Clock(TrainerCallback):
    """Times whole iterations: from the end of a step to the end of the next, data and generation included."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: object, **__: object) -> None:
        torch.cuda.synchronize()
        self.ends.append(time.perf_counter())


def ids(length: int) -> list[int]:
    return random.integers(0, 256, length).tolist()


def text(length: int) -> str:
    return "".join(chr(c) for c in random.integers(97, 123, length))


clock = Clock()
steps = a.steps + WARMUP
settings = {
    "output_dir": os.path.join(os.environ.get("TMPDIR", "/tmp"), "trainers_step"),
    "per_device_train_batch_size": a.bs,
    "max_steps": steps,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "bf16": True,
    "gradient_checkpointing": gc,
    "learning_rate": 1e-4,
    "optim": "adamw_torch_fused",
    "lr_scheduler_type": "constant",
    "disable_tqdm": True,
}
common = {"model": model, "processing_class": tokenizer, "callbacks": [clock]}
if lora is not None:
    common["peft_config"] = lora
shape = {}
if a.trainer.startswith("sft"):
    from trl import SFTConfig, SFTTrainer

    sigma = 0.6
    lengths = np.exp(random.normal(np.log(300) - sigma**2 / 2, sigma, a.bs * steps)).astype(int).clip(16, LONGEST)
    documents = [ids(length) for length in lengths]
    most = int(lengths.max()) * a.bs  # tokens of the largest padded batch
    shape = {"most_tokens": most, "mean_length": round(float(lengths.mean()))}
    if a.trainer == "sft-packed":
        rows = max(1, round(most / LONGEST))
        settings |= {"packing": True, "max_length": LONGEST, "per_device_train_batch_size": rows}
        documents = [ids(n) for n in np.tile(lengths, 1 + 2 * most // (a.bs * 300))]
    else:
        settings |= {"max_length": LONGEST}
    dataset = Dataset.from_dict({"input_ids": documents})
    trainer = SFTTrainer(args=SFTConfig(**settings), train_dataset=dataset, **common)
elif a.trainer == "dpo":
    from trl import DPOConfig, DPOTrainer

    half = a.length // 2
    dataset = Dataset.from_list(
        [{"prompt": text(half), "chosen": text(half), "rejected": text(half)} for _ in range(a.bs * steps)]
    )
    trainer = DPOTrainer(args=DPOConfig(**settings, max_length=2 * a.length), train_dataset=dataset, **common)
else:
    from trl import GRPOConfig, GRPOTrainer

    dataset = Dataset.from_list([{"prompt": text(128)} for _ in range(a.bs * steps)])
    trainer = GRPOTrainer(
        args=GRPOConfig(**settings, num_generations=a.bs, max_completion_length=a.completion),
        reward_funcs=lambda completions, **_: [float(len(set(c))) for c in completions],
        train_dataset=dataset,
        **common,
    )
torch.cuda.reset_peak_memory_stats()
trainer.train()
log = [entry for entry in trainer.state.log_history if "loss" in entry]
times = [end - start for start, end in zip(clock.ends, clock.ends[1:], strict=False)][WARMUP - 1 :]
row = {
    "trainer": a.trainer,
    "impl": a.impl,
    "model": os.path.basename(a.model),
    "bs": settings["per_device_train_batch_size"],
    "gc": gc,
    "step_s": round(statistics.median(times), 4),
    "min_s": round(min(times), 4),
    "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    "losses": [round(entry["loss"], 4) for entry in log[:4]],
    **shape,
}
if "num_tokens" in log[-1]:  # counted by TRL, padding left out
    counted = log[-1]["num_tokens"] - log[WARMUP - 1]["num_tokens"]
    row["real_tokens_s"] = round(counted / (clock.ends[-1] - clock.ends[WARMUP - 1]))
say(row, a.out)
