"""Run by .ci/run in an environment that holds the wheel and its dependencies only: no extras, no Triton on the CPU.

It is run outside the checkout, so what it imports is what was packed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import pathlib

printed = io.StringIO()
with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
    import fastft
assert printed.getvalue() == "", f"import fastft printed {printed.getvalue()!r}"
location = pathlib.Path(fastft.__file__)
assert "site-packages" in location.parts, f"the wheel was not what got imported: {location}"

package = location.parent
assert (package / "py.typed").is_file(), "py.typed is missing from the wheel"
data_files = sorted((package / "demo").rglob("*.jsonl"))
assert data_files, "fastft/demo/*.jsonl is missing from the wheel"
for entry in data_files:
    rows = [json.loads(line) for line in entry.read_text(encoding="utf-8").splitlines()]
    assert rows, f"{entry.name} is empty"

import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                     num_attention_heads=4, num_key_value_heads=2))  # fmt: skip
tokens = torch.randint(128, (2, 9))
stock_loss = model.train()(tokens, labels=tokens).loss
fast_loss = fastft.patch(model)(tokens, labels=tokens).loss
fast_loss.backward()
torch.testing.assert_close(fast_loss, stock_loss, rtol=1e-5, atol=0.0)
triton = "with" if importlib.util.find_spec("triton") else "without"
print(f"wheel: imported from {package}, {len(data_files)} data files, one step on a tiny Llama {triton} Triton")
