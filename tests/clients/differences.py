"""Where a call gives something else than on the public package, and why that is better.

A pattern stands for the whole name of calls (see ``calls/``). Errors that the same ``except`` catches, and
fields of our own besides all of theirs, are no differences.
"""

from __future__ import annotations

_ROWS = "one process gives what several give: one row each"
_NONE = "None holds no value of a wrong type; it is left alone everywhere"
_USERS = "that of the user's loader, which is wrapped; there of one rebuilt around its batch sampler"
_RNG = "nothing is synchronised unless asked for: the order of samples is agreed without"
_TEXT = "members equal their text, so that a text is found among them"
_OWN = "answers as every prepared loader does; there an AttributeError"

LISTED: dict[str, str] = {
    # --- operations
    r"operations.pure: (ignorant_)?find_batch_size\(scalar\)": (
        "a tensor without dimensions has no batch size: an error that says so, and None; there an IndexError"
    ),
    r"operations.pure: pad_input_tensors\((mixed|strings|string|none|number|set|nested)\)": (
        "leaves that are no tensors stay as they are, as everywhere else; there they raise"
    ),
    r"operations.pure: pad_input_tensors\((scalar|empty)\)": (
        "a tensor without the batch's size is no part of the batch"
    ),
    r"operations.pure: pad_input dim 1": "any dimension can be padded; there an error of torch",
    r"operations.pure: pad_input even": "what divides already is not padded",
    r"operations.pure: strict\(none\)": _NONE,
    r"operations.pure: is_xpu": "an answer; there an AttributeError without that device",
    r"operations.together: gather odd\(none\)": _NONE,
    r"operations.together: gather(\(scalar\)| 0-d)": _ROWS,
    r"operations.together: reduce .*scale": "the factor counts; there it is ignored on a CPU",
    r"operations.together: reduce\(.*, none\)": "'none' reduces nothing; there it sums",
    r"operations.together: reduce\(int32, sum\)": "sums of integers are in int64, as torch.sum gives",
    r"operations.together: pad bool": "padding keeps the dtype; there it becomes int64",
    r"operations.together: copy_tensor_to_devices both": "two tensors are refused; there they are summed",
    # --- handlers and enumerations
    r"handlers: InitProcessGroupKwargs\(.*": (
        "None until the group opens: then torch's default of the backend, the same 10 or 30 minutes"
    ),
    r"handlers: dynamo wrong mode": "an unknown mode is refused at once, with those that there are",
    r"handlers: .* fields": "fields of our own come after theirs",
    r"enums: (LoggerType|RNGType|DDPCommunicationHookType) (is text|equals its value)": _TEXT,
    r"enums: (LoggerType|RNGType|DistributedType) (members|list)": "what plug-ins add is in it",
    r"enums: \w+ in": _TEXT,
    # --- random
    r"random: no generator": "a ValueError that says what to give; there a bare assertion",
    # --- the Accelerator
    r"(accelerator|loaders): .*\.device": "a CPU has no number, on several processes either",
    r"accelerator: \w+\.ddp_handler": (
        "what replicas will be made with, given or not; it can be changed in place"
    ),
    r"accelerator: Accelerator\((handler twice|no handler)\)": (
        "a ValueError that says which; there a KeyError or a bare assertion"
    ),
    r"accelerator: prepare nothing": "an error that says so; there an IndexError",
    r"accelerator: tracker": "a tracker that does nothing, of a class of its own",
    r"loop: clip value": "without gradients there is nothing to clip; there an error of torch",
    r"wrappers: optimizer closure": "step returns the loss of its closure, as torch's does",
    r"wrappers: scheduler\.(base_lrs|last_epoch)": "the scheduler's own attributes can be read",
    r"samplers: len n=\d+ bs=4 drop=False split=True even=False of 2": (
        "the batches that this process gets; there one more where the other has the rest"
    ),
    # --- loaders
    r"loaders: .*\.rng_types": _RNG,
    r"loaders: .*\.(batch_size|drop_last)": _USERS,
    r"loaders: dispatched( map)?\.(synchronized_generator|total_batch_size)": _OWN,
    r"loaders: (stream|no batches)\.total_batch_size": "samples of all processes together",
    r"loaders: dispatched map samplers": "the order of samples is that of sharded loading",
    r"loaders: dispatched map skip": "skips a step of all processes; there the batch of one of them",
    r"loaders: no batches( .*|\..*)": "loaders without batches work; there most of these raise a TypeError",
    r"loaders: get_sampler of prepared": "the user's sampler; there None",
}
