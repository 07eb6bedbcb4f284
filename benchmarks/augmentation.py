"""Images per second through each augmentation, eager and compiled, on the GPU if there is one.

python benchmarks/augmentation.py            # 30 batches of 8192 images 3 × 32 × 32
python benchmarks/augmentation.py 128 1024   # other batch sizes
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from explicit_dropout.lab.config import Augmentation
from explicit_dropout.lab.data.augment import apply, draw

REPEATS = 30


def images_per_second(
    function: Callable[[Tensor, Augmentation, Tensor], Tensor], kind: Augmentation, images: Tensor, repeats: int
) -> float:
    def wait() -> None:
        if images.is_cuda:
            torch.cuda.synchronize()

    for _ in range(2):
        function(images, kind, draw(len(images), kind, None, images.device))
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        function(images, kind, draw(len(images), kind, None, images.device))
    wait()
    return repeats * len(images) / (time.perf_counter() - start)


def main(sizes: list[int]) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    repeats = REPEATS if device == "cuda" else 3
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}")
    kinds: tuple[Augmentation, ...] = ("crop_flip", "autoaugment")
    for size in sizes:
        images = torch.randint(0, 256, (size, 3, 32, 32), dtype=torch.uint8, device=device)
        for kind in kinds:
            eager = images_per_second(apply, kind, images, repeats)
            compiled = images_per_second(torch.compile(apply, fullgraph=True), kind, images, repeats)
            print(f"{size:6d} images  {kind:12s} eager {eager:14,.0f}/s  compiled {compiled:14,.0f}/s", flush=True)


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]] or [8192])
