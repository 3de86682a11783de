"""Version 1 of sharding on two simulated accelerators; torch cannot rest its parameters on their host."""

from __future__ import annotations

from typing import Any

from tests.cpu.test_fsdp1 import accelerator_of, params_in_state, whole
from tests.cpu.test_fsdp_bad_input import step_unprepared
from tests.support.numbers import close
from tests.support.ranks import RankServer, same_on_all
from tests.support.sharded_models import adamw, batches, loss_of, plain, share, tiny


def trained() -> Any:
    accelerator = accelerator_of({"auto_wrap_policy": "transformer_based_wrap"})
    model = tiny(accelerator.process_index)
    model, optimizer = accelerator.prepare(model, adamw(model))
    losses, norms = [], []
    for words in batches(8):
        mine = share(words, accelerator.process_index, 2).to(accelerator.device)
        loss = loss_of(model, mine)
        accelerator.backward(loss)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    rests = {unit.local_values().device.type for unit in accelerator.strategy._flat_params()}
    return (losses, norms, params_in_state(whole(accelerator, model))), rests


def test_it_trains_to_the_numbers_of_one_cpu_process(ranks: RankServer) -> None:
    """B7: the optimizer was made for parameters on the host, which are others on the device."""
    ours, rests = same_on_all(ranks(2, trained))
    assert rests == {"sim"}
    close(ours, plain(1), 1e-4)


def test_the_step_of_an_optimizer_that_was_never_prepared_is_refused(ranks: RankServer) -> None:
    """torch's class would keep the parameters; here the device has others, and nothing trained."""
    what, _ = same_on_all(ranks(2, step_unprepared, {}, {"fsdp_version": 1}))
    assert what == "the AdamW steps parameters that sharding has replaced"
