"""The public functions on arrays of a GPU: same answers, same kind of array, same errors."""

from typing import Any

import numpy as np
import pytest
from judge import LOSSES, arguments, assert_grad, judged, pairs
from test_gpu import MISSING

import infonce

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(MISSING), reason=MISSING)]
if not MISSING:
    import cupy

METHODS = ["auto", "naive", "fused", "tiled"]


def call(loss: str, *args: Any, **options: Any) -> infonce.LossAndGrad:
    return getattr(infonce, f"{loss}_loss_and_grad")(*args, **options)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_cupy(loss: str, method: str, dtype: Any) -> None:
    args = arguments(loss, *pairs("partly aligned", 70, 70, 12, dtype, 0))
    ref = judged(loss, args, scale=6.0)
    out = call(loss, *map(cupy.asarray, args), scale=6.0, method=method)
    assert isinstance(out.loss, cupy.ndarray)
    assert out.loss.shape == ()
    assert abs(float(out.loss) - ref.loss) < 1e-5 * ref.loss
    for name, want in ref.grads.items():
        if isinstance(want, np.ndarray):
            got = getattr(out.grads, name)
            assert got.dtype == dtype
            assert_grad(got.get(), want, np.dtype(dtype).name, 6.0, terms=6.0 * 70**-0.5)
    alone = getattr(infonce, f"{loss}_loss")(*map(cupy.asarray, args), scale=6.0, method=method)
    assert abs(float(alone) - ref.loss) < 1e-5 * ref.loss


@pytest.mark.parametrize("loss", LOSSES)
def test_scalars_on_the_device(loss: str) -> None:
    args = [cupy.asarray(z) for z in arguments(loss, *pairs("random", 20, 20, 8, np.float32, 1))]
    want = call(loss, *args, scale=5.0)
    for option in ({"scale": cupy.array(5.0)}, {"temperature": cupy.array(0.2)}):
        got = call(loss, *args, **option)
        assert abs(float(got.loss - want.loss)) <= 1e-5 * float(want.loss)
        cupy.testing.assert_allclose(got.grads[0], want.grads[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_torch(method: str) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    image, text = pairs("partly aligned", 64, 64, 16, np.float32, 2)
    ref = judged("clip", (image, text), scale=6.0)
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [torch.from_numpy(z).cuda().to(dtype) for z in (image, text)]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            late = [t * 1.0 for t in tensors]
            out = call("clip", *late, scale=6.0, method=method)
            loss = out.loss + 0
        stream.synchronize()
        assert out.grads.image.dtype == dtype
        assert out.grads.image.is_cuda
        assert abs(float(loss) - ref.loss) < (1e-5 if dtype == torch.float32 else 1e-2)


def test_jax() -> None:
    jax = pytest.importorskip("jax")
    image, text = pairs("partly aligned", 64, 64, 16, np.float32, 2)
    ref = judged("clip", (image, text), scale=6.0)
    out = call("clip", jax.numpy.asarray(image), jax.numpy.asarray(text), scale=6.0)
    assert isinstance(out.grads.image, jax.Array)
    assert abs(float(out.loss) - ref.loss) < 1e-5 * ref.loss


def test_metrics_and_labels() -> None:
    query, key = pairs("partly aligned", 50, 80, 8, np.float32, 3)
    labels = np.random.default_rng(0).permutation(80)[:50]
    for method in METHODS:
        got = call("info_nce", cupy.asarray(query), cupy.asarray(key), cupy.asarray(labels),
                   scale=6.0, method=method, metrics=True)  # fmt: skip
        want = call("info_nce", query, key, labels, scale=6.0, metrics=True)
        assert got.metrics is not None
        assert want.metrics is not None
        assert got.metrics.top(1) == want.metrics.top(1)
        assert abs(float(got.loss) - float(want.loss)) < 1e-5
        wrong = cupy.asarray(np.where(labels == labels[3], 80, labels))
        rows = infonce.info_nce_loss(
            cupy.asarray(query), cupy.asarray(key), wrong, scale=6.0, method=method,
            reduction="none",
        )  # fmt: skip
        assert np.flatnonzero(np.isnan(rows.get())).tolist() == [3]


def test_mixed_places() -> None:
    image, text = pairs("random", 8, 8, 4, np.float32, 4)
    with pytest.raises(ValueError, match="text: expected an array on GPU 0 like image, got one on"):
        infonce.clip_loss(cupy.asarray(image), text, scale=1.0)
    with pytest.raises(ValueError, match="text: expected an array on the host like image"):
        infonce.clip_loss(image, cupy.asarray(text), scale=1.0)
    with pytest.raises(TypeError, match="on the GPU"):
        infonce.clip_loss_and_grad(
            cupy.asarray(image), cupy.asarray(text), scale=1.0, out={"image": image.copy()}
        )
    text[5, 2] = np.nan
    on_device = cupy.asarray(image), cupy.asarray(text)
    with pytest.raises(ValueError, match=r"text: expected finite values.* row 5"):
        infonce.clip_loss(*on_device, scale=1.0, check_finite=True)
