"""Wrong calls that a newcomer makes: every function and module says what to write instead."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from infonce.checks.teacher import ALL_LOSSES

RNG = np.random.default_rng(0)
FEATURES = RNG.standard_normal((2, 8, 4))
FEATURES /= np.linalg.norm(FEATURES, axis=2, keepdims=True)
LABELS = np.arange(8) % 4
MODULES = {"clip": "CLIPLoss", "gte": "GTELoss", "info_nce": "InfoNCELoss", "lit": "LiTLoss",
           "nt_xent": "NTXentLoss", "siglip": "SigLIPLoss", "sup_con": "SupConLoss"}  # fmt: skip
LIBRARIES = {"infonce": "numpy", "infonce.distributed": "numpy", "infonce.torch": "torch",
             "infonce.jax": "jax"}  # fmt: skip
# package, function or module, loss
CALLS = [
    (package, name, loss)
    for package in LIBRARIES
    for loss in ALL_LOSSES
    for name in (f"{loss}_loss", f"{loss}_loss_and_grad")
    if not (name.endswith("grad") and package in ("infonce.torch", "infonce.jax"))
] + [("infonce.torch", name, loss) for loss, name in MODULES.items()]


# losses of one array of views, and calls whose checks want no MPI library
VIEWS = [case for case in CALLS if len(ALL_LOSSES[case[2]].arguments) == 1]
IN_ONE_PROCESS = [case for case in CALLS if case[0] != "infonce.distributed"]


@pytest.fixture(params=CALLS, ids=".".join)
def call(request: pytest.FixtureRequest) -> tuple[str, Callable[..., Any], str, Callable[..., Any]]:
    """The full name and the function of a call, its loss, and what makes an array."""
    package, name, loss = request.param
    library = pytest.importorskip(LIBRARIES[package])
    function = getattr(importlib.import_module(package), name)
    if name.endswith("Loss"):
        function = function()
    asarray = library.tensor if package == "infonce.torch" else np.asarray
    return f"{package}.{name}()", function, loss, asarray


def arguments(loss: str) -> list[Any]:
    """The arguments that a loss takes without a keyword."""
    kind = ALL_LOSSES[loss]
    arrays = [*FEATURES] * (2 if kind.taught else 1) if len(kind.arguments) > 1 else [FEATURES[0]]
    return [*arrays, LABELS] if kind.classes else arrays


@pytest.mark.extras
def test_temperature_is_a_keyword(call: Any) -> None:
    """Without its keyword. (The third argument of some is labels, or a bias.)"""
    name, function, loss, asarray = call
    taken = [asarray(z) for z in arguments(loss)]
    if loss in ("info_nce", "siglip") or (loss, name[:19]) == ("nt_xent", "infonce.distributed"):
        taken.append(asarray(LABELS))
    with pytest.raises(TypeError) as raised:
        function(*taken, 0.07)
    message = str(raised.value)
    assert message.startswith(f"{name}: expected {len(taken)} positional arguments (")
    assert message.endswith(f"got {len(taken) + 1}; temperature and all other options are keywords"
                            ", as in temperature=0.07")  # fmt: skip


@pytest.mark.extras
def test_logits_are_no_features(call: Any) -> None:
    """One matrix in place of the features."""
    name, function, loss, asarray = call
    taken = arguments(loss)
    if len(taken) < 2:  # a loss of one array takes a matrix
        return
    with pytest.raises(TypeError) as raised:
        function(asarray(taken[0]), temperature=0.07)
    message = str(raised.value)
    assert message.startswith(f"{name}: expected {next(iter(ALL_LOSSES[loss].arguments))}, ")
    assert message.endswith("got no labels" if loss == "sup_con" else "not logits")


@pytest.mark.extras
@pytest.mark.parametrize("call", IN_ONE_PROCESS, ids=".".join, indirect=True)
def test_words_of_other_projects(call: Any) -> None:
    _, function, loss, asarray = call
    taken = [asarray(z) for z in arguments(loss)]
    for word, keyword in (("logit_scale", "scale"), ("tau", "temperature")):
        with pytest.raises(TypeError, match=rf"{word}.* \(did you mean '{keyword}'\?\)"):
            function(*taken, **{word: 0.07})


@pytest.mark.extras
@pytest.mark.parametrize("name", MODULES.values())
def test_settings_of_modules_are_keywords(name: str) -> None:
    it = pytest.importorskip("infonce.torch")
    with pytest.raises(TypeError, match=rf"^infonce\.torch\.{name}\(\): expected no positional"):
        getattr(it, name)(0.07)


@pytest.mark.extras
@pytest.mark.parametrize("call", VIEWS, ids=".".join, indirect=True)
def test_views_are_one_array(call: Any) -> None:
    """Views as two arguments, a pair, and a third dimension."""
    name, function, loss, asarray = call
    labels = [asarray(LABELS)] if loss == "sup_con" else []
    first, second = map(asarray, FEATURES)
    wanted = r"expected all views concatenated to one array \[2B, D\], the second views below"
    if not name.startswith("infonce.distributed.nt_xent"):  # which has labels
        with pytest.raises(TypeError, match=wanted):
            function(first, second, *labels, temperature=0.5)
    if name.startswith("infonce.distributed"):
        return  # the checks of features want an MPI library
    with pytest.raises(TypeError, match=f"^features: {wanted}"):
        function((first, second), *labels, temperature=0.5)
    if "jax" not in name:
        with pytest.raises(ValueError, match=rf"^features: {wanted}.*got shape \(2, 8, 4\)"):
            function(asarray(FEATURES), *labels, temperature=0.5)


@pytest.mark.extras
@pytest.mark.parametrize("call", IN_ONE_PROCESS, ids=".".join, indirect=True)
def test_keywords_in_an_error_are_those_that_the_loss_takes(call: Any) -> None:
    """None of them is an option that means nothing for the loss."""
    _, function, loss, asarray = call
    taken = [asarray(z) for z in arguments(loss)]
    with pytest.raises(TypeError, match="unexpected keyword argument 'zzz'") as raised:
        function(*taken, temperature=0.5, zzz=1)
    keywords = str(raised.value).partition("(expected one of ")[2].rstrip(")").split(", ")
    assert {"temperature", "scale", "normalize", "weights"} <= {*keywords}
    refused = {*ALL_LOSSES[loss].refused}
    assert not refused & {*keywords}
    assert len(keywords) > 8


def test_keywords_of_other_packages_are_named() -> None:
    import infonce

    places = {"comm": "distributed", "group": "torch", "axis_name": "jax"}
    for loss in ALL_LOSSES:
        function = getattr(infonce, f"{loss}_loss")
        for keyword, package in places.items():
            with pytest.raises(TypeError, match=rf"it is one of infonce\.{package}\.{loss}_loss"):
                function(*arguments(loss), temperature=0.5, **{keyword: None})


@pytest.mark.extras
@pytest.mark.parametrize("loss", ALL_LOSSES)
def test_no_group_before_init_process_group(loss: str) -> None:
    """torch.distributed.group.WORLD is None then: no loss of one process in silence."""
    torch = pytest.importorskip("torch")
    import infonce.torch as it

    group = torch.distributed.group.WORLD
    assert group is None
    functions = [getattr(it, f"{loss}_loss")]
    if loss in MODULES:
        functions.append(getattr(it, MODULES[loss])())
    for function in functions:
        for more in ({}, {"exchange": "ring"}):
            with pytest.raises(TypeError, match=r"WORLD is before .*init_process_group"):
                function(*map(torch.tensor, arguments(loss)), scale=2.0, group=group, **more)


@pytest.mark.parametrize(
    ("package", "name", "near"),
    [("infonce", module, f"infonce.torch.{module} or") for module in MODULES.values()]
    + [("infonce.distributed", module, f"infonce.torch.{module} or") for module in MODULES.values()]
    + [("infonce", "ClipLoss", "clip_loss or infonce.torch.CLIPLoss)")]
    + [("infonce", "sharded", "infonce.jax.sharded)")]
    + [("infonce", "RankError", "infonce.distributed.RankError)")]
    + [("infonce", "lightly", "infonce.torch.lightly)")]
    + [("infonce.distributed", "explain", "infonce.explain)")],
)
def test_names_of_other_packages(package: str, name: str, near: str) -> None:
    """Also if the other package cannot be imported: nothing of it is imported."""
    with pytest.raises(AttributeError) as raised:
        getattr(importlib.import_module(package), name)
    assert f"(did you mean {near.rstrip(')')}" in str(raised.value)


@pytest.mark.extras
@pytest.mark.parametrize("package", ["torch", "jax"])
def test_gradients_are_of_the_package_of_numpy(package: str) -> None:
    pytest.importorskip(package)
    module = importlib.import_module(f"infonce.{package}")
    with pytest.raises(AttributeError, match=r"\(did you mean infonce\.clip_loss_and_grad\?\)"):
        _ = module.clip_loss_and_grad


@pytest.mark.parametrize("loss", ["info_nce", "sup_con"])
def test_numbers_are_no_labels(loss: str) -> None:
    import infonce

    function = getattr(infonce, f"{loss}_loss")
    features = [*FEATURES][: len(ALL_LOSSES[loss].arguments)]
    with pytest.raises(ValueError, match=r"got neither; temperature=0\.07 is usual"):
        function(*features, 0.07)
    with pytest.raises(TypeError, match=r"^labels: expected integers, got float 0\.07$"):
        function(*features, 0.07, temperature=0.5)
