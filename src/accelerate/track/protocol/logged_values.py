"""Conversion of logged values, configurations, images and tables to types that libraries take.

The contract of images and tables is the same for every tracker. An image is an array or a tensor (height,
width), (height, width, channels) or (channels, height, width) of 1, 3 or 4 channels; a batch of them, (n,
channels, height, width) or (n, height, width, channels); an image of PIL; a figure of matplotlib; the path
of a file; or an object of the tracker's own library. With a caption it is the tuple (image, caption). Where
both layouts fit, channels come last in an array, first in a tensor or a batch.

Integers are levels from 0 to 255. So are floats when one is greater than 1; otherwise 1.0 is white.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import math
import os
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from accelerate.core.errors import MissingExtraError, PrepareError, SettingError

# Arrays and tensors of more elements are text: numpy and torch print as many without leaving some out.
MAX_ELEMENTS = 1000


def unwrap_scalar(value: Any) -> Any:
    """Return the number of a one-element tensor or array; any other value unchanged."""
    item = getattr(value, "item", None)
    return item() if callable(item) and math.prod(getattr(value, "shape", (0,))) == 1 else value


def unwrap_scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with one-element tensors and arrays as numbers, also in nested mappings."""
    return {
        key: unwrap_scalars(value) if isinstance(value, Mapping) else unwrap_scalar(value)
        for key, value in values.items()
    }


