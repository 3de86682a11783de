"""The one contract of images and tables, which every tracker takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from accelerate.tracking import GeneralTracker, JSONLTracker
from tests.support.trackers import logged_values as media

LoggedImage, SettingError = media.LoggedImage, media.SettingError
render_figure, to_array, to_images = media.render_figure, media.to_array, media.to_images
to_markdown, to_table = media.to_markdown, media.to_table
RGB = np.arange(90, dtype="uint8").reshape(6, 5, 3)


def pixels(value: Any) -> list[Any]:
    return [to_array(image.content) for image in to_images("seen", value)]


@pytest.mark.parametrize(
    "value",
    [
        RGB,
        RGB.transpose(2, 0, 1),
        torch.from_numpy(RGB),
        torch.from_numpy(RGB).permute(2, 0, 1),
        torch.from_numpy(RGB).permute(2, 0, 1).to(torch.bfloat16),
        RGB.astype("float32") / 255,
        RGB.astype("float64"),
        RGB.astype("int64"),
        Image.fromarray(RGB),
        RGB[None],
        RGB.transpose(2, 0, 1)[None],
        [RGB],
        (RGB,),
    ],
)
def test_every_form_is_the_same_image(value: Any) -> None:
    (array,) = pixels(value)
    assert array.dtype == np.uint8
    np.testing.assert_array_equal(array, RGB)


def test_a_batch_is_as_many_images_and_a_list_may_mix() -> None:
    batch = np.stack([RGB, 255 - RGB])
    for value in (batch, torch.from_numpy(batch).permute(0, 3, 1, 2), [batch[0], Image.fromarray(batch[1])]):
        one, two = pixels(value)
        np.testing.assert_array_equal(one, RGB)
        np.testing.assert_array_equal(two, 255 - RGB)
    assert len(pixels([batch, RGB])) == 3


def test_gray_is_shown_as_gray_and_transparency_stays() -> None:
    gray = np.array([[0, 1], [2, 255]], dtype="uint8")
    for value in (gray, gray[..., None], gray[None], gray[None, None], torch.from_numpy(gray)):
        (array,) = pixels(value)
        np.testing.assert_array_equal(array, np.stack([gray] * 3, axis=2))
    (array,) = pixels(np.array([[True, False]]))
    assert array[0, :, 0].tolist() == [255, 0]
    assert pixels(np.zeros((7, 8, 4)))[0].shape == (7, 8, 4)
    assert pixels(Image.fromarray(RGB).convert("RGBA"))[0].shape == (6, 5, 4)
    assert pixels(Image.fromarray(gray))[0].shape == (2, 2, 3)


def test_levels_out_of_range_are_cut_and_what_is_no_number_is_black() -> None:
    values = np.array([[-1.0, 0.5, np.nan]])
    assert pixels(values)[0][0, :, 0].tolist() == [0, 128, 0]
    assert pixels(np.array([[-5, 300]]))[0][0, :, 0].tolist() == [0, 255]


def test_where_both_layouts_fit_arrays_have_channels_last_and_tensors_first() -> None:
    square = np.arange(36, dtype="uint8").reshape(3, 4, 3)
    np.testing.assert_array_equal(pixels(square)[0], square)
    np.testing.assert_array_equal(pixels(torch.from_numpy(square))[0], square.transpose(1, 2, 0))
    np.testing.assert_array_equal(pixels(square[None])[0], square.transpose(1, 2, 0))


def test_captions_paths_and_objects_of_a_library_are_kept(tmp_path: Path) -> None:
    assert to_images("seen", (RGB, "a digit"))[0].caption == "a digit"
    assert [image.caption for image in to_images("seen", [(RGB, "a"), RGB])] == ["a", ""]
    Image.fromarray(RGB).save(tmp_path / "a.png")
    assert to_images("seen", tmp_path / "a.png") == [LoggedImage(str(tmp_path / "a.png"))]
    np.testing.assert_array_equal(pixels(tmp_path / "a.png")[0], RGB)
    own = object()
    assert to_images("seen", own) == [LoggedImage(own)]


def test_a_figure_is_an_image() -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1, 2), dpi=20)
    assert pixels(figure)[0].shape == (40, 20, 4)
    assert render_figure(figure, dpi=40).size == (40, 80)


@pytest.mark.parametrize("shape", [(5,), (2, 5, 5), (5, 2, 2), (1, 1, 1, 1, 1), (5, 5, 5, 5)])
def test_what_is_no_image_is_said_with_its_name_and_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(SettingError, match=r"'seen' is an array of the shape \(.*, which is no image"):
        to_images("seen", np.zeros(shape))


def test_tables_are_rows_or_data_frames() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"who": ["me", "you"], "what": [1, 2]})
    table = to_table("scores", dataframe=frame)
    assert table == to_table("scores", ["who", "what"], [["me", torch.tensor(1)], ["you", np.int64(2)]])
    assert table == (["who", "what"], [["me", 1], ["you", 2]])
    assert to_table("scores", data=[[1, 2]]).columns == ["0", "1"]
    assert to_table("empty", ["a"], []) == (["a"], [])
    assert to_markdown(to_table("t", ["a|b"], [["c\nd"]])) == "| a\\|b |\n| --- |\n| c d |"


def test_a_tracker_without_images_says_it_once_by_name_and_the_run_goes_on(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    tracker: GeneralTracker = JSONLTracker("run", tmp_path)
    tracker.start()
    for step in range(3):
        tracker.log_images({"seen": RGB}, step=step)
        tracker.log_figure(None, "figure.png")
    tracker.finish()
    assert [str(each.message) for each in recwarn] == [
        "jsonl has no images: they are left out of jsonl",
        "jsonl has no figures: they are left out of jsonl",
    ]
