"""Check a clean install, with the Python of its environment: `python tests/installed.py`.

The losses, the command, the types and the CUDA sources have to be in the environment; nothing may
come from a checkout.
"""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import infonce.distributed
import infonce.kernels
import numpy as np

import infonce
import infonce.reference


def main() -> None:
    package = Path(infonce.__file__).parent
    assert package.is_relative_to(sys.prefix), f"expected it in {sys.prefix}, got {package}"
    about = importlib.metadata.metadata("infonce-kernels")
    assert about["Version"] == infonce.__version__, about["Version"]
    for name in ("py.typed", "torch/__init__.pyi", "jax/__init__.pyi"):
        assert (package / name).is_file(), f"{name}: not installed"
    sources = [path for path in package.glob("kernels/cuda/**/*") if path.suffix in (".cu", ".cuh")]
    assert len(sources) > 20, f"CUDA sources: {len(sources)} are installed"

    rng = np.random.default_rng(0)
    image, text = rng.standard_normal((2, 64, 16)).astype(np.float32)
    out = infonce.clip_loss_and_grad(image, text, temperature=0.5, normalize=True)
    unit = [z / np.linalg.norm(z, axis=1, keepdims=True) for z in np.float64([image, text])]
    exact = infonce.reference.clip(*unit, scale=2.0).loss
    assert abs(out.loss - exact) < 1e-6 * exact, (out.loss, exact)

    command = Path(sys.executable).with_name("infonce")
    output = subprocess.run([command, "--help"], capture_output=True, text=True, check=True).stdout
    assert "explain" in output, output
    print(f"{package}: {about['Version']}, loss {out.loss:.6f}, {len(sources)} CUDA sources")


if __name__ == "__main__":
    main()
