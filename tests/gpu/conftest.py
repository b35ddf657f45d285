"""Every GPU test starts with an empty cache and fresh peak counters; the whole folder is skipped without CUDA.

The skipping itself is in tests/conftest.py. Run on a machine that has the packages on its path:

    python3 -m pytest tests/gpu -q
"""

from __future__ import annotations

import gc
import os

# cuBLAS reads it when its first handle is made; deterministic algorithms (test_determinism.py) ask for it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch


@pytest.fixture(autouse=True)
def clean_memory(fixed_seeds: None) -> None:
    """Nothing of the test before is left in the allocator."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
