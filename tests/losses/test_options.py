"""Options of the softmax on the CPU, by every method, against the specification."""

from typing import Any

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reference_problems import EITHER, Problem, problems, quick

import infonce
from infonce import spec
from infonce.checks.softmax import LACKING

REFUSED = {"sup_con": spec.SUP_CON.refused, "gte": spec.GTE.refused}
METHODS = ("naive", "fused", "tiled")


@st.composite
def calls(draw: Any) -> tuple[Problem, dict[str, Any], str]:
    """A problem of the specification, the options of the same call, and a method."""
    problem = draw(problems(names=NAMES, options=EITHER))
    softmax = dict(problem.softmax)
    for name in (*LACKING, *REFUSED.get(problem.name, ())):
        softmax.pop(name, None)
    for pair in spec.EXCLUSIVE:
        if set(pair) <= softmax.keys():
            del softmax[pair[1]]
    weights = np.abs(problem.weights) if problem.weights is not None else None
    options = {
        "scale": problem.scale,
        "normalize": problem.normalize,
        "ids": problem.ids,
        **softmax,
    }
    problem = problem._replace(softmax=softmax)
    has_positive = np.array([bool(positives) for positives in problem.positives()])
    if weights is not None:
        options["weights"] = weights
        assume((weights * has_positive).sum() > 0.1)
        problem = problem._replace(weights=weights * has_positive / (weights * has_positive).sum())
    if problem.labels is not None:
        options["labels"] = problem.labels
    return problem, options, draw(st.sampled_from(METHODS))


NAMES = ("info_nce", "nt_xent", "clip", "lit", "sup_con", "gte")


@settings(quick, max_examples=200)
@given(calls())
def test_float64_is_the_specification(call: tuple[Problem, dict[str, Any], str]) -> None:
    problem, options, method = call
    want = problem.reference()
    got = getattr(infonce, f"{problem.name}_loss_and_grad")(
        *problem.features, method=method, **options
    )
    assert_near(got.loss, want.loss)
    for name, gradient in want.grads.items():
        if gradient is not None:
            assert_near(getattr(got.grads, name), gradient)
    for have, expected in zip(np.atleast_2d(got.lse), np.atleast_2d(want.lse), strict=True):
        assert_near(have, expected)
    alone = getattr(infonce, f"{problem.name}_loss")(*problem.features, method=method, **options)
    assert_near(alone, want.loss)


def assert_near(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
