"""Pushing a merged or compressed model: saved and checked on this machine first, in full, and uploaded only then."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastft.saving.merged import Base, SavedModel, save_merged

if TYPE_CHECKING:
    from fastft.saving.compressed.checkpoint import SavedCompressed

__all__ = ["push_compressed", "push_merged"]


def push_merged(
    model: Any,
    tokenizer: Any,
    repo_id: str,
    *,
    base: Base = "dequantized",
    dtype: str | torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    private: bool | None = None,
    token: str | bool | None = None,
    commit_message: str = "Upload merged model",
    revision: str | None = None,
    api: Any = None,
) -> SavedModel:
    """`save_merged` into a temporary folder, with all its checks, then one commit to the Hugging Face hub.

    Args:
        model: as `save_merged`.
        tokenizer: as `save_merged`.
        repo_id: "owner/name"; made if it is not there.
        base: as `save_merged`.
        dtype: as `save_merged`.
        max_shard_size: as `save_merged`.
        private: of a repository that is made.
        token: of the hub; None: the one of `hf auth login`.
        commit_message: of the one commit.
        revision: the branch to commit to.
        api: a `huggingface_hub.HfApi`; None makes one with `token`.

    Returns:
        As `save_merged`; its folder no longer exists.

    Raises:
        ValueError: a repository name the hub would not take, and what `save_merged` raises.
        OSError: what `save_merged` raises, or the hub's own errors.
        SaveCheckError: as `save_merged`; nothing was sent.
    """
    with _checked_api(repo_id, token, api) as (root, hub):
        saved = save_merged(model, tokenizer, root / "model", base=base, dtype=dtype, max_shard_size=max_shard_size)
        _upload(hub, repo_id, saved.folder, private, commit_message, revision)
    return saved


def push_compressed(
    model: Any,
    tokenizer: Any,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    commit_message: str = "Upload compressed model",
    revision: str | None = None,
    api: Any = None,
    **options: Any,
) -> SavedCompressed:
    """`save_compressed` into a temporary folder, with all its checks, then one commit to the Hugging Face hub.

    Args:
        model: as `save_compressed`.
        tokenizer: as `save_compressed`.
        repo_id, private, token, commit_message, revision, api: as `push_merged`.
        **options: of `save_compressed`.

    Returns:
        As `save_compressed`; its folder no longer exists.

    Raises:
        ImportError, ValueError, OSError, RuntimeError, SaveCheckError: as `save_compressed` and `push_merged`; nothing
            was sent.
    """
    from fastft.saving.compressed.live import save_compressed

    with _checked_api(repo_id, token, api) as (root, hub):
        saved = save_compressed(model, tokenizer, root / "model", **options)
        _upload(hub, repo_id, saved.folder, private, commit_message, revision)
    return saved


@contextmanager
def _checked_api(repo_id: str, token: str | bool | None, api: Any) -> Iterator[tuple[Path, Any]]:
    """A temporary folder, and the hub's client once it is known that name and token are good."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    validate_repo_id(repo_id)
    api = HfApi(token=token) if api is None else api
    api.whoami()  # an unknown token shows before the merge, not after it
    with tempfile.TemporaryDirectory(prefix="fastft-push-") as root:
        yield Path(root), api


def _upload(
    api: Any, repo_id: str, folder: Path, private: bool | None, commit_message: str, revision: str | None
) -> None:
    api.create_repo(repo_id, private=private, exist_ok=True)
    # The repository, too, holds exactly this save: shards of an earlier one would be loaded or downloaded with it.
    api.upload_folder(
        repo_id=repo_id, folder_path=folder, commit_message=commit_message, revision=revision,
        delete_patterns=["*.safetensors", "*.safetensors.index.json", "adapter_*", "*.bin"],
    )  # fmt: skip
