"""Greedy text in bfloat16, stock against fastft: how many rows leave stock's, and how close to a tie stock was there.

usage: greedy_ties.py MODEL --prompts FILE.jsonl [--rows 64] [--new 128] [--adapter-noise 0.0] [--out FILE.json]

MODEL is a folder or a hub name, FILE holds GSM8K's "question" a line. GRPO and RLOO sample from the model they train,
so a kernel that changes the text changes the training. One model in NF4 (no second copy), LoRA r=16; `--adapter-noise`
gives its B matrices random values of that deviation, so that the adapters do something. Where the two texts first
differ both chose by logits of the same prefix: the gap between stock's best two there, and the largest difference of
any logit over the common prefix (the measured logit error), are what the JSON line states.
"""

import argparse
import json
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ap = argparse.ArgumentParser()
ap.add_argument("model")
ap.add_argument("--prompts", required=True)
ap.add_argument("--rows", type=int, default=64)
ap.add_argument("--new", type=int, default=128)
ap.add_argument("--adapter-noise", type=float, default=0.0)
ap.add_argument("--out")
a = ap.parse_args()
import torch

import fastft
from fastft import FastModel
from peers import say

model, tokenizer = FastModel.from_pretrained(a.model, max_seq_length=1024, load_in_4bit=True, dtype=torch.bfloat16)
model = FastModel.get_peft_model(model, r=16, lora_alpha=16, random_state=0).eval()
torch.manual_seed(0)
for name, parameter in model.named_parameters():
    if a.adapter_noise and "lora_B" in name:
        parameter.data.normal_(std=a.adapter_noise)
with open(a.prompts, encoding="utf-8") as lines:
    questions = [json.loads(line)["question"] for line in lines][: a.rows]
texts = [
    tokenizer.apply_chat_template([{"role": "user", "content": q}], tokenize=False, add_generation_prompt=True)
    for q in questions
]
tokenizer.padding_side = "left"
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)


def generate() -> tuple[torch.Tensor, torch.Tensor]:
    """New tokens `[rows, new]` and the logits `[new, rows, vocabulary]` they were chosen by."""
    settings = {"max_new_tokens": a.new, "min_new_tokens": a.new, "do_sample": False, "repetition_penalty": 1.0}
    found = model.generate(**batch, **settings, return_dict_in_generate=True, output_logits=True)
    return found.sequences[:, -a.new :], torch.stack(found.logits).float()


with fastft.stock_only():
    expected, theirs = generate()
    again, _ = generate()
tokens, ours = generate()
gaps, errors, places, largest = [], [], [], []
for row in range(tokens.shape[0]):
    unequal = (tokens[row] != expected[row]).nonzero()
    last = int(unequal[0]) if len(unequal) else a.new - 1
    # Logits that the generation config forbids (an end token, before `min_new_tokens`) are not part of it: raw logits.
    errors.append((ours[: last + 1, row] - theirs[: last + 1, row]).abs().max().item())
    largest.append(theirs[: last + 1, row].abs().max().item())
    if len(unequal):
        first, second = theirs[last, row].topk(2).values.tolist()
        gaps.append((round(first - second, 4), round(errors[-1], 4)))
        places.append(last)
result = {
    "model": os.path.basename(a.model),
    "rows": len(errors),
    "new_tokens": a.new,
    "adapter_noise": a.adapter_noise,
    "stock_repeats_itself": bool(torch.equal(expected, again)),
    "rows_that_differ": len(gaps),
    "first_difference_at": places,
    "gap_and_error": gaps,
    "gaps_above_the_error": sum(gap > error for gap, error in gaps),
    "largest_error": round(max(errors), 4),
    "largest_logit": round(max(largest), 2),
    "fastft": fastft.__version__,
    "torch": torch.__version__,
    "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
}
say(result, a.out)
