"""Bad input: the right exception, before any work, naming argument, expectation and what came."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from bad_calls import CASES, OWN, K, Q
from infonce.kernels.gpu.schedule import choose_method
from infonce.kernels.problem import Problem
from judge import LOSSES, arguments, pairs

import infonce
from infonce import dispatch
from infonce.checks import call as checks
from infonce.spec import BOOLEAN_OPTIONS


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
    """The fused method refuses metrics on a GPU only: on the CPU a tile's logits are there to
    count."""
    problem = Problem(Q, K, 1.0, 1.0, method="fused")
    assert choose_method(problem) == "fused"
    with pytest.raises(ValueError, match=r'^method: "fused" .* expected .*"tiled".* metrics=True'):
        choose_method(replace(problem, retrieval_ranks=True))


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


def test_check_finite_reads_what_the_loss_reads() -> None:
    """Features that a mask or indices leave out may be anything; so may their biases."""
    rng = np.random.default_rng(0)
    query, key, nan = rng.standard_normal((4, 3)), rng.standard_normal((4, 3)), np.nan
    table = np.concatenate([rng.standard_normal((2, 3)), np.full((2, 3), nan)])
    own_mask = np.array([[True, False]] * 4)
    indices = np.array([[0, 3], [1, 2], [1, 3], [0, -1]])
    tokens, mask = np.stack([query, np.full_like(query, nan)], axis=1), own_mask
    own = tokens.copy()
    calls: list[tuple[str, Any, dict[str, Any], str, Any]] = [
        ("info_nce", (query, key), {"own": own, "own_mask": mask,
         "own_bias": np.where(mask, 0.5, nan)}, "own", own),
        ("info_nce", (query, key), {"own": table, "own_mask": mask, "own_indices": indices},
         "own", table),
        ("clip", (tokens, tokens), {"query_mask": mask, "key_mask": mask}, "image", tokens),
    ]  # fmt: skip
    for loss, features, options, name, array in calls:
        function = getattr(infonce, f"{loss}_loss")
        options |= {"scale": 1.0, "check_finite": True}
        assert np.isfinite(function(*features, **options))
        array[(1,) + (0,) * (array.ndim - 1)] = np.inf
        with pytest.raises(ValueError, match=rf"{name}: .* row 1"):
            function(*features, **options)


def test_naive_that_does_not_fit_names_tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from infonce.kernels.cpu import resources

    monkeypatch.setattr(resources, "available_memory", lambda: 1000)
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


@pytest.mark.parametrize("name", BOOLEAN_OPTIONS)
def test_flags_of_numpy_are_those_of_python(name: str) -> None:
    """A call of rows with own negatives, and one of tokens."""

    def outcome(args: Any, options: dict[str, Any], value: Any) -> Any:
        try:
            out = infonce.info_nce_loss_and_grad(*args, scale=2.0, **options, **{name: value})
        except ValueError as error:
            return str(error)
        return [out.loss.tolist(), *(np.asarray(z).tolist() for z in out.grads if z is not None)]

    for args, options in (((Q, K), {"own": OWN}), ((Q[None], K[None]), {})):
        for value in (False, True):
            assert outcome(args, options, np.bool_(value)) == outcome(args, options, value)


@pytest.mark.parametrize("rows", [6, 600])
def test_iterators_are_read_once(rows: int) -> None:
    """Few rows make each prefix a call of its own, and many share products."""
    z = np.random.default_rng(0).standard_normal((2, rows, 8))
    lists = {"dims": [2, 4, 8], "dim_weights": [1.0, 2.0, 0.5], "wrt": ["text"]}
    iterators = {name: iter(values) for name, values in lists.items()}
    want, got = (infonce.clip_loss_and_grad(*z, scale=2.0, **o) for o in (lists, iterators))
    np.testing.assert_array_equal(got.grads.text, want.grads.text)
    assert got.grads.image is None


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


def test_a_call_from_the_cache_still_checks_arrays() -> None:
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
def test_the_second_call_of_a_kind_is_not_checked_again(
    monkeypatch: pytest.MonkeyPatch, wrt: Any
) -> None:
    first = infonce.clip_loss_and_grad(Q, K, scale=1.0, wrt=wrt)
    monkeypatch.setattr(checks, "_check_static", None)
    again = infonce.clip_loss_and_grad(Q, K, scale=1.0, wrt=wrt)
    for got, want in zip(again.grads, first.grads, strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_workspace_that_is_given_is_told_from_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who gives one gets no more than that, also if it is as large as the default."""
    problems: list[Any] = []

    def solve(request: Any) -> Any:
        problems.append(request.problem)
        return solved(request)

    solved = dispatch._solve
    monkeypatch.setattr(dispatch, "_solve", solve)
    z = np.eye(4)
    for options in ({}, {"workspace": None}, {"workspace": 2**28}, {"workspace": 2**20}):
        infonce.clip_loss(z, z, scale=1.0, **options)
    assert [p.workspace for p in problems] == [2**28, 2**28, 2**28, 2**20]
    assert [p.workspace_given for p in problems] == [False, False, True, True]


