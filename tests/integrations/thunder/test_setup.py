"""The import shim, the choice of executors and the recipe plugin."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest
import torch

import fastft.integrations.thunder as fastft_thunder
from fastft.integrations.thunder import shim
from tests.integrations.thunder.harness import forward_names, leaf

import thunder  # isort: skip


def test_the_stand_ins_are_gone_after_the_import() -> None:
    missing = [name for name in shim._NAMED_TENSOR_METHODS if name not in dir(torch._C.TensorBase)]
    assert not any(hasattr(torch.Tensor, name) for name in missing)


def test_importing_fastft_imports_no_thunder_and_registers_no_operators() -> None:
    code = (
        "import sys, fastft, torch; assert 'thunder' not in sys.modules;"
        "assert not hasattr(torch.ops.fastft, 'rms_norm')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_thunder_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "thunder")

    def absent(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'thunder'", name="thunder")

    monkeypatch.setattr(shim.importlib, "import_module", absent)
    with pytest.raises(ImportError, match="pip install lightning-thunder"):
        shim.import_thunder()
    assert not hasattr(torch.Tensor, "align_as") or "align_as" in dir(torch._C.TensorBase)


def test_absent_executors_are_left_out_with_a_note(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = fastft_thunder.executors("sdpa", "fastft", "torchcompile_cat", "no_such_fuser", "torch", "fastft")
    assert [executor.name for executor in found] == ["sdpa", "fastft", "torchcompile_cat", "torch"]
    assert "no_such_fuser" in caplog.text
    assert [executor.name for executor in fastft_thunder.executors()] == ["sdpa", "fastft", "torchcompile_cat", "torch"]


def test_no_executor_at_all_is_an_error_that_lists_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"none of the executors .*fastft"):
        fastft_thunder.executors("no_such_fuser")


def test_the_plugin_brings_the_executor_into_a_recipe() -> None:
    from thunder.recipes import BaseRecipe

    norm = torch.nn.RMSNorm(8)
    recipe = BaseRecipe(fuser="torch.compile")
    compiled = thunder.compile(norm, recipe=recipe, plugins=[fastft_thunder.Plugin()])
    x = leaf(3, 8).cpu()
    torch.testing.assert_close(compiled(x), norm(x))
    assert forward_names(compiled) == {"rms_norm": 1}
