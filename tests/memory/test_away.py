"""How much of an offloaded layer goes to host memory: what the link carries, what pays, and what it costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fastft.memory.away import AWAY, goes_away
from fastft.memory.costs import LayerShape
from tests.memory.test_costs import LLAMA_8B, costs

LLAMA_1B = replace(LLAMA_8B, hidden=2048, query=2048, key_value=512, intermediate=8192)
QWEN3_06B = replace(LLAMA_8B, hidden=1024, query=2048, key_value=1024, heads=16, intermediate=3072)


@pytest.mark.parametrize(
    ("shape", "tokens", "longest", "expected"),
    [
        (LLAMA_8B, 8192, 2048, "half"),
        (LLAMA_1B, 32768, 32768, "half"),
        (LLAMA_1B, 16384, 2048, "attention"),  # a byte a token for fewer operations: the link would be waited for
        (QWEN3_06B, 16384, 2048, "input"),  # still fewer
        (QWEN3_06B, 32768, 32768, "attention"),
        (LLAMA_8B, 65536, 65536, "attention"),  # memory is what such rows lack
        (LLAMA_1B, 4096, 2048, "input"),  # the host's time would be more than attention's
        (LLAMA_8B, 8192, 256, "input"),  # short rows: the copy costs more than attention
    ],
)
def test_what_goes_to_host_memory_is_what_the_link_carries_and_pays(
    shape: LayerShape, tokens: int, longest: int, expected: str
) -> None:
    found = goes_away(
        tokens=tokens, longest=longest, hidden=shape.hidden, query=shape.query, key_value=shape.key_value,
        heads=shape.heads, intermediate=shape.intermediate, compute_bytes=2, stream_bytes=2,
    )  # fmt: skip
    assert found == expected
    assert costs(shape, tokens, longest=longest).away == expected
    assert costs(shape, tokens, longest=longest).late == (longest == 65536)


@pytest.mark.parametrize("longest", [32768, 65536])
def test_more_in_host_memory_is_less_time(longest: int) -> None:
    """And on the device what is on its way back for the layer before, unless the rows are too long for that."""
    by_kind = [costs(LLAMA_1B, longest, longest=longest, away=away) for away in AWAY]
    assert [one.away for one in by_kind] == (
        ["input", "attention", "half"] if longest < 65536 else ["input"] + ["attention"] * 2
    )
    least, output, most = (one.levels["offload"] for one in by_kind)
    assert least.seconds > output.seconds >= most.seconds
    kept = (2 * 2048 + 4 * 32) * longest
    assert output.host - least.host == kept
    assert output.working - least.working == (kept if longest < 65536 else 0)
    lean = by_kind[0].levels["lean"].saved
    assert longest == 65536 or most.host == lean, "all that lean keeps, x among it"
    for one in by_kind:
        assert {**one.levels, "offload": None} == {**by_kind[0].levels, "offload": None}
