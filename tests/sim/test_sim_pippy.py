"""``prepare_pippy`` on two accelerators: each holds its stage, and values pass between them."""

from __future__ import annotations

from typing import Any

import torch

from tests.cpu.test_pippy import Plain, Skip, floats, seeded, tokens
from tests.support.ranks import RankServer

CLOSE = {"rtol": 0.0, "atol": 1e-4}


def on_accelerators(kind: str) -> tuple[set[str], list[str]]:
    from accelerate import PartialState, prepare_pippy

    state = PartialState()
    assert state.device.type == kind
    for build, inputs in ((Plain, tokens), (Skip, floats)):
        plain, model = seeded(build), seeded(build)
        prepare_pippy(model, example_args=(inputs(8),), gather_output=True)
        for rows in (8, 5):
            found = model(inputs(rows).to(state.device) if rows == 5 else inputs(rows))
            expected = plain(inputs(rows))
            if isinstance(found, dict):
                found, expected = found["out"], expected["out"]
            assert found.device == state.device
            torch.testing.assert_close(found.cpu(), expected, **CLOSE)
    pipeline: Any = model
    moments = pipeline.pipeline_timeline(floats(8))
    return {str(p.device) for p in model.parameters()}, [f"{i.stage}.{i.chunk}" for i in moments]


def test_each_accelerator_holds_its_stage(ranks: RankServer) -> None:
    found = ranks(2, on_accelerators, "sim", devices=["sim:0", "sim:1"], timeout=120)
    assert [devices for devices, _ in found] == [{"sim:0", "meta"}, {"sim:1", "meta"}]
    assert found[0][1] == ["0.0", "0.1", "1.0", "1.1"]
