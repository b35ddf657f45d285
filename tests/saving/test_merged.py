"""Merged saves: the files answer as the live model, for each load mode and LoRA option; the model stays as it was."""

from __future__ import annotations

import copy
import json
import pathlib
import pickle
import socket
from typing import Any

import pytest
import torch

import fastft
from fastft import FastModel
from fastft.saving import merged, shards
from fastft.saving.check import SaveCheckError
from fastft.saving.hub import push_merged
from tests import support


def plain_logits(folder: pathlib.Path, batch: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        return model(input_ids=batch["input_ids"]).logits.float()


def live_logits(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"]).logits.float()
    for module, mode in modes:
        module.training = mode
    return logits


def two_adapters() -> Any:
    from peft import LoraConfig

    model = support.add_lora(support.build_model())
    model.add_adapter("second", LoraConfig(r=8, lora_alpha=3, target_modules=["v_proj", "down_proj"]))
    support.randomize_adapters(model, 3)
    model.base_model.set_adapter(["default", "second"])
    return model


def fully_trained_parts() -> Any:
    model = support.add_lora(support.build_model(), modules_to_save=["lm_head", "embed_tokens"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.mul_(1.5)
    return model


def trained_tokens() -> Any:
    model = support.add_lora(support.build_model(tie_word_embeddings=True), trainable_token_indices=[3, 5])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "trainable_tokens_delta" in name:
                parameter.add_(0.3)
    return model


def lora(family: str = "llama", tied: bool = False, **settings: Any) -> Any:
    return support.add_lora(support.build_model(family, tie_word_embeddings=tied), **settings)


OPTIONS = {
    "lora": lora,
    "qwen2_bias": lambda: lora("qwen2", bias="all"),
    "qwen3": lambda: lora("qwen3"),
    "mistral": lambda: lora("mistral"),
    "rslora": lambda: lora(use_rslora=True),
    "dora": lambda: lora("qwen2", use_dora=True),
    "lora_bias": lambda: lora("qwen2", lora_bias=True, target_modules=["q_proj", "v_proj"]),
    "rank_and_alpha_patterns": lambda: lora(rank_pattern={"q_proj": 7}, alpha_pattern={"down_proj": 1}),
    "embeddings_and_head": lambda: lora(target_modules=["q_proj", "embed_tokens", "lm_head"]),
    "dora_on_embeddings": lambda: lora(target_modules=["q_proj", "embed_tokens"], use_dora=True),
    "modules_to_save": fully_trained_parts,
    "two_adapters": two_adapters,
    "tied": lambda: lora(tied=True),
    "tied_with_adapted_embedding": lambda: lora(tied=True, target_modules=["q_proj", "embed_tokens"]),
    "trained_tokens": trained_tokens,
    "no_adapter": support.build_model,
}


@pytest.mark.parametrize("option", OPTIONS)
def test_c47_the_saved_model_answers_as_the_live_one(option: str, tmp_path: pathlib.Path, batch: Any) -> None:
    """C47: float32, so that what differs is the order of sums alone."""
    model = OPTIONS[option]()
    # What starts where it changes nothing is moved away from there: DoRA's magnitudes, an embedding's zero matrix.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1.3)
            if "lora_embedding_A" in name:
                parameter.normal_(std=0.1)
    expected = live_logits(model, batch)
    saved = FastModel.save_merged(model, None, tmp_path / "merged")
    found = plain_logits(tmp_path / "merged", batch)
    assert (found - expected).abs().max() < 2e-6 * expected.abs().max()
    assert saved.difference < 2e-6
    assert (saved.layers_probed > 0) == (option != "no_adapter")
    tied = json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"]
    assert tied == (option in ("tied", "trained_tokens"))


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Planned nested-NF4 Llama with adapters; not changed by the tests that use it."""
    folder = tmp_path_factory.mktemp("base") / "base"
    return fastft.patch(support.add_lora(support.load_4bit(support.build_model(), folder)))


def test_c48_and_c49_the_dequantized_base_is_what_training_saw(
    quantized: Any, tmp_path: pathlib.Path, batch: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C48: the dequantized base is near, the original is not. C49: no leftover quantization, no network."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("saving used the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    expected = live_logits(quantized, batch)
    near = FastModel.save_merged(quantized, tokenizer, tmp_path / "near")
    far = FastModel.save_merged(quantized, tokenizer, tmp_path / "far", base="original")
    assert (plain_logits(tmp_path / "near", batch) - expected).abs().max() < 1e-3 * expected.abs().max()
    assert near.difference < 2e-6 < 0.05 < far.difference
    for folder, base in (("near", "dequantized"), ("far", "original")):
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert "quantization_config" not in config
        assert config["dtype"] == "float32"
        assert config["fastft_merge"] == {"base": base}
        assert (tmp_path / folder / "tokenizer.json").is_file()


def test_the_original_base_plus_the_update(quantized: Any, tmp_path: pathlib.Path) -> None:
    """Each weight is the original checkpoint's plus s·B·A, to a float32 rounding."""
    from safetensors.torch import load_file

    FastModel.save_merged(quantized, None, tmp_path / "merged", base="original")
    saved = load_file(tmp_path / "merged" / "model.safetensors")
    inner = quantized.get_base_model()
    before = load_file(pathlib.Path(inner.name_or_path) / "model.safetensors")
    layer = inner.model.layers[1].mlp.down_proj
    update = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    name = "model.layers.1.mlp.down_proj.weight"
    torch.testing.assert_close(saved[name], before[name] + update.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_16_bit_save_of_a_16_bit_model_is_within_rounding(dtype: str, tmp_path: pathlib.Path, batch: Any) -> None:
    live = getattr(torch, dtype)
    model = support.add_lora(support.load_4bit(support.build_model(), tmp_path / "base", dtype=live))
    fastft.patch(model)
    saved = FastModel.save_merged(model, None, tmp_path / "merged")
    assert saved.dtype is live
    assert 0 < saved.difference <= saved.allowed < 0.05
    assert saved.update_kept == pytest.approx(1, abs=0.01)
    assert saved.adapter_effect is not None
    assert saved.adapter_effect > 0.5
    expected = live_logits(model, batch)
    difference = (plain_logits(tmp_path / "merged", batch, live) - expected).square().mean().sqrt()
    assert difference < saved.allowed * expected.square().mean().sqrt()


def test_shards_are_as_large_as_asked_and_load_together(tmp_path: pathlib.Path, batch: Any) -> None:
    model = lora()
    FastModel.save_merged(model, None, tmp_path / "merged", max_shard_size="60KB")
    files = sorted((tmp_path / "merged").glob("*.safetensors"))
    assert len(files) > 3
    assert all(file.stat().st_size < 70_000 for file in files)
    torch.testing.assert_close(plain_logits(tmp_path / "merged", batch), live_logits(model, batch))


def test_the_live_model_is_untouched_and_trains_on(tmp_path: pathlib.Path, batch: Any) -> None:
    """Bit-equal weights, modes, trainability, generator, plan; the next step's gradients are those without a save."""
    base = support.load_4bit(support.build_model(), tmp_path / "base")
    model = fastft.patch(support.add_lora(base))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    wanted = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    model.get_base_model().model.layers[0].eval()  # a mode of its own
    modes = [module.training for module in model.modules()]
    report, generator = fastft.report(model), torch.get_rng_state()
    model(**batch).loss.backward()
    gradients = support.trainable_gradients(model)
    model.zero_grad()
    FastModel.save_merged(model, None, tmp_path / "merged")
    assert torch.equal(torch.get_rng_state(), generator)
    assert [module.training for module in model.modules()] == modes
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == wanted
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert str(fastft.report(model)).count("fast") == str(report).count("fast")
    model(**batch).loss.backward()
    for name, gradient in support.trainable_gradients(model).items():
        assert torch.equal(gradient, gradients[name]), name


def test_an_adapter_that_changes_nothing_is_refused_before_writing(tmp_path: pathlib.Path) -> None:
    from peft import LoraConfig, get_peft_model

    untrained = get_peft_model(support.build_model(), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="change nothing"):
        FastModel.save_merged(untrained, None, tmp_path / "merged")
    disabled = lora()
    with disabled.disable_adapter(), pytest.raises(ValueError, match="change nothing"):
        FastModel.save_merged(disabled, None, tmp_path / "merged")
    assert not list(tmp_path.iterdir())


def test_a_change_lost_in_rounding_is_an_error(tmp_path: pathlib.Path) -> None:
    """An update below half a unit of bfloat16 is gone after rounding; in float32 it is not."""
    model = support.add_lora(support.build_model(dtype=torch.bfloat16))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(0.004)
    with pytest.raises(SaveCheckError, match="vanished"):
        FastModel.save_merged(model, None, tmp_path / "merged")
    assert not list(tmp_path.iterdir())
    assert FastModel.save_merged(model, None, tmp_path / "merged", dtype="float32").update_kept > 0.9


def test_a_wrong_fold_is_an_error_and_leaves_nothing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer of fourteen folded with a scale 10 % off."""
    stock = shards.fold

    def wrong(module: Any, attribute: str, name: str, **options: Any) -> Any:
        base, folded = stock(module, attribute, name, **options)
        return (
            (base, base + 1.1 * (folded - base)) if name == "model.layers.1.self_attn.v_proj.weight" else (base, folded)
        )

    monkeypatch.setattr(shards, "fold", wrong)
    with pytest.raises(SaveCheckError, match=r"layers\.1\.self_attn\.v_proj\.weight: the written layer is not"):
        FastModel.save_merged(lora(), None, tmp_path / "merged")
    assert not list(tmp_path.iterdir())


def test_a_wrong_fold_into_the_original_is_an_error(
    quantized: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = shards.fold

    def wrong(module: Any, attribute: str, name: str, **options: Any) -> Any:
        base, folded = stock(module, attribute, name, **options)
        return base, base - (folded - base) if folded is not base else base

    monkeypatch.setattr(shards, "fold", wrong)
    with pytest.raises(SaveCheckError, match=r"q_proj\.weight: the written layer holds -1 "):
        FastModel.save_merged(quantized, None, tmp_path / "merged", base="original")


def test_what_cannot_be_folded_is_named(tmp_path: pathlib.Path) -> None:
    from peft import IA3Config, get_peft_model

    other = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    model = get_peft_model(support.build_model(), other)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.\S+\.weight: adapters of Linear"):
        FastModel.save_merged(model, None, tmp_path / "merged")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("options", "message"), [({"base": "16bit"}, "base="), ({"dtype": "int8"}, "dtype=")])
def test_unknown_arguments_are_refused(options: Any, message: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=message):
        FastModel.save_merged(lora(), None, tmp_path / "merged", **options)


def test_an_original_that_is_not_here_is_an_error_before_writing(tmp_path: pathlib.Path) -> None:
    model = support.add_lora(support.load_4bit(support.build_model(), tmp_path / "base"))
    model.get_base_model().config._name_or_path = model.get_base_model().name_or_path = "nobody/no-such-model"
    with pytest.raises(FileNotFoundError, match="does not use the network"):
        FastModel.save_merged(model, None, tmp_path / "merged", base="original")
    assert not (tmp_path / "merged").exists()


def test_the_method_is_bound_to_the_instance(tmp_path: pathlib.Path, batch: Any) -> None:
    """On this model alone, its class unchanged; a deep copy saves itself; a pickle travels."""
    from peft import PeftModelForCausalLM

    model = FastModel.get_peft_model(support.build_model(), r=4, use_gradient_checkpointing=False)
    support.randomize_adapters(model)
    assert not hasattr(PeftModelForCausalLM, "save_pretrained_merged")
    twin = copy.deepcopy(model)
    support.randomize_adapters(twin, 7)
    model.save_pretrained_merged(tmp_path / "one")
    twin.save_pretrained_merged(tmp_path / "two", dtype="float32")
    torch.testing.assert_close(plain_logits(tmp_path / "one", batch), live_logits(model, batch))
    torch.testing.assert_close(plain_logits(tmp_path / "two", batch), live_logits(twin, batch))
    again = pickle.loads(pickle.dumps(model))
    assert again.save_pretrained_merged.args[0] is again


class RecordingApi:
    """Stands in for `huggingface_hub.HfApi`: remembers what was uploaded."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.files: list[str] = []

    def whoami(self) -> dict[str, str]:
        self.calls.append("whoami")
        return {"name": "tester"}

    def create_repo(self, repo_id: str, **_: Any) -> None:
        self.calls.append(f"create {repo_id}")

    def upload_folder(self, *, folder_path: pathlib.Path, **_: Any) -> None:
        self.calls.append("upload")
        self.files = sorted(path.name for path in pathlib.Path(folder_path).iterdir())


def test_pushing_sends_a_checked_save_and_nothing_else(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    api = RecordingApi()
    saved = push_merged(lora(), tokenizer, "tester/model", api=api)
    assert api.calls == ["whoami", "create tester/model", "upload"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(api.files)
    assert saved.difference < 2e-6
    monkeypatch.setattr(merged, "reload_answers", lambda *_: torch.zeros(2, 24, support.VOCABULARY))
    failing = RecordingApi()
    with pytest.raises(SaveCheckError):
        push_merged(lora(), tokenizer, "tester/model", api=failing)
    assert failing.calls == ["whoami"]
