"""Does it train the same? One model, one dataset, several seeds: stock and fastft through the same SFTTrainer.

usage: loss_curves.py run MODEL --train FILE.jsonl --test FILE.jsonl --impl stock --seed 0 --out FOLDER [--steps 1000]
       loss_curves.py table FOLDER [--csv FILE]
       loss_curves.py plot FOLDER --png FILE
IMPL: stock | float32 (stock, its base and activations in float32) | fast | folded | skipped (fast with that
approximation, docs/approximations.md).

One run a process. MODEL is a folder or a hub name; the files hold GSM8K's fields, "question" and "answer". QLoRA r=16
on the seven projections over NF4, bfloat16, batches of 8, AdamW 2e-4 falling to nothing; the loss counts answers only.
A seed decides the adapters' start and the order of the rows; the evaluation is the mean loss over the first rows of
the test file, in the end. `table` compares the gap to stock with the spread of stock's own seeds.
"""

import argparse
import json
import os
import pathlib
import statistics
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
WINDOW = 100  # steps that a point of the table is a mean over
# float32 shows what rounding of activations costs stock. In both, as in "fast", SFTTrainer makes the adapters bfloat16.
STOCK = ("stock", "float32")
COLOURS = {
    "stock": "tab:gray",
    "float32": "black",
    "fast": "tab:blue",
    "folded": "tab:orange",
    "skipped": "tab:green",
}


def rows(path: str, count: int | None = None) -> list[dict]:
    with open(path, encoding="utf-8") as lines:
        read = [json.loads(line) for line in lines][:count]
    return [
        {
            "prompt": [{"role": "user", "content": row["question"]}],
            "completion": [{"role": "assistant", "content": row["answer"]}],
        }
        for row in read
    ]


def load(a: argparse.Namespace) -> tuple:
    import torch

    if a.impl not in STOCK:
        import fastft
        from fastft import FastModel

        model, tokenizer = FastModel.from_pretrained(
            a.model, max_seq_length=512, load_in_4bit=True, dtype=torch.bfloat16
        )
        model = FastModel.get_peft_model(model, r=16, lora_alpha=16, random_state=a.seed)
        approximations = {"folded": ["fold_adapters"], "skipped": ["skip_probabilities"]}
        fastft.patch(model, approximations=approximations.get(a.impl, []))
        return model, tokenizer
    from peft import get_peft_model
    from transformers import AutoTokenizer, set_seed

    from peers import load_stock, stock_lora

    dtype = torch.float32 if a.impl == "float32" else torch.bfloat16
    model = load_stock(a.model, dtype=dtype, device_map="auto")
    set_seed(a.seed)
    return get_peft_model(model, stock_lora()), AutoTokenizer.from_pretrained(a.model)


def run(a: argparse.Namespace) -> None:
    folder = pathlib.Path(a.out)
    folder.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load(a)
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(folder / f"trainer-{a.impl}-{a.seed}"),
            max_steps=a.steps,
            per_device_train_batch_size=8,
            per_device_eval_batch_size=8,
            learning_rate=2e-4,
            lr_scheduler_type="linear",
            warmup_steps=a.steps // 20,
            max_length=512,
            bf16=torch.cuda.is_available() and a.impl != "float32",
            gradient_checkpointing=a.impl not in STOCK,  # stock goes faster without, and has the room
            logging_steps=1,
            seed=a.seed,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(rows(a.train)),
        eval_dataset=Dataset.from_list(rows(a.test, a.test_rows)),
        processing_class=tokenizer,
    )
    start = time.perf_counter()
    try:
        trainer.train()
        seconds = time.perf_counter() - start
        evaluation = trainer.evaluate()["eval_loss"]
    finally:  # a run that was stopped has losses too
        log = [entry for entry in trainer.state.log_history if "loss" in entry]
        result = {
            "impl": a.impl,
            "seed": a.seed,
            "losses": [round(entry["loss"], 5) for entry in log],
            "grad_norms": [round(float(entry["grad_norm"]), 4) for entry in log],
        }
        path = folder / f"{a.impl}-{a.seed}.json"
        path.write_text(json.dumps(result))
    path.write_text(json.dumps(result | {"seconds": round(seconds, 1), "eval_loss": round(evaluation, 5)}))
    print(a.impl, a.seed, "eval", round(evaluation, 4), "seconds", round(seconds, 1), flush=True)


