"""How a step's time and memory grow with the row and with the model, and how far that is from the limit.

usage: growth.py run MODEL_DIR --shape llama-1b --out FILE.jsonl [--lengths 1024 4096 …] [--plans auto recompute]
       growth.py plot FILE.jsonl --png FILE.png

`run` trains one row of random tokens (QLoRA r=16 over NF4, bf16, fused AdamW; train_step.py's loop) at each length and
plan, MODEL_DIR being a checkpoint of that shape (make_model.py), and prints a JSON line each. The limit is the time
that the products of such a step take at the rate of a large product, measured in the same process, nothing recomputed
(`fastft.bench.roofline.step_cost`). Lines of several models go into one file; `plot` draws them all.
"""

import argparse
import json
import os
import statistics
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def run(a: argparse.Namespace) -> None:
    import torch

    import fastft
    from fastft import FastModel
    from fastft.bench import limit
    from fastft.bench.registry import find_model
    from fastft.bench.roofline import step_cost
    from fastft.patching import levels, registry, size_plans
    from peers import say

    shape = find_model(a.shape)
    limits = {row["name"]: row for row in limit.measure({"dtype": "bfloat16", "samples": 20})["limits"]}
    tflops = limits["matmul"]["flops"] / statistics.median(limits["matmul"]["samples_ms"]) / 1e9
    model, _ = FastModel.from_pretrained(a.model, max_seq_length=None, load_in_4bit=True, dtype=torch.bfloat16)
    model = FastModel.get_peft_model(model, r=16, lora_alpha=16, random_state=0)
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    backbone = model.get_base_model().model
    generator = torch.Generator().manual_seed(1)
    for plan in a.plans:
        fastft.patch(model, memory_levels=plan)
        for length in a.lengths:
            torch.cuda.empty_cache()
            # In the first steps plans are corrected and graphs captured; long rows have none to capture.
            warmup, steps = (7, 10) if length <= 8192 else (2, 3)
            times = []
            for number in range(warmup + steps):
                ids = torch.randint(0, model.config.vocab_size, (1, length), generator=generator).cuda()
                torch.cuda.synchronize()
                if number == warmup:
                    torch.cuda.reset_peak_memory_stats()
                start = time.perf_counter()
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
                del loss
            row = {
                "shape": shape.name,
                "length": length,
                "plan": plan,
                "step_ms": round(1e3 * statistics.median(times[warmup:]), 2),
                "limit_ms": round(step_cost(shape, 1, length, rank=16, bits=4).flops / tflops / 1e9, 2),
                "limit_tflops": round(tflops, 1),
                "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
                "reserved_gib": round(torch.cuda.memory_reserved() / 2**30, 2),
                "planner": size_plans.summary(registry.site_of(backbone)),
                "graphs": levels.graph_summary(backbone, registry.site_of(backbone)),
                "gpu": torch.cuda.get_device_name(),
                "torch": torch.__version__,
            }
            say(row, a.out)


def plot(a: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with open(a.rows, encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    figure, (time_axes, memory_axes) = plt.subplots(1, 2, figsize=(10.4, 4.4), layout="constrained")
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    for shape, colour in zip(shapes, ("tab:blue", "tab:green", "tab:red", "tab:purple"), strict=False):
        for plan, style in (("auto", "o-"), ("recompute", "s:")):
            drawn = sorted((r for r in rows if (r["shape"], r["plan"]) == (shape, plan)), key=lambda r: r["length"])
            if not drawn:
                continue
            lengths = [row["length"] for row in drawn]
            options = {"color": colour, "label": f"{shape}, {plan}", "markersize": 4}
            time_axes.plot(lengths, [row["step_ms"] for row in drawn], style, **options)
            memory_axes.plot(lengths, [row["peak_gib"] for row in drawn], style, **options)
            if plan == "auto":
                time_axes.plot(lengths, [row["limit_ms"] for row in drawn], "--", color=colour, lw=1)
    time_axes.plot([], [], "k--", lw=1, label="limit: products at the measured rate")
    for axes, label in ((time_axes, "ms a step"), (memory_axes, "peak of allocated memory, GiB")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("tokens in the row")
        axes.set_ylabel(label)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(which="both", alpha=0.2)
        axes.legend(fontsize="small")
    figure.suptitle(f"One row, QLoRA r=16, {rows[0]['gpu']}")
    figure.savefig(a.png, dpi=130)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
commands = parser.add_subparsers(required=True)
one = commands.add_parser("run")
one.add_argument("model")
one.add_argument("--shape", required=True)
one.add_argument("--out", required=True)
one.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
one.add_argument("--plans", nargs="+", default=["auto"])
one.set_defaults(do=run)
two = commands.add_parser("plot")
two.add_argument("rows")
two.add_argument("--png", required=True)
two.set_defaults(do=plot)
chosen = parser.parse_args()
chosen.do(chosen)
