"""The sizes of calls on tokens, without CuPy."""

import subprocess
import sys

import pytest
from infonce.kernels.gpu.config import DeviceProperties
from infonce.kernels.maxsim.sizes import TokenCall, TokenSide, gpu_sizes

H100 = DeviceProperties("90", 132, 227 * 2**10, 228 * 2**10, 80 * 2**30)
A100 = DeviceProperties("80", 108, 163 * 2**10, 164 * 2**10, 80 * 2**30)


@pytest.mark.parametrize("device", [H100, A100], ids=["h100", "a100"])
def test_sizes_of_a_gpu_by_hand(device: DeviceProperties) -> None:
    """1024 queries of 32 tokens and 1024 keys of 300, of 128 features: winners are kept."""
    sides = (TokenSide(1024, tokens, "bfloat16", False) for tokens in (32, 300))
    call = TokenCall(*sides, 128, "bf16", 2**28)
    sizes = gpu_sizes(call, device)
    assert (sizes.query_row, sizes.key_row) == (32 * (128 * 4 + 20), 300 * (128 * 4 + 20))
    assert (sizes.winners, sizes.score, sizes.parts) == (64, 4, 0)
    # sweeps add the maxima of 16 query tokens, and store no products
    assert (sizes.maxima, sizes.fixed) == ((8, 0) if device is H100 else (128, 2**25))
    division = call.divide(sizes)
    assert (division.rows, division.columns, division.keeps_winners) == (1024, 1024, True)


def test_sizes_need_no_cupy() -> None:
    code = "import sys; sys.modules['cupy'] = None; import infonce.kernels.maxsim.sizes"
    subprocess.run([sys.executable, "-c", code], check=True)
