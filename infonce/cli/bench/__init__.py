"""`infonce bench`: the command (command.py), where it measures (cpu.py, gpu.py) and what."""

from .command import bench

__all__ = ["bench"]
