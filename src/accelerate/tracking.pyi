# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.facade.tracker_set import filter_trackers as filter_trackers
from accelerate.facade.tracker_set import get_available_trackers as get_available_trackers
from accelerate.track import register_tracker_class as register_tracker_class
from accelerate.track.aim import AimTracker as AimTracker
from accelerate.track.base import GeneralTracker as GeneralTracker
from accelerate.track.base import on_main_process as on_main_process
from accelerate.track.clearml import ClearMLTracker as ClearMLTracker
from accelerate.track.comet_ml import CometMLTracker as CometMLTracker
from accelerate.track.dvclive import DVCLiveTracker as DVCLiveTracker
from accelerate.track.jsonl import JSONLTracker as JSONLTracker
from accelerate.track.mlflow import MLflowTracker as MLflowTracker
from accelerate.track.swanlab import SwanLabTracker as SwanLabTracker
from accelerate.track.tensorboard import TensorBoardTracker as TensorBoardTracker
from accelerate.track.trackio import TrackioTracker as TrackioTracker
from accelerate.track.wandb import WandBTracker as WandBTracker
from typing import Any

LOGGER_TYPE_TO_CLASS: Any
logger: Any

def __getattr__(name: str) -> Any: ...
