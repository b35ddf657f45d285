"""When layers are captured and replayed in generation, and that replays are wired to the right numbers; on the CPU.

A stand-in tape (tapes.py) runs what it was given, where a CUDA graph would launch it, and spoils the results of all
others. tests/gpu/test_generation.py has real graphs.
"""

from __future__ import annotations

import contextlib
import gc
import pathlib
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import fastft
from fastft.memory import token_graphs as module
from fastft.patching import levels
from fastft.patching.plan import inner_model
from tests import support
from tests.memory.tapes import Tape, install
from tests.saving.tokenizers import byte_level

LAYERS, NEW = 3, 8
REPLAYS = LAYERS * (NEW - 2)  # the first token comes of the prompt, the second runs eagerly
GREEDY = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs for CPU layers."""
    install(monkeypatch)


def build(family: str = "llama", **settings: Any) -> Any:
    """A fast model with adapters, in evaluation."""
    return fastft.patch(support.add_lora(support.build_model(family, num_hidden_layers=LAYERS, **settings))).eval()


def graphs_of(model: Any) -> module.TokenGraphs:
    return levels.token_graphs_of(inner_model(model).model)


def prompts(rows: int = 3, seed: int = 0) -> dict[str, Tensor]:
    """Left-padded, every row of another length."""
    ids = torch.randint(3, 128, (rows, 7), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, :row] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def generate(model: Any, batch: dict[str, Tensor], **settings: Any) -> list[Tensor]:
    """The sequences, and the logits of every new token."""
    found = model.generate(**batch, **GREEDY, **settings, return_dict_in_generate=True, output_logits=True)
    return [found.sequences, *found.logits]


def assert_eager_bits(model: Any, ours: list[Tensor], batch: dict[str, Tensor], **settings: Any) -> None:
    """`ours` is what the same generation gives without graphs."""
    fastft.patch(model, cuda_graphs=False)
    theirs = generate(model, batch, **settings)
    fastft.patch(model, cuda_graphs=True)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("settings", [{}, {"cache_implementation": "static", "disable_compile": True}])
def test_replayed_tokens_are_the_eager_ones(family: str, settings: dict[str, Any]) -> None:
    model = build(family)
    ours = generate(model, prompts(), **settings)
    assert graphs_of(model).replays == REPLAYS
    assert graphs_of(model).captured == LAYERS
    assert len(Tape.recorded) == 2 * LAYERS
    assert_eager_bits(model, ours, prompts(), **settings)


@pytest.mark.parametrize("settings", [{"num_beams": 2}, {"do_sample": True, "temperature": 2.0}])
def test_beams_and_samples_are_the_eager_ones(settings: dict[str, Any]) -> None:
    model, found = build(), []
    for graphs in (True, False):
        fastft.patch(model, cuda_graphs=graphs)
        with support.seeded(5):
            found.append(model.generate(**prompts(), **(GREEDY | settings)))
    assert torch.equal(*found)


def test_a_second_generation_starts_with_the_graphs_of_the_first() -> None:
    model = build()
    generate(model, prompts())
    ours = generate(model, prompts(seed=1))
    assert graphs_of(model).replays == REPLAYS + LAYERS * (NEW - 1)
    assert_eager_bits(model, ours, prompts(seed=1))


def test_inference_mode_and_no_grad_take_turns() -> None:
    """A tensor of inference mode cannot be written outside of it."""
    model, found = build(), []
    for mode in (torch.inference_mode, contextlib.nullcontext, torch.inference_mode):
        with mode():
            found.append(generate(model, prompts()))
    assert graphs_of(model).replays == 3 * REPLAYS
    for ours in found:
        assert_eager_bits(model, ours, prompts())


def test_hidden_states_handed_out_are_copies() -> None:
    model, found = build(), []
    for graphs in (True, False):
        fastft.patch(model, cuda_graphs=graphs)
        out = model.generate(**prompts(), **GREEDY, return_dict_in_generate=True, output_hidden_states=True)
        found.append([state for token in out.hidden_states for state in token])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_cache_may_keep_what_it_is_given() -> None:
    """transformers' own caches copy keys and values; another's need not."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    class Keeps(DynamicLayer):
        def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            self.parts = [*getattr(self, "parts", []), (key, value)]
            self.is_initialized = True
            self.keys, self.values = (torch.cat(tensors, -2) for tensors in zip(*self.parts, strict=True))
            return self.keys, self.values

    def with_cache() -> list[Tensor]:
        cache = DynamicCache()
        cache.layers = [Keeps() for _ in range(LAYERS)]
        return generate(model, prompts(), past_key_values=cache)

    model = build()
    ours = with_cache()
    assert graphs_of(model).replays == REPLAYS
    fastft.patch(model, cuda_graphs=False)
    assert all(torch.equal(a, b) for a, b in zip(ours, with_cache(), strict=True))


