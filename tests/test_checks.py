"""Bad input: the right exception, before any work, naming argument, expectation and what came."""

from typing import Any

import numpy as np
import pytest
from judge import LOSSES, arguments, pairs

import infonce
from infonce import spec
from infonce.checks import call as checks

Q = np.random.default_rng(0).standard_normal((6, 4))
K = np.random.default_rng(1).standard_normal((6, 4))
READ_ONLY = np.zeros((6, 4))
READ_ONLY.flags.writeable = False

CASES: list[tuple[str, Any, dict[str, Any], type[Exception], list[str]]] = [
    # loss, arguments, options, exception, words of the message
    ("clip", (Q.tolist(), K), {}, TypeError, ["image", "expected an array", "list"]),
    ("clip", (Q.astype(object), K), {}, TypeError, ["image", "float64, float32", "object"]),
    ("clip", (Q, K.astype("m8[s]")), {}, TypeError, ["text", "float64", "timedelta64[s]"]),
    ("clip", (Q.astype(str), K), {}, TypeError, ["image", "float64", "<U"]),
    ("clip", (Q.view([("x", float)]), K), {}, TypeError, ["image", "float64", "[('x', '<f8')]"]),
    ("clip", (Q, None), {}, TypeError, ["text", "expected an array", "None"]),
    ("clip", (Q.astype(int), K), {}, TypeError, ["image", "float64, float32", "int64"]),
    ("clip", (Q.astype(complex), K), {}, TypeError, ["image", "complex128"]),
    ("clip", (Q[0], K), {}, ValueError, ["image", "2 dimensions", "(4,)"]),
    ("clip", (Q[:0], K[:0]), {}, ValueError, ["image", "at least one row", "(0, 4)"]),
    ("clip", (Q[:, :0], K[:, :0]), {}, ValueError, ["image", "one feature", "(6, 0)"]),
    ("clip", (Q, K[:, :3]), {}, ValueError, ["text", "width 4", "(6, 3)"]),
    ("clip", (Q, K[:5]), {}, ValueError, ["text", "6 rows", "(5, 4)"]),
    ("lit", (Q, K[:5]), {}, ValueError, ["image", "6 rows", "(5, 4)"]),
    ("siglip", (Q, K[:5]), {}, ValueError, ["text", "6 rows", "(5, 4)"]),
    ("nt_xent", (Q[:5],), {}, ValueError, ["features", "even number", "(5, 4)"]),
    ("info_nce", (Q, K[:5]), {}, ValueError, ["key", "at least 6 rows", "(5, 4)"]),
    ("info_nce", (Q, K, [0.0] * 6), {}, TypeError, ["labels", "integers", "float64"]),
    ("info_nce", (Q, K, [[1], [1, 2]]), {}, TypeError, ["labels", "integers", "[[1], [1, 2]]"]),
    ("info_nce", (Q, K, [0] * 5), {}, ValueError, ["labels", "(6,)", "(5,)"]),
    ("info_nce", (Q, K, [0, 1, 2, 3, 4, 6]), {}, ValueError,
     ["labels", "[0, 6)", "got 6", "position 5"]),
    ("info_nce", (Q, K, [0, 1, -1, 3, 4, 5]), {}, ValueError, ["labels", "got -1", "position 2"]),
    ("clip", (Q, K), {"scale": None}, ValueError, ["temperature, scale", "got neither"]),
    ("clip", (Q, K), {"temperature": 1.0}, ValueError, ["temperature, scale", "got both"]),
    ("clip", (Q, K), {"scale": 0.0}, ValueError, ["scale", "positive", "0.0"]),
    ("clip", (Q, K), {"scale": np.nan}, ValueError, ["scale", "finite", "nan"]),
    ("clip", (Q, K), {"scale": "1"}, TypeError, ["scale", "number", "'1'"]),
    ("clip", (Q, K), {"scale": True}, TypeError, ["scale", "number", "True"]),
    ("clip", (Q, K), {"scale": np.ones(1)}, TypeError, ["scale", "0-d", "(1,)"]),
    ("clip", (Q, K), {"scale": 10**400}, ValueError, ["scale", "float64", "int 1000"]),
    ("clip", (Q, K), {"scale": 10**5000}, ValueError, ["scale", "float64", "int"]),
    ("clip", (Q, K), {"scale": np.array(2.0, object)}, TypeError, ["scale", "number", "object"]),
    ("clip", (Q, K), {"scale": np.timedelta64(3, "ns")}, TypeError, ["scale", "timedelta64[ns]"]),
    ("clip", (Q, K), {"scale": None, "temperature": -1}, ValueError, ["temperature", "positive"]),
    ("clip", (Q, K), {"scale": None, "temperature": 1e-320}, ValueError,
     ["temperature", "[1.1102230246251565e-16, 6.703903964971299e+153]", "float64", "1e-320"]),
    ("clip", (Q, K), {"scale": 2.0**53 * (1 + 2.0**-52)}, ValueError,
     ["scale: expected a number in [1.4916681462400413e-154, 9007199254740992.0]"]),
    ("clip", (Q.astype(np.float16), K.astype(np.float16)), {"scale": 1.7e7}, ValueError,
     ["scale", "[1.0842021724855044e-19, 16777216.0]", "float32", "17000000.0"]),
    ("siglip", (Q.astype(np.float32), K.astype(np.float32)),
     {"scale": None, "temperature": np.array(1e-8)}, ValueError,
     ["temperature: expected a number in [5.960464477539063e-08, 9.223372036854776e+18]"]),
    ("siglip", (Q, K, "no"), {}, TypeError, ["bias", "number", "'no'"]),
    ("siglip", (Q, K, np.inf), {}, ValueError, ["bias", "finite", "inf"]),
    ("clip", (Q, K), {"ids": np.zeros(6)}, TypeError, ["ids", "integers", "float64"]),
    ("clip", (Q, K), {"ids": np.zeros(5, int)}, ValueError, ["ids", "(6,)", "(5,)"]),
    ("info_nce", (Q[:3], K), {"ids": np.zeros(3, int)}, ValueError, ["ids", "pair", "3 queries"]),
    ("info_nce", (Q[:3], K), {"ids": (np.zeros(3, int), np.zeros(3, int))}, ValueError,
     ["ids[1]", "(6,)", "(3,)"]),
    ("nt_xent", (Q,), {"ids": (np.zeros(6, int), np.zeros(6, int))}, ValueError,
     ["ids", "one array", "pair"]),
    ("info_nce", (Q, K), {"ids": ([[1], [1, 2]], [0] * 6)}, TypeError, ["ids[0]", "integers"]),
    ("clip", (Q, K), {"reduction": "avg"}, ValueError, ["reduction", '"mean"', "'avg'"]),
    ("clip", (Q, K), {"reduction": []}, ValueError, ["reduction", '"mean"', "list []"]),
    ("clip", (Q, K), {"method": None}, ValueError, ["method", '"tiled"', "got None"]),
    ("clip", (Q, K), {"method": b"tiled"}, ValueError, ["method", '"tiled"', "bytes b'tiled'"]),
    ("clip", (Q, K), {"method": np.array(["tiled", "auto"])}, ValueError, ["method", "ndarray"]),
    ("clip", (Q, K), {"precision": 3}, ValueError, ["precision", '"fp32"', "int 3"]),
    *(("clip", (Q, K), {flag: odd}, TypeError, [f"{flag}: expected True or False, got", came])
      for flag in spec.FLAGS
      for odd, came in (("False", "'False'"), (None, "None"), (1, "int 1"),
                        (np.array([True, False]), "(2,) and dtype bool"))),
    ("clip", (Q, K), {"method": "fast"}, ValueError, ["method", '"tiled"', "'fast'"]),
    ("clip", (Q, K), {"precision": "fp8"}, ValueError, ["precision", '"bf16x3"', "'fp8'"]),
    ("clip", (Q, K), {"precision": "tf32"}, ValueError, ["precision", "CPU", "'tf32'"]),
    ("clip", (Q, K), {"workspace": 1.5}, TypeError, ["workspace", "integer", "1.5"]),
    ("clip", (Q, K), {"workspace": "1GiB"}, TypeError, ["workspace", "integer", "'1GiB'"]),
    ("clip", (Q, K), {"workspace": np.nan}, TypeError, ["workspace", "integer", "nan"]),
    ("clip", (Q, K), {"workspace": np.timedelta64(9, "s")}, TypeError, ["workspace", "timedelta"]),
    ("clip", (Q, K), {"workspace": 0}, ValueError, ["workspace", "positive", "0"]),
    ("clip", (Q, K), {"workspace": 8, "method": "tiled"}, ValueError, ["workspace", "at least"]),
    ("clip", (Q, K), {"workspace": 400, "method": "fused"}, ValueError,
     ['"fused"', "6 x 6", '"tiled"']),
    ("clip", (Q, K), {"progress": 3}, TypeError, ["progress", "callable", "3"]),
    ("clip", (Q, K), {"temprature": 3}, TypeError, ["temprature", "'temperature'"]),
    ("clip", (Q, K), {"unheard_of": 3}, TypeError, ["unheard_of", "temperature, scale, ids"]),
    ("clip", (Q, K), {"wrt": ["key"]}, ValueError, ["wrt", "image, text, scale", "'key'"]),
    ("clip", (Q, K), {"wrt": 1}, TypeError, ["wrt", "image, text, scale", "int 1"]),
    ("clip", (Q, K), {"wrt": [Q]}, ValueError, ["wrt", "image, text, scale", "(6, 4)"]),
    ("lit", (Q, K), {"wrt": ["image"]}, ValueError, ["wrt", "text, scale", "'image'"]),
    ("clip", (Q, K), {"grad_dtype": int}, TypeError, ["grad_dtype", "float32", "int"]),
    ("clip", (Q, K), {"grad_dtype": "floaty"}, TypeError, ["grad_dtype", "'floaty'"]),
    ("clip", (Q, K), {"grad_dtype": "f4,("}, TypeError, ["grad_dtype", "'f4,('"]),
    ("clip", (Q, K), {"grad_out": 10**400}, ValueError, ["grad_out", "float64", "int 1000"]),
    ("clip", (Q, K), {"grad_out": [[1], [1, 2]]}, TypeError, ["grad_out", "[[1], [1, 2]]"]),
    ("clip", (Q, K), {"grad_out": np.ones(6)}, ValueError, ["grad_out", "()", "(6,)"]),
    ("clip", (Q, K), {"grad_out": np.ones(5), "reduction": "none"}, ValueError,
     ["grad_out", "(6,)", "(5,)"]),
    ("clip", (Q, K), {"grad_out": "x"}, TypeError, ["grad_out", "number"]),
    ("clip", (Q, K), {"out": Q.copy()}, TypeError, ["out", "mapping or a sequence"]),
    ("clip", (Q, K), {"out": 5}, TypeError, ["out", "mapping or a sequence", "int 5"]),
    ("clip", (Q, K), {"out": [Q.copy()]}, ValueError, ["out", "2 arrays", "got 1"]),
    ("clip", (Q, K), {"out": {"key": Q.copy()}}, ValueError, ["out", "image, text", "'key'"]),
    ("clip", (Q, K), {"out": {"image": np.zeros((6, 3))}}, ValueError,
     ["out['image']", "(6, 4)", "(6, 3)"]),
    ("clip", (Q, K), {"out": {"image": np.zeros((6, 4), int)}}, TypeError,
     ["out['image']", "int64"]),
    ("clip", (Q, K), {"out": {"image": Q.tolist()}}, TypeError, ["out['image']", "list"]),
    ("clip", (Q, K), {"out": {"image": np.zeros((6, 4))}, "grad_dtype": np.float32}, TypeError,
     ["out['image']", "float32", "float64"]),
    ("clip", (Q, K), {"out": {"image": READ_ONLY}}, ValueError, ["out['image']", "read-only"]),
    ("clip", (Q, K), {"out": {"image": Q}}, ValueError, ["out", "share no memory"]),
    ("clip", (Q, K), {"return_logits": True}, ValueError, ["return_logits", '"naive"']),
    ("siglip", (Q, K), {"metrics": True}, ValueError, ["metrics", "siglip"]),
    ("clip", (Q, np.where(Q > 0, Q, np.nan)), {"check_finite": True}, ValueError,
     ["text", "finite", "row 0"]),
]  # fmt: skip


