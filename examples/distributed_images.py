"""Draw pictures with a diffusion model on several processes: each takes its part, and no picture changes.

    pip install diffusers
    python examples/distributed_images.py
    accelerate launch --num_processes 2 examples/distributed_images.py --folder pictures

A DDPM of diffusers with random weights, which need no download, turns noise into pictures. The noise of each
picture has a seed of its own, so a picture does not depend on the process that draws it.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from diffusers.models.unets.unet_2d import UNet2DModel
from diffusers.pipelines.ddpm.pipeline_ddpm import DDPMPipeline
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler

from accelerate import PartialState
from accelerate.utils import gather_object

PICTURES, STEPS = 5, 3


def make_pipeline() -> Any:
    torch.manual_seed(0)
    unet = UNet2DModel(
        sample_size=16,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    pipeline = DDPMPipeline(unet=unet, scheduler=DDPMScheduler(num_train_timesteps=100))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw pictures on several processes.")
    parser.add_argument("--folder", type=Path, help="where the pictures go")
    args = parser.parse_args()
    state = PartialState()
    pipeline = make_pipeline().to(state.device)

    drawn: list[tuple[int, str]] = []
    with state.split_between_processes(list(range(PICTURES))) as own_seeds:
        for seed in own_seeds:
            generator = torch.Generator().manual_seed(seed)
            picture = pipeline(num_inference_steps=STEPS, generator=generator).images[0]
            if args.folder:
                args.folder.mkdir(parents=True, exist_ok=True)
                picture.save(args.folder / f"picture_{seed}.png")
            drawn.append((seed, picture.tobytes().hex()[:24]))

    every_picture = gather_object(drawn)
    if state.is_main_process:
        print(f"{state.num_processes} processes drew {len(every_picture)} pictures")
        for seed, pixels in every_picture:
            print(f"picture {seed} begins with {pixels}")
    state.destroy_process_group()


if __name__ == "__main__":
    main()