def test_a_second_thread_in_the_middle_of_a_layer_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers are the first one's."""
    model, found = build(), []
    attend = module.attention_half.attend

    def generate_elsewhere(*arguments: Any, **named: Any) -> Any:
        if graphs_of(model).captured == LAYERS and not found:
            found.append(None)
            with ThreadPoolExecutor(1) as pool:
                found[0] = pool.submit(generate, model, prompts(seed=4)).result()
        return attend(*arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(module.attention_half, "attend", generate_elsewhere)
        ours = generate(model, prompts())
    assert_eager_bits(model, ours, prompts())
    assert_eager_bits(model, found[0], prompts(seed=4))


def test_adapters_written_in_place_are_seen() -> None:
    model = build()
    generate(model, prompts())
    support.randomize_adapters(model, seed=7)
    ours = generate(model, prompts())
    assert graphs_of(model).replays == REPLAYS + LAYERS * (NEW - 1)
    assert_eager_bits(model, ours, prompts())


@pytest.mark.parametrize("change", ["moved", "scaled", "other dtype"])
def test_a_changed_adapter_is_captured_anew(change: str) -> None:
    model = build()
    generate(model, prompts())
    layer = inner_model(model).model.layers[1]
    projection = layer.mlp.down_proj
    if change == "moved":
        projection.lora_A["default"].weight.data = projection.lora_A["default"].weight.data * -2
    elif change == "scaled":
        projection.scaling["default"] *= 3
    else:
        for matrices in (projection.lora_A, projection.lora_B):
            matrices["default"].weight.data = matrices["default"].weight.data.to(torch.bfloat16)
    ours = generate(model, prompts())
    assert graphs_of(model).replays == REPLAYS + LAYERS * (NEW - 1) - 1  # but that layer's first token
    assert len(Tape.recorded) == 2 * LAYERS + 2
    assert Tape.made == 1, "the pool of the other layers' graphs goes on"
    assert_eager_bits(model, ours, prompts())


def test_adapters_switched_off_in_the_middle() -> None:
    """Each token is compared before it is replayed."""

    def decode(model: Any) -> list[Tensor]:
        batch, found = prompts(), []
        with torch.no_grad():
            out = model(**batch, use_cache=True)
            for step in range(8):
                token, mask = out.logits[:, -1:].argmax(-1), batch["attention_mask"]
                batch["attention_mask"] = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
                scope = model.disable_adapter() if step in (4, 6) else contextlib.nullcontext()
                with scope:
                    out = model(
                        input_ids=token,
                        attention_mask=batch["attention_mask"],
                        past_key_values=out.past_key_values,
                        use_cache=True,
                    )
                found.append(out.logits)
        return found

    model = build()
    ours = decode(model)
    assert graphs_of(model).replays == LAYERS * 3  # the second to the fourth; from then on no two are alike
    fastft.patch(model, cuda_graphs=False)
    assert all(torch.equal(a, b) for a, b in zip(ours, decode(model), strict=True))


def test_another_number_of_rows_is_captured_anew_in_a_pool_of_its_own() -> None:
    """PyTorch ends a pool with its last graph: to go on with that one is an error."""
    model = build()
    generate(model, prompts())
    ours = generate(model, prompts(rows=2))
    assert graphs_of(model).replays == 2 * REPLAYS
    assert Tape.made == 2
    assert_eager_bits(model, ours, prompts(rows=2))


def test_training_gives_the_graphs_back() -> None:
    model = build()
    generate(model, prompts())
    ids = prompts()["input_ids"]
    model.train()(input_ids=ids, labels=ids).loss.backward()
    assert graphs_of(model).captured == 0
    assert [graph() for graph in Tape.recorded if graph() is not None] == []
    ours = generate(model.eval(), prompts())
    assert graphs_of(model).replays == 2 * REPLAYS
    assert_eager_bits(model, ours, prompts())


@pytest.mark.parametrize("fails_at", [0, 1, 4])
def test_a_capture_that_fails_leaves_eager_tokens_and_says_so(fails_at: int) -> None:
    model = build()
    Tape.fails_at = fails_at
    ours = generate(model, prompts())
    assert graphs_of(model).captured == 0
    assert graphs_of(model).reason == "capture failed: no capture today"
    if fails_at == 0:
        assert "none in generation; capture failed: no capture today" in str(fastft.report(model))
    assert_eager_bits(model, ours, prompts())


def test_the_report_counts_and_switching_off_is_heeded() -> None:
    model = build()
    generate(model, prompts())
    assert f"CUDA graphs: in generation {REPLAYS} layers' tokens replayed" in str(fastft.report(model))
    fastft.patch(model, cuda_graphs=False)
    assert graphs_of(model).captured == 0
    generate(model, prompts())
    assert graphs_of(model).replays == REPLAYS
    assert "CUDA graphs: switched off" in str(fastft.report(model))


def test_gradients_over_a_cache_stay_with_the_stock_layer() -> None:
    model = build()
    batch = prompts()
    with torch.no_grad():
        cache = model(**batch, use_cache=True).past_key_values
    for _ in range(3):
        out = model(input_ids=batch["input_ids"][:, :1], past_key_values=cache, use_cache=True)
        assert out.logits.requires_grad
    assert graphs_of(model).replays == 0


def test_graphs_do_not_keep_a_model_alive() -> None:
    model = build()
    generate(model, prompts())
    died = weakref.ref(inner_model(model).model.layers[0])
    del model
    gc.collect()
    assert died() is None


@pytest.mark.trl
@pytest.mark.slow
def test_trls_grpo_is_replayed_and_logs_the_same(tmp_path: pathlib.Path) -> None:
    """Sampled completions, and what follows from them."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    logs = []
    for replays in (True, False):
        model = fastft.patch(support.add_lora(support.build_model(vocab_size=300)), cuda_graphs=replays)
        trainer = GRPOTrainer(
            model=model,
            processing_class=byte_level(),
            reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
            train_dataset=Dataset.from_list([{"prompt": "abc" * i} for i in range(1, 9)]),
            args=GRPOConfig(
                output_dir=str(tmp_path),
                per_device_train_batch_size=4,
                num_generations=4,
                max_completion_length=10,
                max_steps=3,
                logging_steps=1,
                report_to=[],
                use_cpu=True,
            ),
        )
        trainer.train()
        logs.append([entry for entry in trainer.state.log_history if "loss" in entry])
        assert (graphs_of(model).replays > 0) == replays
    assert any(entry["reward"] != logs[0][0]["reward"] for entry in logs[0]), "the completions are all alike"
    for ours, theirs in zip(*logs, strict=True):
        for name in ("loss", "grad_norm", "reward", "completions/mean_length", "num_tokens"):
            assert ours[name] == theirs[name], name
