"""Where a figure was measured: device, versions and commit, without which it means nothing.

`installed_versions` and `commit_name` start no CUDA context: the parent process calls them. `device_facts` is called
in a worker.
"""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["DEFAULT_L2_BYTES", "commit_name", "device_facts", "free_bytes", "installed_versions"]

# Column of the results → distribution.
_DISTRIBUTIONS = {
    "torch": "torch",
    "triton": "triton",
    "transformers": "transformers",
    "peft": "peft",
    "trl": "trl",
    "liger": "liger-kernel",
    "unsloth": "unsloth",
}
DEFAULT_L2_BYTES = 32 * 2**20  # a CPU's last cache, where torch cannot be asked


def installed_versions() -> dict[str, str]:
    """Version by results column; empty where the library is not installed."""
    versions = {}
    for column, distribution in _DISTRIBUTIONS.items():
        try:
            versions[column] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            versions[column] = ""
    return versions


def commit_name() -> str:
    """The short commit of the checkout this package lies in, with "-dirty" where tracked files differ from it.

    Outside a checkout of fastft (an installed wheel, a copy without .git): "v" and the version.
    """
    root = Path(__file__).resolve().parents[2]
    if (root / ".git").exists():
        try:
            return _git(root, "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*")
        except (OSError, subprocess.SubprocessError):
            pass  # git is not installed, or not willing: the version has to do
    try:
        return f"v{metadata.version('fastft')}"
    except metadata.PackageNotFoundError:
        return "unknown"


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()


def device_facts() -> dict[str, Any]:
    """Of the current device: `device` ("cuda" or "cpu"), `gpu` (its name), `torch`, `l2_bytes`, `free_bytes`."""
    import torch

    if not torch.cuda.is_available():
        return {
            "device": "cpu",
            "gpu": "cpu",
            "torch": torch.__version__,
            "l2_bytes": DEFAULT_L2_BYTES,
            "free_bytes": free_bytes("cpu"),
        }
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "device": "cuda",
        "gpu": properties.name,
        "torch": torch.__version__,
        "l2_bytes": int(properties.L2_cache_size),
        "free_bytes": free_bytes("cuda"),
    }


def free_bytes(device: str) -> int:
    """Memory that this process could still take on `device`; on a CPU what the system says is available."""
    import torch

    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        return int(free)
    import psutil  # type: ignore[import-untyped, unused-ignore]

    return int(psutil.virtual_memory().available)
