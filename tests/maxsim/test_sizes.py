"""The sizes of calls on tokens, without CuPy."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest
from infonce.kernels.gpu.config import DeviceProperties
from infonce.kernels.maxsim.sizes import TokenCall, TokenSide, cpu_sizes, gpu_sizes

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


@pytest.mark.parametrize(
    ("query", "key", "features", "second_pass"),
    [((300, 1), (60, 180), 16, False), ((8, 7), (8, 30), 128, True)],
)
def test_more_workspace_than_the_least_is_room(
    query: tuple[int, int], key: tuple[int, int], features: int, second_pass: bool
) -> None:
    """Larger blocks, which then fit, leave room for a piece."""
    query_side, key_side = (TokenSide(*side, "float32", False) for side in (query, key))
    call = TokenCall(
        query_side, key_side, features, "fp32", 1, normalize=True, has_second_pass=second_pass
    )
    with pytest.raises(ValueError, match="workspace: expected at least") as refused:
        call.divide(cpu_sizes(call))
    least = int(re.findall(r"at least (\d+)", str(refused.value))[0])
    for percent in range(100, 120):
        enough = replace(call, workspace=least * percent // 100)
        assert enough.divide(cpu_sizes(enough)).piece
