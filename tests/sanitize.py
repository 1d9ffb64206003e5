"""Runs the GPU kernels under compute-sanitizer: python tests/sanitize.py

A small sweep over losses, methods and precisions, with odd sizes around the tiles' edges; each
tool's findings fail the run. Needs a GPU and CUDA's compute-sanitizer on the PATH.
"""

import itertools
import subprocess
import sys

TOOLS = ("memcheck", "racecheck", "synccheck")


def sweep() -> None:
    import cupy
    import ml_dtypes
    import numpy as np

    import infonce

    rng = np.random.default_rng(0)
    names = {"info_nce": 2, "nt_xent": 1, "clip": 2, "lit": 2, "siglip": 2}
    dtypes = (np.float32, np.float64, ml_dtypes.bfloat16)
    for dtype, (loss, sides), method in itertools.product(
        dtypes, names.items(), ("tiled", "fused", "naive")
    ):
        for rows, width, normalize in ((34, 20, True), (130, 72, False), (258, 129, False)):
            z = [
                cupy.asarray(rng.standard_normal((rows, width)).astype(dtype) / width**0.5)
                for _ in range(sides)
            ]
            ids = rng.integers(0, rows, rows) if width == 72 else None
            out = getattr(infonce, f"{loss}_loss_and_grad")(
                *z, scale=5.0, method=method, normalize=normalize, ids=ids, workspace=2**22
            )
            assert np.isfinite(float(out.loss)), (loss, method, rows, width)


def main() -> int:
    if sys.argv[1:] == ["sweep"]:
        sweep()
        return 0
    worst = 0
    for tool in TOOLS:
        print(f"--- {tool}", flush=True)
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
        done = subprocess.run([*command, sys.executable, __file__, "sweep"], check=False)
        worst = max(worst, done.returncode)
    print("clean" if worst == 0 else "errors were found")
    return worst


if __name__ == "__main__":
    sys.exit(main())
