"""FastModel from a name to a trained and saved adapter, on tiny checkpoints in a temporary folder."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

import fastft
from fastft import FastLanguageModel, FastModel
from fastft.patching.registry import site_of
from tests import support

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SCALINGS = {
    "llama3": LLAMA3,
    "linear": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 5e5, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 64},
}


def save_checkpoint(folder: pathlib.Path, family: str = "llama", **settings: Any) -> pathlib.Path:
    support.build_model(family, **settings).save_pretrained(folder)
    support.build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def checkpoint(tmp_path: pathlib.Path) -> pathlib.Path:
    return save_checkpoint(tmp_path / "checkpoint")


def load_16bit(folder: pathlib.Path, **options: Any) -> Any:
    return FastModel.from_pretrained(folder, load_in_4bit=False, **options)[0]


def load_stock(folder: pathlib.Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def linear_kinds(model: torch.nn.Module) -> set[str]:
    return {type(module).__name__ for name, module in model.named_modules() if name.endswith("q_proj")}


def fast_runs(model: torch.nn.Module) -> int:
    return sum(site.fast_runs for module in model.modules() if (site := site_of(module)) is not None)


def train_steps(model: Any, steps: int = 2) -> list[float]:
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(steps):
        loss = model(**support.random_batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# --- from_pretrained --------------------------------------------------------------------------------------------------


def test_the_unsloth_name_is_the_same_object() -> None:
    assert FastLanguageModel is FastModel
    assert fastft.FastModel is FastModel


def test_by_default_a_checkpoint_is_loaded_in_nested_nf4(checkpoint: pathlib.Path) -> None:
    model, tokenizer = FastModel.from_pretrained(str(checkpoint), device_map="cpu")
    assert linear_kinds(model) == {"Linear4bit"}
    weight = model.model.layers[0].self_attn.q_proj.weight
    assert (weight.quant_type, weight.quant_state.nested) == ("nf4", True)
    assert model.model.layers[0].self_attn.q_proj.compute_dtype is torch.float32  # the CPU's choice
    assert model.lm_head.weight.dtype is torch.float32
    assert tokenizer.chat_template == support.CHAT_TEMPLATE


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_asked_dtype_is_what_everything_is_in(checkpoint: pathlib.Path, dtype: str) -> None:
    asked = getattr(torch, dtype)
    assert {p.dtype for p in load_16bit(checkpoint, dtype=dtype).parameters()} == {asked}
    model, _ = FastModel.from_pretrained(checkpoint, dtype=dtype)
    projection = model.model.layers[0].self_attn.q_proj
    assert projection.compute_dtype is projection.weight.quant_state.dtype is asked


def test_the_dtypes_old_name_is_understood(checkpoint: pathlib.Path) -> None:
    assert load_16bit(checkpoint, torch_dtype=torch.bfloat16).dtype is torch.bfloat16


@pytest.mark.parametrize("load_in_4bit", [True, False])
def test_a_checkpoint_in_4_bits_is_kept_as_it_is(
    checkpoint: pathlib.Path, tmp_path: pathlib.Path, load_in_4bit: bool
) -> None:
    first, tokenizer = FastModel.from_pretrained(checkpoint, dtype="bfloat16")
    first.save_pretrained(tmp_path / "quantized")
    tokenizer.save_pretrained(tmp_path / "quantized")
    again, _ = FastModel.from_pretrained(tmp_path / "quantized", load_in_4bit=load_in_4bit, dtype="float32")
    projection, original = (m.model.layers[0].self_attn.q_proj for m in (again, first))
    assert torch.equal(projection.weight.data, original.weight.data)
    assert projection.compute_dtype is torch.float32
    assert load_stock(tmp_path / "quantized").model.layers[0].self_attn.q_proj.compute_dtype is torch.bfloat16


def test_a_given_quantization_is_used(checkpoint: pathlib.Path) -> None:
    from transformers import BitsAndBytesConfig

    asked = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_compute_dtype=torch.float32)
    model, _ = FastModel.from_pretrained(checkpoint, quantization_config=asked)
    weight = model.model.layers[0].self_attn.q_proj.weight
    assert (weight.quant_type, weight.quant_state.nested) == ("fp4", False)


def test_further_options_reach_transformers(checkpoint: pathlib.Path) -> None:
    model = load_16bit(checkpoint, attn_implementation="eager", attention_dropout=0.25)
    assert model.config._attn_implementation == "eager"
    assert model.config.attention_dropout == 0.25


def test_a_folder_of_any_name_runs_fast(tmp_path: pathlib.Path) -> None:
    """C56: the family is in the checkpoint, not in the name."""
    model = load_16bit(save_checkpoint(tmp_path / "gpt2-qwen (copy) v1.0"))
    train_steps(model, steps=1)
    assert fast_runs(model) > 0


def test_an_unknown_architecture_runs_stock_with_one_warning(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C56: a tiny GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    monkeypatch.setattr("fastft.patching.plan._warned", set())
    GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=2, n_head=4)).save_pretrained(
        tmp_path
    )
    support.build_tokenizer().save_pretrained(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = load_16bit(tmp_path)
        model = FastModel.get_peft_model(model, target_modules=["c_attn"], use_gradient_checkpointing=False)
    assert len([w for w in caught if "'gpt2' has no fast parts" in str(w.message)]) == 1
    assert fast_runs(model) == 0
    batch = support.random_batch()
    with torch.no_grad():
        stock = load_stock(tmp_path)(**batch)
        ours = model.eval()(**batch)
    assert torch.equal(ours.logits, stock.logits)  # B = 0
    first, second = train_steps(model)
    assert second < first


@pytest.mark.parametrize("scaling", SCALINGS)
def test_rope_is_the_checkpoints_own(tmp_path: pathlib.Path, scaling: str) -> None:
    """C22: at positions beyond the original window, and different from an unscaled copy (else the test is vacuous)."""
    theta = {"rope_type": "default", "rope_theta": 5e5}
    settings = {"head_dim": 64, "max_position_embeddings": 64}
    folder = save_checkpoint(tmp_path / "scaled", rope_parameters=SCALINGS[scaling], **settings)
    plain_folder = save_checkpoint(tmp_path / "plain", rope_parameters=theta, **settings)
    model, stock, plain = load_16bit(folder), load_stock(folder), load_stock(plain_folder)
    ids = support.random_batch(rows=1, length=200)["input_ids"]
    with torch.no_grad():
        ours, theirs, unscaled = (m.eval()(input_ids=ids).logits for m in (model, stock, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert (ours - unscaled).abs().max() > 1e-3
    if scaling == "llama3":
        ratios = model.model.rotary_emb.inv_freq / plain.model.rotary_emb.inv_freq
        assert ratios.max() == 1.0
        assert ratios.min() == pytest.approx(0.125)


@pytest.mark.parametrize("scaling", ["llama3", "dynamic"])
def test_max_seq_length_does_not_edit_rope(tmp_path: pathlib.Path, scaling: str) -> None:
    """C23: only the allowed length widens."""
    folder = save_checkpoint(tmp_path, max_position_embeddings=256, rope_parameters=SCALINGS[scaling])
    model, stock = load_16bit(folder, max_seq_length=1024), load_stock(folder)
    assert model.config.rope_parameters == stock.config.rope_parameters
    assert model.config.max_position_embeddings == 256
    assert torch.equal(model.model.rotary_emb.inv_freq, stock.model.rotary_emb.inv_freq)
    with torch.no_grad():
        assert model(**support.random_batch(rows=1, length=300)).loss.isfinite()
        with pytest.raises(ValueError, match=r"1025.*1024"):
            model(**support.random_batch(rows=1, length=1025))


def test_a_document_over_max_seq_length_is_refused_with_both_lengths(checkpoint: pathlib.Path) -> None:
    """C29: never a shortened output; also after the adapter is put on."""
    model = load_16bit(checkpoint, max_seq_length=64)
    for candidate in (model, FastModel.get_peft_model(model)):
        candidate.train()
        with pytest.raises(ValueError, match=r"100.*64"):
            candidate(**support.random_batch(rows=1, length=100))
        assert candidate(**support.random_batch(rows=1, length=64)).loss.isfinite()


# --- bad input --------------------------------------------------------------------------------------------------------


def test_a_wrong_dtype_is_refused_before_anything_is_read() -> None:
    with pytest.raises(ValueError, match=r"dtype='float17'.*'bfloat16'"):
        FastModel.from_pretrained("/no/such/folder", dtype="float17")


def test_a_missing_folder() -> None:
    with pytest.raises(FileNotFoundError, match="looks like a path on this machine"):
        FastModel.from_pretrained("./no/such/folder")


def test_a_name_that_is_nowhere() -> None:
    with pytest.raises(OSError, match=r"'owner/no-such-model' could not be loaded") as caught:
        FastModel.from_pretrained("owner/no-such-model", local_files_only=True)
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what is missing here: a GPU")
def test_cuda_where_there_is_none(checkpoint: pathlib.Path) -> None:
    with pytest.raises(RuntimeError, match="device_map='cuda' asks for cuda, but torch"):
        FastModel.from_pretrained(checkpoint, device_map="cuda")


# --- get_peft_model ---------------------------------------------------------------------------------------------------


def test_a_lora_on_the_seven_projections(checkpoint: pathlib.Path) -> None:
    from peft import PeftModel

    model = FastModel.get_peft_model(load_16bit(checkpoint))
    assert isinstance(model, PeftModel)
    config = model.peft_config["default"]
    assert config.target_modules == set(support.PROJECTIONS)
    assert (config.r, config.lora_alpha, config.task_type) == (16, 16, "CAUSAL_LM")
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trainable) == 2 * 2 * 7
    assert all("lora_" in name for name in trainable)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_adapters_are_float32_over_a_16bit_model(checkpoint: pathlib.Path, dtype: str) -> None:
    """C55: and the base keeps its dtype, norms included (no k-bit preparation)."""
    model = FastModel.get_peft_model(load_16bit(checkpoint, dtype=dtype))
    for name, parameter in model.named_parameters():
        assert parameter.dtype is (torch.float32 if "lora_" in name else getattr(torch, dtype)), name


@pytest.mark.parametrize(
    ("spelling", "level"),
    [
        (True, "auto"),
        ("auto", "auto"),
        ("fastft", "auto"),
        ("unsloth", "auto"),
        ("lean", "lean"),
        ("recompute", "recompute"),
        ("offload", "offload"),
    ],
)
def test_checkpointing_names_the_planner_or_a_level_without_a_warning(
    checkpoint: pathlib.Path, spelling: Any, level: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        model = FastModel.get_peft_model(load_16bit(checkpoint), use_gradient_checkpointing=spelling)
    layers = model.get_base_model().model.layers
    assert [site_of(layer).level for layer in layers] == [level, level]
    kept = FastModel.get_peft_model(load_16bit(checkpoint), use_gradient_checkpointing=False)
    assert [site_of(layer).level for layer in kept.get_base_model().model.layers] == ["keep", "keep"]
    assert train_steps(model) == pytest.approx(train_steps(kept), rel=1e-5)


def test_an_unknown_checkpointing_is_refused(checkpoint: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"use_gradient_checkpointing='all' is not known.*'recompute'"):
        FastModel.get_peft_model(load_16bit(checkpoint), use_gradient_checkpointing="all")


def test_the_seed_is_the_adapters_alone(checkpoint: pathlib.Path) -> None:
    import random

    import numpy

    model = load_16bit(checkpoint)
    before = torch.get_rng_state(), random.getstate(), str(numpy.random.get_state())
    FastModel.get_peft_model(model, random_state=5)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), str(numpy.random.get_state()))


def test_embedding_and_head_as_targets_are_trained(checkpoint: pathlib.Path) -> None:
    """C11: every requested module moves after a step."""
    for targets in (["q_proj", "embed_tokens", "lm_head"], ["embed_tokens"]):
        model = FastModel.get_peft_model(load_16bit(checkpoint), target_modules=targets)
        support.randomize_adapters(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_embedding" in name:
                    parameter.normal_(std=0.1)
        before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        train_steps(model, steps=1)
        for target in targets:
            moved = [not torch.equal(before[n], p) for n, p in model.named_parameters() if n in before and target in n]
            assert moved, f"{target} has nothing trainable"
            assert all(moved), f"{target} did not move"


def test_what_would_train_nothing_is_refused(checkpoint: pathlib.Path) -> None:
    """C11."""
    model = load_16bit(checkpoint)
    with pytest.raises(ValueError, match="'no_such' matches no module"):
        FastModel.get_peft_model(model, target_modules=["no_such"])
    with pytest.raises(ValueError, match="'no_such' matches no module"):
        FastModel.get_peft_model(model, target_modules=["q_proj", "no_such"])
    assert linear_kinds(model) == {"Linear"}  # refused before anything was wrapped
    with pytest.raises(ValueError, match="No parameter of this model is trainable"):
        FastModel.get_peft_model(model, inference_mode=True)


def test_further_fields_reach_peft(checkpoint: pathlib.Path) -> None:
    model = FastModel.get_peft_model(
        load_16bit(checkpoint),
        r=8,
        layers_to_transform=[1],
        use_rslora=True,
        modules_to_save=["norm"],
        rank_pattern={"q_proj": 2},
        loftq_config=None,  # in every Unsloth notebook
        adapter_name="mine",
    )
    config = model.peft_config["mine"]
    assert (config.r, config.layers_to_transform, config.use_rslora, config.modules_to_save) == (8, [1], True, ["norm"])
    layers = model.get_base_model().model.layers
    assert layers[1].self_attn.q_proj.lora_A["mine"].weight.shape == (2, 64)
    assert not hasattr(layers[0].self_attn.q_proj, "lora_A")
    with pytest.raises(TypeError, match="no_such_field"):
        FastModel.get_peft_model(load_16bit(checkpoint), no_such_field=1)


def test_strictness_is_not_forgotten(checkpoint: pathlib.Path) -> None:
    model = FastModel.get_peft_model(load_16bit(checkpoint, strict=True))
    assert all(site.strict for module in model.modules() if (site := site_of(module)) is not None)


def test_a_model_that_fastft_did_not_load_is_made_fast_too(checkpoint: pathlib.Path) -> None:
    model = FastModel.get_peft_model(load_stock(checkpoint))
    train_steps(model, steps=1)
    assert fast_runs(model) > 0


# --- adapters, saved and loaded ---------------------------------------------------------------------------------------


def test_a_saved_adapter_loads_in_plain_peft_and_by_its_folder(
    checkpoint: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """C44: by its folder the base comes with it, it is trainable, and asking for the same adapter keeps its weights."""
    from peft import PeftModel

    model = FastModel.get_peft_model(load_16bit(checkpoint), r=4)
    train_steps(model)
    model.save_pretrained(tmp_path / "adapter")
    batch = support.random_batch()
    with torch.no_grad():
        trained = model.eval()(**batch).loss

    plain = PeftModel.from_pretrained(load_stock(checkpoint), tmp_path / "adapter")
    with torch.no_grad():
        assert torch.allclose(plain(**batch).loss, trained, rtol=1e-5)

    again, tokenizer = FastModel.from_pretrained(tmp_path / "adapter", load_in_4bit=False)
    assert tokenizer.chat_template == support.CHAT_TEMPLATE  # the base's: none was saved beside the adapter
    kept = FastModel.get_peft_model(again, r=4)
    assert kept is again
    with torch.no_grad():
        assert torch.allclose(kept.eval()(**batch).loss, trained, rtol=1e-5)
    with pytest.raises(ValueError, match="r: has 4, asked for 8"):
        FastModel.get_peft_model(again, r=8)
    first, second = train_steps(kept)
    assert second < first
    assert fast_runs(kept) > 0


def test_the_tokenizer_beside_an_adapter_is_preferred(checkpoint: pathlib.Path, tmp_path: pathlib.Path) -> None:
    model, tokenizer = FastModel.from_pretrained(checkpoint)
    FastModel.get_peft_model(model).save_pretrained(tmp_path / "adapter")
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(tmp_path / "adapter")
    model, tokenizer = FastModel.from_pretrained(tmp_path / "adapter")
    assert linear_kinds(model.get_base_model()) == {"Linear4bit"}
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"


TRAIN_WITHOUT_TRITON = """
import json, sys
sys.modules["triton"] = None  # `import triton` raises ImportError
import torch
from fastft import FastModel
from tests import support
checkpoint, output = sys.argv[1:]
model, tokenizer = FastModel.from_pretrained(checkpoint, device_map="cpu")
model = FastModel.get_peft_model(model, r=4).train()
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
losses = []
for _ in range(3):
    loss = model(**support.random_batch()).loss
    loss.backward()
    optimizer.step(), optimizer.zero_grad()
    losses.append(loss.item())
model.save_pretrained(output)
torch.cuda.is_available = lambda: False
try:
    FastModel.from_pretrained(checkpoint, device_map="cuda")
except RuntimeError as error:
    print(json.dumps({"losses": losses, "refusal": str(error)}))
"""


def test_training_and_saving_work_without_triton_or_a_gpu(checkpoint: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """C54: in a fresh process, where importing triton fails."""
    output = tmp_path / "adapter"
    result = subprocess.run(
        [sys.executable, "-c", TRAIN_WITHOUT_TRITON, str(checkpoint), str(output)],
        cwd=pathlib.Path(__file__).parent.parent, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["losses"][-1] < told["losses"][0]
    assert "asks for cuda, but torch" in told["refusal"]
    assert (output / "adapter_model.safetensors").is_file()
