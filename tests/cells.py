"""What processes of `benchmarks/together.py` are given to do: in a module that imports fast."""

import os
import time


def timed(cell, alone):
    """When the cell was ready, and when it measured."""
    (name, seconds) = cell
    time.sleep(seconds)
    ready = time.time()
    if name == "fails":
        return {"name": name, "error": "before it was ready"}
    with alone():
        begin = time.time()
        time.sleep(0.2)
        return {"name": name, "ready": ready, "begin": begin, "end": time.time()}


def killed(cell, alone):
    if cell == ("killed",):
        os._exit(3)
    with alone():
        return {"name": cell}
