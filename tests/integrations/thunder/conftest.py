"""Without Lightning Thunder nothing here is collected: it is no dependency; CI has it in an environment of its own."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("thunder") else ["test_*.py"]
