"""The specification against numbers that others published. (tests/matrix has its oracle)"""

import numpy as np
import pytest
from reference_problems import LOSSES, assert_close, assert_same_result, one_problem

import infonce
from infonce import reference


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "sup_con"])
def test_ids_of_other_types(name):
    """2^60 + i are different integers and the same float64. Ids may be strings."""
    distinct = one_problem(name, ids=2**60 + np.arange(6)).reference()
    assert_same_result(distinct, one_problem(name).reference())
    numbers = one_problem(name, ids=np.array([0, 1, 0, 2, 1, 0])).reference()
    words = one_problem(name, ids=np.array(["a", "b", "a", "cc", "b", "a"])).reference()
    assert_same_result(words, numbers)


def test_siglip_starts_at_the_scale_and_bias_of_the_paper():
    problem = one_problem("siglip")
    explicit = problem._replace(scale=10.0, bias=-10.0).reference()
    assert_same_result(reference.siglip(*problem.features), explicit)


def test_without_negatives_a_decoupled_loss_has_no_bound():
    """The loss is -inf, and its gradient is that of -x."""
    result = reference.info_nce([[1.0, 2.0]], [[3.0, 4.0]], scale=2.0, decoupled=True)
    assert result.loss == -np.inf
    assert result.lse[0] == -np.inf
    np.testing.assert_array_equal(result.grads["query"], [[-6.0, -8.0]])


# --- numbers that others published ---------------------------------------------------------------


def test_numbers_of_public_tests():
    """Of two queries with logits (3, 0) and (4, 0): softplus(-3) + softplus(4). Of two with logits
    (6, 3) and (9, 5), weighted. Of classes by angle, where the row alone in its class is left
    out."""
    two = [[3.0], [4.0]], [[1.0], [0.0]]
    weighted = [[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]], [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]
    angles = np.radians([0, 10, 20, 50, 60, 80])
    directions = (np.stack([np.cos(angles), np.sin(angles)], axis=1),)
    for name, features, options, want in (
        ("info_nce", two, {"weights": [1.0, 1.0]}, 4.066737 / 2),
        ("info_nce", weighted, {"weights": [0.7, 0.3]}, 1.239456),
        ("sup_con", directions, {"scale": 10.0, "labels": [0, 0, 0, 1, 1, 2]}, 0.720060),
    ):
        arrays, options = list(map(np.array, features)), {"scale": 1.0, **options}
        options |= {key: np.array(value) for key, value in options.items() if key != "scale"}
        got = getattr(infonce, f"{name}_loss")(*arrays, normalize=False, **options)
        assert_close(got, want, rtol=0, atol=5e-7)
        if "weights" in options:
            options["weights"] /= options["weights"].sum()
        got = getattr(reference, name)(*arrays, **options).loss
        assert_close(got, want, rtol=0, atol=5e-7)


@pytest.mark.extras
def test_clip_of_torch_normal_features():
    """The inputs of a public test of CLIP's loss in PyTorch, which gives the two numbers."""
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(1234)
    image, text = (torch.randn(3, 5, generator=generator).numpy() for _ in range(2))
    plain = reference.clip(image, text, scale=1 / 0.07)
    smooth = reference.clip(image, text, scale=1 / 0.07, label_smoothing=0.1)
    assert_close(plain.loss, 9.8753, rtol=0, atol=5e-5)
    assert_close(smooth.loss, 10.2524, rtol=0, atol=5e-5)


@pytest.mark.extras
def test_clip_of_two_linear_encoders():
    """The inputs of a public test of the same loss with encoders, which gives the number."""
    torch = pytest.importorskip("torch")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        image, text = torch.randn(4, 8), torch.randn(4, 5)
        encoders = torch.nn.Linear(8, 3), torch.nn.Linear(5, 3)
    with torch.no_grad():
        image, text = (m(z).numpy() for m, z in zip(encoders, (image, text), strict=True))
    assert_close(reference.clip(image, text, scale=1 / 0.07).loss, 3.8848, rtol=0, atol=1e-4)