def results(folder: str) -> dict[str, dict[int, dict]]:
    found: dict[str, dict[int, dict]] = {}
    for path in sorted(pathlib.Path(folder).glob("*-*.json")):
        result = json.loads(path.read_text())
        found.setdefault(result["impl"], {})[result["seed"]] = result
    return found


def table(a: argparse.Namespace) -> None:
    found = results(a.folder)
    for impl, runs in found.items():
        ends = [statistics.mean(r["losses"][-WINDOW:]) for r in runs.values()]
        evaluations = [r["eval_loss"] for r in runs.values() if "eval_loss" in r]
        print(impl, "seeds", sorted(runs), "last", [round(e, 4) for e in ends], "eval", evaluations)
        print("   mean of the last:", round(statistics.mean(ends), 5), "eval:", round(statistics.mean(evaluations), 5))
    stock = found["stock"]
    for impl in found:
        for seed, result in found[impl].items():
            if impl == "stock" or seed not in stock:
                continue
            gaps = [abs(x - y) for x, y in zip(result["losses"], stock[seed]["losses"], strict=True)]
            print(f"{impl} {seed}: mean |gap| to stock's same seed, a step: {statistics.mean(gaps):.5f}")
    if a.csv:
        import csv

        with open(a.csv, "w", newline="", encoding="utf-8") as out:
            writer = csv.writer(out)
            names = [(impl, seed) for impl in found for seed in sorted(found[impl])]
            writer.writerow(["step", *(f"{impl}-{seed}" for impl, seed in names)])
            for step, losses in enumerate(zip(*(found[i][s]["losses"] for i, s in names), strict=True)):
                writer.writerow([step + 1, *losses])
            writer.writerow(["eval", *(found[i][s].get("eval_loss") for i, s in names)])


def plot(a: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = results(a.folder)
    figure, (axes, gaps) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, layout="constrained")
    for impl, colour in COLOURS.items():
        for number, (seed, result) in enumerate(sorted(found.get(impl, {}).items())):
            options = {"color": colour, "lw": 1.2, "label": impl if number == 0 else None}
            style, losses = ("-", "--", ":")[seed % 3], result["losses"]
            axes.plot(*smoothed(losses), style, **options)
            if impl != "stock" and seed in found["stock"]:
                stock = found["stock"][seed]["losses"]
                gaps.plot(*smoothed([x - y for x, y in zip(losses, stock, strict=True)]), style, **options)
    axes.set_ylabel("training loss, mean over 50 steps")
    axes.set_title("SmolLM2-135M on GSM8K: a line style is a seed")
    axes.legend()
    gaps.axhline(0, color=COLOURS["stock"], lw=1.2)
    gaps.set_xlabel("step")
    gaps.set_ylabel("less stock's of the same seed")
    gaps.set_ylim(-0.02, 0.01)
    figure.savefig(a.png, dpi=120)


def smoothed(values: list[float]) -> tuple[range, list[float]]:
    """Every tenth step, and the mean over the 50 around it."""
    steps = range(0, len(values), 10)
    return steps, [statistics.mean(values[max(0, i - 25) : i + 25]) for i in steps]


ap = argparse.ArgumentParser()
modes = ap.add_subparsers(required=True)
one = modes.add_parser("run")
one.add_argument("model")
one.add_argument("--train", required=True)
one.add_argument("--test", required=True)
one.add_argument("--test-rows", type=int, default=400)
one.add_argument("--impl", choices=("stock", "float32", "fast", "folded", "skipped"), required=True)
one.add_argument("--seed", type=int, default=0)
one.add_argument("--steps", type=int, default=1000)
one.add_argument("--out", required=True)
one.set_defaults(do=run)
summed = modes.add_parser("table")
summed.add_argument("folder")
summed.add_argument("--csv")
summed.set_defaults(do=table)
drawn = modes.add_parser("plot")
drawn.add_argument("folder")
drawn.add_argument("--png", required=True)
drawn.set_defaults(do=plot)
parsed = ap.parse_args()
parsed.do(parsed)
