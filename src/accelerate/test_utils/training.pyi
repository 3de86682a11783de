# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.facade.client_test_model import RegressionDataset as RegressionDataset
from accelerate.facade.client_test_model import RegressionModel as RegressionModel
from typing import Any

def __getattr__(name: str) -> Any: ...
