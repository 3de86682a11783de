# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.commands import accelerate_cli as accelerate_cli
from accelerate.commands import config as config
from accelerate.commands import env as env
from accelerate.commands import estimate as estimate
from accelerate.commands import launch as launch
from accelerate.commands import merge as merge
from accelerate.commands import test as test
from accelerate.commands import to_fsdp2 as to_fsdp2
from accelerate.commands import tpu as tpu
from accelerate.commands import utils as utils
