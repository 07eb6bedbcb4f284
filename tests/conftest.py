import signal

import torch

# Ctrl-C is ignored in a shell's background, also by what the tests start there and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # tensors are tiny, and tests run in processes side by side


def _declare_torchvision_operators() -> None:
    """timm imports torchvision, whose default wheel cannot load its operators beside a CPU build of torch and then
    fails on import (and takes transformers and lightning with it). Declaring the two schemas it asks for is enough."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    globals()["_torchvision"] = library  # the schemas live as long as the library object


try:
    import torchvision  # noqa: F401
except RuntimeError:
    _declare_torchvision_operators()
