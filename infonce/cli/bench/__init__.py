"""`infonce bench`: the command, and measurement of contenders on the CPU and on a GPU."""

from .command import bench

__all__ = ["bench"]
