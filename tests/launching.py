"""Commands that start processes of torch.distributed."""

import subprocess
from typing import Any

ABORTED_AT_EXIT = "terminate called without an active exception"


def launched(command: list[str] | tuple[str, ...], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command; again, if gloo's threads were still there when one of its processes ended.

    On a busy machine torch aborts so now and then after all work is done, whatever was computed.
    """
    for _ in range(4):
        ran = subprocess.run(command, capture_output=True, text=True, check=False, **options)
        if ABORTED_AT_EXIT not in ran.stderr:
            break
    return ran