# those that other libraries have arrays for
NUMERIC = [
    case for case in CASES
    if all(a.dtype.kind in "biufc" for a in case[1] if isinstance(a, np.ndarray))
]  # fmt: skip


def test_lists_say_how_to_make_an_array() -> None:
    with pytest.raises(TypeError, match=r"image: expected an array, .*np.asarray makes one"):
        infonce.clip_loss(Q.tolist(), K, scale=1.0)


@pytest.mark.parametrize(("loss", "args", "options", "error", "words"), CASES)
def test_message(
    loss: str, args: Any, options: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    options = {"scale": 2.0, **options}
    function = getattr(infonce, f"{loss}_loss_and_grad")
    with pytest.raises(error) as caught:
        function(*args, **options)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_fused_counts_no_ranks_on_a_gpu() -> None:
    """On the CPU it does: each tile's logits are there to be counted."""
    pytest.importorskip("cupy")
    from infonce.kernels.gpu import fused as gpu_fused
    from infonce.kernels.problem import Problem

    gpu_fused.require(Problem(Q, K, 1.0, 1.0))
    with pytest.raises(ValueError, match=r'^method: "fused" .* expected .*"tiled".* metrics=True'):
        gpu_fused.require(Problem(Q, K, 1.0, 1.0, ranks=True))


def test_wrong_input_leaves_outputs_alone() -> None:
    out = {"image": np.full((6, 4), 5.0)}
    with pytest.raises(ValueError, match="reduction"):
        infonce.clip_loss_and_grad(Q, K, scale=1.0, out=out, reduction="max")  # type: ignore[arg-type]
    assert (out["image"] == 5.0).all()


def test_keywords_of_gradients_are_explained_to_the_loss_alone() -> None:
    with pytest.raises(TypeError, match="clip_loss_and_grad"):
        infonce.clip_loss(Q, K, scale=1.0, wrt=["image"])  # type: ignore[call-arg]


def test_check_finite_names_the_first_bad_row() -> None:
    bad = np.random.default_rng(0).standard_normal((9000, 2))
    bad[8123, 1] = np.inf
    with pytest.raises(ValueError, match=r"key: .* row 8123"):
        infonce.info_nce_loss(bad[:5] * 0, bad, scale=1.0, check_finite=True)


def test_naive_that_does_not_fit_names_tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from infonce.kernels.cpu import naive

    monkeypatch.setattr(naive, "available_memory", lambda: 1000)
    with pytest.raises(MemoryError, match=r'6 x 6 logits.*"tiled"'):
        infonce.clip_loss(Q, K, scale=1.0, method="naive")


@pytest.mark.parametrize("loss", LOSSES)
def test_scale_as_any_scalar(loss: str) -> None:
    args = arguments(loss, *pairs("random", 6, 6, 4, np.float64, 0))
    function = getattr(infonce, f"{loss}_loss")
    want = function(*args, scale=4.0)
    for scalar in (4, np.float32(4), np.array(4.0), np.array(4, np.float16)):
        assert function(*args, scale=scalar) == want
    assert function(*args, temperature=0.25) == want


def test_siglip_has_defaults_of_its_own() -> None:
    assert infonce.siglip_loss(Q, K) == infonce.siglip_loss(Q, K, -10.0, scale=10.0)


def test_signatures_spell_out_the_keywords() -> None:
    import inspect

    for loss in LOSSES:
        short = inspect.signature(getattr(infonce, f"{loss}_loss")).parameters
        long = inspect.signature(getattr(infonce, f"{loss}_loss_and_grad")).parameters
        assert short["method"].default == "auto"
        assert "grad_out" in long
        assert "grad_out" not in short
        doc = getattr(infonce, f"{loss}_loss_and_grad").__doc__
        for word in ("Parameters", "workspace", "grad_out", "Returns", "Raises", "References"):
            assert word in doc


def test_a_settled_call_still_looks_at_what_may_change() -> None:
    """The second call of a kind is not checked again; arrays among its options are."""
    z = np.eye(6, dtype=np.float32)
    scale, bias = np.array(2.0), np.array(-1.0)
    first = infonce.siglip_loss(z, z, bias, scale=scale)
    scale[...], bias[...] = 5.0, -3.0
    assert infonce.siglip_loss(z, z, bias, scale=scale) == infonce.siglip_loss(
        z, z, -3.0, scale=5.0
    )
    assert infonce.siglip_loss(z, z, bias, scale=scale) != first
    outs = [(np.empty_like(z), np.empty_like(z)) for _ in range(2)]
    for out in outs:
        got = infonce.clip_loss_and_grad(z, z.copy(), scale=1.0, out=out)
        assert got.grads.image is out[0]
    ids = np.arange(6) // 2
    plain = infonce.clip_loss(z, z, scale=1.0, ids=np.arange(6))
    assert infonce.clip_loss(z, z, scale=1.0, ids=ids) != plain
    with pytest.raises(TypeError, match="progress: expected a callable"):
        infonce.clip_loss(z, z, scale=1.0, ids=ids, progress=3)
    infonce.clip_loss(z, z, scale=1.0, workspace=1 << 20)
    with pytest.raises(TypeError, match="workspace: expected an integer"):
        infonce.clip_loss(z, z, scale=1.0, workspace=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'out'"):
        infonce.clip_loss(z, z, scale=1.0, out=outs[0])
    scale[...] = -1.0
    with pytest.raises(ValueError, match="scale: expected a positive number"):
        infonce.siglip_loss(z, z, bias, scale=scale)


@pytest.mark.parametrize("wrt", [None, "text", ("text", "scale"), ["image"], frozenset({"scale"})])
def test_the_second_call_of_a_kind_is_settled(monkeypatch: pytest.MonkeyPatch, wrt: Any) -> None:
    first = infonce.clip_loss_and_grad(Q, K, scale=1.0, wrt=wrt)
    monkeypatch.setattr(checks, "_check_static", None)
    again = infonce.clip_loss_and_grad(Q, K, scale=1.0, wrt=wrt)
    for got, want in zip(again.grads, first.grads, strict=True):
        np.testing.assert_array_equal(got, want)
