"""transformers 5 models under Thunder: prepared, jitted, compared with themselves."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import fastft
import fastft.integrations.thunder as fastft_thunder
from tests import support
from tests.integrations.thunder.harness import backward_names, forward_names, jit


@pytest.mark.parametrize(
    "adapters",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["all weights", "PEFT LoRA"],
)
def test_llama_trains_on_all_four_operators(adapters: bool) -> None:
    model: Any = support.build_model("llama", num_hidden_layers=1)
    if adapters:
        model = support.add_lora(model)
    batch = support.random_batch() | {"num_items_in_batch": torch.tensor(11)}
    loss = model(**batch).loss
    loss.backward()
    theirs = support.trainable_gradients(model)
    model.zero_grad()
    prepared = fastft_thunder.prepare_hf(model)
    jitted = jit(model)
    ours = jitted(**batch)["loss"]
    ours.backward()
    torch.testing.assert_close(ours, loss)
    for name, grad in support.trainable_gradients(model).items():
        torch.testing.assert_close(grad, theirs[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    forward = {"rms_norm": 3, "rope": 1, "swiglu": 1, "cross_entropy": 1}
    forward["attention"] = 1
    assert forward_names(jitted) == forward | {"kept": 2}
    backward = {f"{name}_backward": count for name, count in forward.items()} | {"rms_norm": 3, "swiglu": 1}
    if adapters:
        backward["rms_norm_backward"] = 2  # the first norm's input is the embedding, which is frozen
    assert backward_names(jitted) == Counter(backward)
    assert (prepared.norms, prepared.mlps, prepared.notes) == (3, 1, [])
    prepared.undo()
    assert not any("forward" in module.__dict__ for module in model.modules())


def step(model: Any, run: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients; without a cache, beside which stock does not look for documents."""
    model.zero_grad()
    loss = run(**batch, use_cache=False)["loss"]
    loss.backward()
    return loss.detach(), support.trainable_gradients(model)


def packed(*lengths: int) -> dict[str, torch.Tensor]:
    """Documents of these lengths in one row, the first token of each no target."""
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    ids = torch.randint(3, 128, positions.shape, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


ROWS = support.random_batch(padded=False)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], bool]] = {
    # family, settings, batch, whether attention is causal and nothing else, and so ours
    "packed documents": ("llama", {}, packed(5, 8), False),
    "a window": ("mistral", {"sliding_window": 4}, ROWS, False),
    "a window wider than the rows": ("mistral", {"sliding_window": 64}, ROWS, True),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_that_need_no_mask_get_none(case: str) -> None:
    """transformers makes no mask for them in eager torch either; in a trace it cannot look at the positions."""
    family, settings, batch, causal = CASES[case]
    model: Any = support.build_model(family, num_hidden_layers=1, **settings)
    loss, theirs = step(model, model, batch)
    fastft_thunder.prepare_hf(model)
    fastft_thunder.executor.clear()
    jitted = jit(model)
    ours_loss, ours = step(model, jitted, batch)
    torch.testing.assert_close(ours_loss, loss)
    for name, grad in ours.items():
        torch.testing.assert_close(grad, theirs[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert forward_names(jitted)["attention"] == causal
    declined = fastft_thunder.executor.declined.get("scaled_dot_product_attention", set())
    assert declined == (set() if causal else {"a mask"})


class Packs(torch.nn.Module):
    """Counts the positions of two documents inside the program, given none of them."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.cat([torch.arange(5), torch.arange(8)])[None]
        return self.model(input_ids=ids, position_ids=positions, use_cache=False)["logits"]


def test_positions_that_a_program_counts_for_two_documents_keep_them_apart() -> None:
    model: Any = support.build_model("llama", num_hidden_layers=1)
    ids = packed(5, 8)["input_ids"]
    with torch.no_grad():
        apart = torch.cat([model(input_ids=part).logits for part in ids.split([5, 8], dim=1)], 1)
        fastft_thunder.prepare_hf(model)
        torch.testing.assert_close(jit(Packs(model))(ids), apart)


def test_what_prepare_hf_binds_computes_what_the_modules_compute() -> None:
    """Without Thunder too, in a family with further norms; and the model is itself again afterwards."""
    model = support.build_model("qwen3")
    layer, x, head = model.model.layers[0], torch.randn(2, 3, 64), torch.randn(2, 3, 4, 16)
    parts = ((layer.mlp, x), (layer.input_layernorm, x), (layer.self_attn.q_norm, head))
    expected = [part(value) for part, value in parts]
    prepared = fastft_thunder.prepare_hf(model)
    for (part, value), output in zip(parts, expected, strict=True):
        torch.testing.assert_close(part(value), output)
        assert "forward" in part.__dict__
    assert (prepared.norms, prepared.mlps) == (9, 2)
    prepared.undo()
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("enabled", [False, True])
def test_the_hook_on_the_embeddings_comes_back(enabled: bool) -> None:
    """PEFT sets it for gradient checkpointing: without it reentrant checkpoints leave adapters without a gradient."""
    model = support.build_model()
    model.requires_grad_(False)
    if enabled:
        model.enable_input_require_grads()
    prepared = fastft_thunder.prepare_hf(model)
    ids = torch.ones(1, 3, dtype=torch.long)
    assert not model.model.embed_tokens(ids).requires_grad
    prepared.undo()
    prepared.undo()
    assert model.model.embed_tokens(ids).requires_grad is enabled
    assert len(model.model.embed_tokens._forward_hooks) == enabled


def test_a_planned_model_and_no_model_are_refused() -> None:
    with pytest.raises(ValueError, match=r"fastft\.unpatch"):
        fastft_thunder.prepare_hf(fastft.patch(support.build_model()))
    with pytest.raises(TypeError, match="got Linear"):
        fastft_thunder.prepare_hf(torch.nn.Linear(2, 2))


def test_a_forward_of_somebody_else_s_is_left_alone_and_noted() -> None:
    model = support.build_model()
    mlp = model.model.layers[0].mlp
    mlp.forward = foreign = lambda x: x
    prepared = fastft_thunder.prepare_hf(model)
    assert prepared.mlps == 1
    assert any("LlamaMLP has its own forward" in note for note in prepared.notes)
    prepared.undo()
    assert mlp.forward is foreign
