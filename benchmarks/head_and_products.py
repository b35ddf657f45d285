"""Head and loss beside the two matrix products that nobody can leave out, in one process and in turns.

usage: head_and_products.py [--tokens 8192] [--hidden 4096] [--vocabulary 128256] [--rows 2048] [--rounds 7]

`loss`: `fastft.functional.linear_cross_entropy`, forward and backward, the head frozen, every row counted. `products`:
hidden · headᵀ and gradient · head over the same chunks of `--rows` into buffers that are there already: no kernel, no
allocation. Milliseconds are medians of each round's median; what a GPU sustains falls as it gets warm, hence turns.
"""

import argparse
import json
import statistics

import torch
import triton

from fastft import functional

ap = argparse.ArgumentParser()
ap.add_argument("--tokens", type=int, default=8192)
ap.add_argument("--hidden", type=int, default=4096)
ap.add_argument("--vocabulary", type=int, default=128256)
ap.add_argument("--rows", type=int, default=2048)
ap.add_argument("--rounds", type=int, default=7)
a = ap.parse_args()
torch.manual_seed(0)
options = {"device": "cuda", "dtype": torch.bfloat16}
hidden = torch.randn(a.tokens, a.hidden, **options).requires_grad_()
head = torch.randn(a.vocabulary, a.hidden, **options) * 0.02
labels = torch.randint(0, a.vocabulary, (a.tokens,), device="cuda")
logits = torch.empty(a.rows, a.vocabulary, **options)
gradient = torch.empty(a.tokens, a.hidden, **options)


def loss() -> None:
    torch.autograd.grad(functional.linear_cross_entropy(hidden, head, labels), hidden)


def products() -> None:
    with torch.no_grad():
        for start in range(0, a.tokens, a.rows):
            rows = hidden[start : start + a.rows]
            torch.mm(rows, head.t(), out=logits[: len(rows)])
            torch.mm(logits[: len(rows)], head, out=gradient[start : start + a.rows])


found: dict[str, list[float]] = {"loss": [], "products": []}
for _ in range(a.rounds):
    for name, work in (("loss", loss), ("products", products)):
        found[name].append(triton.testing.do_bench(work, warmup=60, rep=300, return_mode="median"))
medians = {name: round(statistics.median(times), 2) for name, times in found.items()}
ratio = round(statistics.median(x / y for x, y in zip(found["loss"], found["products"], strict=True)), 3)
where = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
print(json.dumps({"shape": [a.tokens, a.hidden, a.vocabulary], **medians, "ratio": ratio, **where}))
