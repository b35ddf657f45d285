"""What is refused, and what is decided, before anything is merged."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

from fastft import FastModel
from fastft.saving.compressed.plan import plan_compression
from tests import support
from tests.saving.compressed.harness import TEXTS, needs_llmcompressor, tiny
from tests.saving.tokenizers import VOCABULARY, byte_level

pytestmark = needs_llmcompressor


def plan(model: Any = None, scheme: str = "int8", **options: Any) -> Any:
    model = tiny() if model is None else model
    return plan_compression(type(model), model.config, byte_level(), torch.bfloat16, scheme=scheme, **options)


def test_what_cannot_be_done_is_refused_before_merging(tmp_path: pathlib.Path) -> None:
    odd = {"hidden_size": 192, "intermediate_size": 320}  # multiples of 64, and not of 128
    odder = {"hidden_size": 144, "intermediate_size": 256}  # of 16, not of 32
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {"scheme": "fp4"}, "'fp4' is not known here"),
        ({}, {"scheme": "fp8"}, "calibration=texts .* or take 'fp8_dynamic'"),
        ({}, {"scheme": "NVFP4"}, "calibration=texts .* or take 'nvfp4a16'"),
        ({}, {"scheme": "w4a16", "algorithm": "gptq"}, "rounds by data"),
        ({}, {"algorithm": "awq"}, "algorithm='awq' is not known"),
        ({}, {"scheme": "mxfp4", "group_size": 64}, "group_size goes with 'w4a16'"),
        ({}, {"scheme": "w4a16", "group_size": 48}, "128, 64, 32 are what can be served"),
        ({}, {"scheme": "int8", "smoothing_strength": 1.5}, "not between 0 and 1"),
        ({}, {"ignore": "lm_head"}, r"ignore is a list of names: \['lm_head'\]"),
        ({}, {"ignore": ["lm_head", "model.layers.0.mlp.up"]}, r"ignore=\['model.layers.0.mlp.up'\] matches no module"),
        ({}, {"ignore": ["re:.*"]}, "nothing to do"),
        ({}, {"calibration": [], "scheme": "int8"}, "holds no rows"),
        (odd, {"scheme": "w4a16"}, r"rows of 12 layers are no multiple .*q_proj: 192, .*Pass group_size=64"),
        (odder, {"scheme": "mxfp4"}, r"ignore=\['lm_head', 're:.*gate_proj\$', 're:.*k_proj\$'"),
        (odder, {"scheme": "w4a16"}, "or choose a scheme without groups"),
        ({"family": "mixtral"} | experts, {}, "Mixtures of experts are not supported"),
        ({}, {"keep_merged": tmp_path / "out"}, "must be two folders"),
        ({}, {"keep_merged": tmp_path / "out" / "merged"}, "must be two folders"),
        ({}, {"dtype": "int8"}, "dtype='int8' cannot be saved"),
        ({}, {"scheme": "nvfp4a16", "dtype": "float16"}, "goes with bfloat16 alone, and this is torch.float16"),
    ]
    for overrides, options, message in cases:
        with pytest.raises(ValueError, match=message):
            FastModel.save_compressed(tiny(**overrides), byte_level(), tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_the_advice_in_a_refusal_is_taken() -> None:
    odder = tiny(hidden_size=144, intermediate_size=256)
    with pytest.raises(ValueError, match="ignore=") as refused:
        plan(odder, scheme="mxfp4")
    advice = str(refused.value)
    ignore = eval(advice[advice.index("ignore=") + len("ignore=") : advice.index("]") + 1])
    left = {name.rpartition(".")[2] for name in plan(odder, scheme="mxfp4", ignore=ignore).targets}
    assert left == {"o_proj", "down_proj"}


@pytest.mark.parametrize(
    ("options", "algorithm", "rows", "smoothing"),
    [
        ({"scheme": "int8"}, "rtn", 0, None),
        ({"scheme": "int8", "calibration": TEXTS}, "gptq", 16, 0.8),
        ({"scheme": "int8", "calibration": TEXTS, "smoothing_strength": None}, "gptq", 16, None),
        ({"scheme": "int8", "calibration": TEXTS, "algorithm": "rtn"}, "rtn", 0, None),
        ({"scheme": "w4a16", "calibration": TEXTS, "max_calibration_samples": 3}, "gptq", 3, None),
        ({"scheme": "fp8", "calibration": TEXTS}, "rtn", 16, None),
        ({"scheme": "fp8", "calibration": TEXTS, "algorithm": "gptq"}, "gptq", 16, None),
        ({"scheme": "mxfp4", "calibration": TEXTS}, "rtn", 0, None),
    ],
)
def test_data_decides_how_weights_are_rounded(
    options: dict[str, Any], algorithm: str, rows: int, smoothing: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    made = plan(**options)
    assert ("makes no difference" in caplog.text) == ("calibration" in options and not rows)
    assert (made.algorithm, len(made.rows), made.smoothing) == (algorithm, rows, smoothing)
    assert bool(made.smoothed) == (smoothing is not None)


@pytest.mark.parametrize(("family", "smoothed"), [*((name, True) for name in support.FAMILIES), ("gemma2", False)])
def test_only_norms_that_feed_projections_are_smoothed(family: str, smoothed: bool) -> None:
    made = plan(tiny(family), scheme="int8", calibration=TEXTS)
    assert bool(made.smoothed) == smoothed
    if smoothed:
        assert made.smoothed["model.layers.1.self_attn.k_proj.weight"] == "model.layers.1.input_layernorm.weight"
        assert made.smoothed["model.layers.0.mlp.up_proj.weight"] == "model.layers.0.post_attention_layernorm.weight"
        assert len(made.smoothed) == 2 * 5


def test_the_head_stays_and_ignore_is_matched_by_name_class_and_expression() -> None:
    everything = {f"model.layers.{i}.{part}" for i in (0, 1) for part in _PARTS}
    assert set(plan().targets) == everything
    named = ["lm_head", "model.layers.0.self_attn.q_proj", "re:.*down_proj$"]
    left = {name for name in everything if not name.endswith("down_proj")} - {"model.layers.0.self_attn.q_proj"}
    assert set(plan(ignore=named).targets) == left
    assert plan(ignore=[]).targets["lm_head"] == (VOCABULARY, 128)


def test_the_size_is_foreseen() -> None:
    model = tiny()
    head = sum(p.numel() for n, p in model.named_parameters() if "layers" not in n)
    layers = sum(p.numel() for n, p in model.named_parameters() if "proj" in n)
    for scheme, bits in (("fp8_dynamic", 8), ("w4a16", 4), ("nvfp4a16", 4.5), ("mxfp4", 4.25)):
        exact = head * 2 + layers * bits / 8
        assert exact < plan(scheme=scheme).bytes < 1.1 * exact + 4096


_PARTS = [
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
]