def flatten_mappings(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten logged values: ``{"a": {"b": 1}}`` becomes ``{"a/b": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat |= flatten_mappings(value, f"{name}/") if isinstance(value, Mapping) else {name: value}
    return flat


def to_json_types(value: Any) -> Any:
    """Convert a configuration to the types of JSON: other values, such as paths and dtypes, become text.

    Namespaces and dataclasses become dicts of their fields; ranges, arrays and tensors that are not large
    become lists.
    """
    value = _list_elements(unwrap_scalar(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, argparse.Namespace | types.SimpleNamespace):
        value = vars(value)
    if isinstance(value, Mapping):
        return {str(key): to_json_types(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset | range):
        return [to_json_types(each) for each in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    return next((kind(value) for kind in (int, float) if isinstance(value, kind)), str(value))


def _list_elements(value: Any) -> Any:
    """Return the elements of an array or a tensor as lists; any other value, and a large one, unchanged."""
    elements = getattr(value, "tolist", None)
    if not callable(elements) or math.prod(getattr(value, "shape", (math.inf,))) > MAX_ELEMENTS:
        return value
    try:
        return elements()
    except RuntimeError:  # on the meta device, or sparse
        return value


def to_json_config(values: Any) -> Any:
    """Convert a configuration by ``to_json_types``; an object of another class counts as its attributes."""
    plain = to_json_types(values)
    is_object = isinstance(plain, str) and not isinstance(values, str) and hasattr(values, "__dict__")
    return to_json_types(vars(values)) if is_object else plain


def flatten_config(values: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten a configuration: ``{"a": {"b": 1}}`` becomes ``{"a.b": 1}``; lists become text.

    Raises:
        PrepareError: the configuration has no keys.
    """
    flat: dict[str, Any] = {}
    plain = to_json_config(values)
    if not isinstance(plain, dict):
        raise PrepareError(
            f"the configuration for the trackers is a {type(values).__name__}",
            why="values are stored under names",
            fix="pass a dict, such as vars(args)",
        )
    for key, value in plain.items():
        if isinstance(value, dict) and value:
            flat |= flatten_config(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat


# --- images and tables

CHANNELS = (1, 3, 4)


class LoggedImage(NamedTuple):
    """One image.

    Attributes:
        content: an array (height, width, 3 or 4) of uint8, an image of PIL, a path, or the library's object.
        caption: its text; empty without one.
    """

    content: Any
    caption: str = ""


class LoggedTable(NamedTuple):
    """A table: names of columns, and rows of as many values."""

    columns: list[str]
    rows: list[list[Any]]


def to_images(key: str, value: Any) -> list[LoggedImage]:
    """Return the images of ``value``: one, or a list or batch of them.

    Raises:
        SettingError: an array has no shape of images; ``key`` names it.
    """
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], str):
        return [image._replace(caption=value[1]) for image in to_images(key, value[0])]
    if isinstance(value, list | tuple):
        return [image for each in value for image in to_images(key, each)]
    if isinstance(value, os.PathLike):
        return [LoggedImage(os.fspath(value))]
    if hasattr(value, "savefig"):
        return [LoggedImage(render_figure(value))]
    is_tensor = hasattr(value, "detach")
    if is_tensor:
        tensor = value.detach().cpu()
        value = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    if isinstance(value, np.ndarray):
        return [LoggedImage(_to_pixels(each)) for each in _channels_last(key, value, is_tensor)]
    return [LoggedImage(value)]


def to_array(content: Any) -> Any:
    """Return the pixels of an image's content, (height, width, 3 or 4) of uint8.

    Raises:
        MissingExtraError: it is a file, and Pillow is not installed.
    """
    if isinstance(content, str):
        content = _pil().open(content)
    if isinstance(content, np.ndarray):
        return content
    return np.asarray(content if content.mode in ("RGB", "RGBA") else content.convert("RGB"))


def to_pil(content: Any) -> Any:
    """Return an image's content as an image of PIL, if it is an array; other content unchanged."""
    return _pil().fromarray(content) if isinstance(content, np.ndarray) else content


def render_figure(figure: Any, **save_kwargs: Any) -> Any:
    """Return a figure of matplotlib as an image of PIL."""
    file = io.BytesIO()
    figure.savefig(file, **{**save_kwargs, "format": "png"})
    return _pil().open(file)


def to_table(
    name: str,
    columns: Sequence[Any] | None = None,
    data: Sequence[Sequence[Any]] | None = None,
    dataframe: Any = None,
) -> LoggedTable:
    """Return a table; columns without names are numbered.

    Raises:
        SettingError: there are neither rows nor a data frame, or a row has another length than the columns.
    """
    if dataframe is not None:
        columns = list(dataframe.columns)
        data = list(zip(*(dataframe[column].to_list() for column in columns), strict=True))
    elif data is None:
        raise SettingError(f"the table {name!r} has no rows", fix="give data=[[...]] or dataframe=")
    rows = [[unwrap_scalar(value) for value in row] for row in data]
    names = [str(each) for each in (range(len(rows[0]) if rows else 0) if columns is None else columns)]
    for number, row in enumerate(rows):
        if len(row) != len(names):
            raise SettingError(
                f"row {number} of the table {name!r} has {len(row)} values for {len(names)} columns",
                fix="give each row a value for each column, None where there is none",
            )
    return LoggedTable(names, rows)


def to_markdown(table: LoggedTable) -> str:
    """Return a table in Markdown."""
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    cells = [[str(each).replace("|", "\\|").replace("\n", " ") for each in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def number_names(name: str, contents: Sequence[Any], separator: str = "/") -> Iterator[tuple[str, Any]]:
    """Yield each content with its name: of several, ``name/0``, ``name/1``."""
    for number, content in enumerate(contents):
        yield name if len(contents) == 1 else f"{name}{separator}{number}", content


def is_own_object(library: str, value: Any) -> bool:
    """Return True for an object of a class that ``library`` defines."""
    return type(value).__module__.partition(".")[0] == library


def join_name(folder: str | None, path: str) -> str:
    """Return the name of a stored file: that of ``path``, below ``folder``."""
    return "/".join(filter(None, [(folder or "").strip("/"), os.path.basename(path)]))


def _channels_last(key: str, array: Any, prefers_first: bool) -> list[Any]:
    """Return the images of an array, each (height, width, channels)."""
    shape = array.shape
    if array.ndim == 2:
        return [array[..., None]]
    if array.ndim in (3, 4):
        first, last = shape[-3] in CHANNELS, shape[-1] in CHANNELS
        if first and (not last or prefers_first or array.ndim == 4):
            array, last = np.moveaxis(array, -3, -1), True
        if last:
            return [array] if array.ndim == 3 else list(array)
    raise SettingError(
        f"{key!r} is an array of the shape {tuple(shape)}, which is no image",
        why="an image has 1, 3 or 4 channels, first or last; a batch has one dimension more",
        fix="log (h, w), (h, w, c), (c, h, w), (n, c, h, w), (n, h, w, c), or a list of images",
    )


def _to_pixels(array: Any) -> Any:
    """Return (height, width, channels) as uint8; gray becomes RGB."""
    if array.dtype != np.uint8:
        levels = np.nan_to_num(array.astype(np.float64))
        is_share = array.dtype == np.bool_ or (array.dtype.kind == "f" and levels.max(initial=0) <= 1)
        array = np.clip(np.rint(levels * 255 if is_share else levels), 0, 255).astype(np.uint8)
    return np.ascontiguousarray(array.repeat(3, axis=2) if array.shape[2] == 1 else array)


def _pil() -> Any:
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise MissingExtraError("pillow", "an image from a file or a figure") from error
    return Image
