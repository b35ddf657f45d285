"""A safetensors file that is written tensor by tensor is the one that the library writes."""

from __future__ import annotations

import filecmp
import pathlib
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastft.saving.safetensors_file import _NAMES, write_safetensors


@pytest.mark.parametrize("longer", [0, 1, 2, 3])
def test_the_file_is_the_librarys_byte_by_byte(longer: int, tmp_path: pathlib.Path) -> None:
    """Every dtype, names that need escaping, scalars, empty and non-contiguous tensors; the order too."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{part}.{dtype}": torch.randint(0, 2, shape, generator=generator).to(dtype)
        for part, shape in {"z" + longer * "z": (3, 5), 'a"ü\\': (7,), "scalar": (), "empty": (0, 4)}.items()
        for dtype in _NAMES
    }
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    transposed = {name: tensor.T.contiguous().T if tensor.ndim == 2 else tensor for name, tensor in tensors.items()}
    write_safetensors(tmp_path / "ours", tensors, transposed.__getitem__)
    assert filecmp.cmp(tmp_path / "ours", tmp_path / "theirs", shallow=False)


def test_tensors_are_made_one_at_a_time_and_only_once(tmp_path: pathlib.Path) -> None:
    made: dict[str, weakref.ref[torch.Tensor]] = {}

    def make(name: str) -> torch.Tensor:
        assert name not in made
        assert not [before for before, tensor in made.items() if tensor() is not None]
        tensor = torch.ones(4)
        made[name] = weakref.ref(tensor)
        return tensor

    planned = {name: torch.empty(4, device="meta") for name in "abc"}
    write_safetensors(tmp_path / "file", planned, make)
    assert list(made) == ["a", "b", "c"]
    assert all(bool((tensor == 1).all()) for tensor in load_file(tmp_path / "file").values())


@pytest.mark.parametrize("made", [torch.zeros(3), torch.zeros(4, dtype=torch.float64)])
def test_a_tensor_that_is_not_as_announced_is_an_error(made: torch.Tensor, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="was announced"):
        write_safetensors(tmp_path / "file", {"x": torch.empty(4, device="meta")}, lambda _: made)


def test_a_dtype_without_a_name_is_an_error(tmp_path: pathlib.Path) -> None:
    planned = {"x": torch.empty(4, dtype=torch.complex64, device="meta")}
    with pytest.raises(ValueError, match="cannot be written"):
        write_safetensors(tmp_path / "file", planned, lambda _: torch.zeros(4))
    assert not (tmp_path / "file").exists()
