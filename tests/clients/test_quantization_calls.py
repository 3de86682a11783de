"""Calls on models in 8 and 4 bits give what the public package gave when it was recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients import quantization
from tests.clients.big import needs

pytestmark = needs("transformers", "bitsandbytes")

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("quantization.json").read_text())["results"][
    "1"
]

# 1.15 takes a name to skip as a piece of text: "lock" skips the module block there, and names no module here.
DIFFERENT = {"replaced_layers": [5, 11]}


@pytest.mark.parametrize("job", RECORDED)
def test_a_call_gives_what_was_recorded(job: str, tmp_path: Path) -> None:
    found = json.loads(json.dumps(quantization.JOBS[job](tmp_path)))
    differs = [
        index for index, pair in enumerate(zip(found, RECORDED[job], strict=True)) if pair[0] != pair[1]
    ]
    assert differs == DIFFERENT.get(job, [])