BIG = 2**63
INTEGERS = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_labels_and_ids_of_any_integer_dtype(dtype: Any) -> None:
    values = np.array([0, 1, 2, 2, 1, 0])
    z, integers = np.concatenate([Q, K])[:6], values.astype(dtype)
    top = np.iinfo(dtype).max  # as hashes are
    hashed = np.where(values == 2, top, integers).astype(dtype)
    for labels in (integers, hashed, hashed.astype(hashed.dtype.newbyteorder())):
        assert infonce.sup_con_loss(z, labels, scale=2.0) == infonce.sup_con_loss(
            z, values, scale=2.0
        )
        assert infonce.clip_loss(Q, K, scale=2.0, ids=labels) == infonce.clip_loss(
            Q, K, scale=2.0, ids=values
        )
    assert infonce.info_nce_loss(Q, K, integers, scale=2.0) == infonce.info_nce_loss(
        Q, K, values, scale=2.0
    )


@pytest.mark.parametrize("options", [{}, {"decoupled": True}, {"label_smoothing": 0.1}])
def test_hashes_of_64_bits_are_classes(options: Any) -> None:
    """Hashes from 2^63 on are classes. They are not negative labels, which stand for no class."""
    hashes = np.array([2**64 - 1, BIG, 7, BIG, 2**64 - 1, 7], np.uint64)
    want = infonce.sup_con_loss_and_grad(Q, np.array([1, 0, 2, 0, 1, 2]), scale=2.0, **options)
    got = infonce.sup_con_loss_and_grad(Q, hashes, scale=2.0, **options)
    assert got.loss == want.loss
    np.testing.assert_array_equal(got.grads.features, want.grads.features)


def test_ids_of_two_dtypes_are_compared_by_value() -> None:
    """2^64 - 1 is not -1, of which it has the bits; nor is any other such pair."""
    unsigned = np.array([2**64 - 1, BIG, 5, 6, BIG, 2**64 - 2], np.uint64)
    signed = np.array([6, -1, -BIG, 5, -2, -1])
    equal = np.array([[int(a) == int(b) for b in signed] for a in unsigned])
    labels = np.arange(6)
    for ids, same in (((unsigned, signed), equal), ((signed, unsigned), equal.T)):
        x = np.where(same & ~np.eye(6, dtype=bool), -np.inf, 2.0 * Q @ K.T)
        want = (np.log(np.exp(x).sum(axis=1)) - np.diag(x)).mean()
        got = infonce.info_nce_loss(Q, K, labels, scale=2.0, ids=ids)
        assert float(got) == pytest.approx(want, rel=1e-13)


def test_sets_of_positives_may_be_in_any_order() -> None:
    sets = np.array([[2, -1, 0], [1, 2, 0], [-5, -1, -1], [3, -1, -1], [5, 4, -1], [0, 5, 1]])
    want = infonce.info_nce_loss(Q, K, sets, scale=2.0)
    assert infonce.info_nce_loss(Q, K, sets[:, ::-1], scale=2.0) == want


@pytest.mark.parametrize("number", [np.full(1, 2.0), np.full((1, 1), 2, np.float32), np.ones(1)])
def test_an_array_of_one_number_is_that_number(number: np.ndarray) -> None:
    value = float(number.item())
    got = infonce.siglip_loss_and_grad(Q, K, -number, scale=number)
    want = infonce.siglip_loss_and_grad(Q, K, -value, scale=value)
    assert (got.loss, got.grads.scale, got.grads.bias) == (
        want.loss, want.grads.scale, want.grads.bias,
    )  # fmt: skip
    assert got.grads.scale.shape == ()
    assert infonce.clip_loss(Q, K, temperature=number) == infonce.clip_loss(Q, K, temperature=value)


@pytest.mark.parametrize("text", ["268435456", "256MiB", " 0.25 gib ", "256 MiB", "268.435456MB"])
def test_workspace_as_text(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problems: list[Any] = []
    solved = dispatch._solve
    monkeypatch.setattr(
        dispatch, "_solve", lambda request: problems.append(request.problem) or solved(request)
    )
    infonce.clip_loss(Q, K, scale=1.0, workspace=text)
    assert (problems[0].workspace, problems[0].workspace_given) == (2**28, True)


class Frame:
    """A table with the common part of pandas and polars."""

    shape = (6, 4)

    def __repr__(self) -> str:
        return "          0         1\n0  0.125730 -0.132105"

    def to_numpy(self) -> np.ndarray:
        return Q


def test_data_frames_say_how_to_make_an_array() -> None:
    match = r"^image: expected an array, got Frame of shape \(6, 4\): \.to_numpy\(\) makes one$"
    with pytest.raises(TypeError, match=match):
        infonce.clip_loss(Frame(), K, scale=1.0)


@pytest.mark.parametrize(
    ("function", "inputs", "words"),
    [
        (infonce.clip_loss, (), "inputs: expected CuPy arrays after the function, got none"),
        (infonce.clip_loss, (Q, K), r"inputs\[0\]: expected a CuPy array, got ndarray of shape"),
        (Q, (Q, K), "function: expected a callable, got ndarray of shape"),
    ],
)
def test_captures(function: Any, inputs: Any, words: str) -> None:
    with pytest.raises(TypeError, match=f"^{words}"):
        infonce.capture(function, *inputs, scale=1.0)
