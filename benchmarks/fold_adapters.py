"""What folding adapters into the dequantized weights does to a loss curve: the same run joined (default) and folded.

usage: fold_adapters.py MODEL --text FILE.jsonl [--steps 60] [--rows 4] [--length 128] [--seeds 2] [--out FILE.csv]

QLoRA r=16 over `MODEL` (a folder, hub name or .gguf file), bf16, AdamW 2e-4, full rows cut from the file's "question"
and "answer" fields (GSM8K's names). For scale, the joined run is also done with another rounding of nothing but its
sums (rows in reverse order): what two runs differ by that are equally right. CPU or GPU.
"""

import argparse
import csv
import json
import statistics

import torch

import fastft
from fastft import FastModel

ap = argparse.ArgumentParser()
ap.add_argument("model")
ap.add_argument("--text", required=True)
ap.add_argument("--steps", type=int, default=60)
ap.add_argument("--rows", type=int, default=4)
ap.add_argument("--length", type=int, default=128)
ap.add_argument("--seeds", type=int, default=1)
ap.add_argument("--out")
a = ap.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"


def curve(kind: str, seed: int) -> list[float]:
    model, tokenizer = FastModel.from_pretrained(a.model, load_in_4bit=True, dtype=torch.bfloat16)
    model = FastModel.get_peft_model(model, r=16, lora_alpha=16, random_state=seed, use_gradient_checkpointing="keep")
    fastft.patch(model, approximations=("fold_adapters",) if kind == "folded" else ())
    with open(a.text, encoding="utf-8") as lines:
        text = "\n\n".join(f"{row['question']}\n{row['answer']}" for row in map(json.loads, lines))
    tokens = torch.tensor(tokenizer(text[: 12 * a.steps * a.rows * a.length]).input_ids)
    batches = tokens[: a.steps * a.rows * a.length].view(a.steps, a.rows, a.length)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
    model.train()
    losses = []
    for ids in batches:
        ids = (ids.flip(0) if kind == "reversed" else ids).to(device)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
    return losses


rows = []
for seed in range(a.seeds):
    curves = {kind: curve(kind, seed) for kind in ("joined", "folded", "reversed")}
    for step, values in enumerate(zip(*curves.values(), strict=True)):
        rows.append({"seed": seed, "step": step} | dict(zip(curves, values, strict=True)))
    tail = slice(-max(1, a.steps // 4), None)
    means = {kind: statistics.mean(losses[tail]) for kind, losses in curves.items()}
    gaps = {
        kind: statistics.mean(abs(x - y) for x, y in zip(curves[kind], curves["joined"], strict=True))
        for kind in ("folded", "reversed")
    }
    print(json.dumps({"seed": seed, "first": curves["joined"][0], "mean of the last quarter": means, "mean gap": gaps}))
if a.out:
    with open(a.out, "w", newline="") as out:
        writer = csv.DictWriter(out, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
