"""The modules of infonce.torch, both adapters with numbers at the ends of their range and upstream
gradients of a GradScaler, and arguments that change in place between passes."""

import copy
import math
import re
from typing import Any

import numpy as np
import pytest
from judge import judged, pairs

torch = pytest.importorskip("torch")
import torch_wrappers  # noqa: E402
from torch_problems import LOSSES, MODULES, STEPS, arguments, call, features  # noqa: E402

import infonce  # noqa: E402
import infonce.torch as it  # noqa: E402
from infonce.spec import LOSSES as LOSS_OF  # noqa: E402

pytestmark = pytest.mark.extras


@pytest.mark.parametrize("loss", LOSSES)
def test_a_module_is_its_function(loss: str) -> None:
    """The same arguments and defaults, and keywords at construction or at the call."""
    z = [2 * side for side in features(loss, 16)]
    args = arguments(loss, z)
    module = MODULES[loss]
    for options in ({"temperature": 0.5}, {"scale": 3.0, "normalize": True, "reduction": "sum"}):
        want = call(loss, z, **options)
        made = module(**options)
        for got in (made(*args), module()(*args, **options)):
            torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert all(f"{name}={value!r}" in repr(made) for name, value in options.items())
    if loss == "siglip":
        assert torch.equal(module()(*z), it.siglip_loss(*z))
        assert torch.equal(module()(*z, -4.0), it.siglip_loss(*z, -4.0))
    else:
        with pytest.raises(ValueError, match="temperature, scale: expected one of them, got nei"):
            module()(*args)
    if loss == "info_nce":
        labels = torch.arange(15, -1, -1)
        assert torch.equal(module(scale=2.0)(*z, labels), it.info_nce_loss(*z, labels, scale=2.0))


@pytest.mark.parametrize("loss", LOSSES)
def test_the_example_of_a_module_shows_that_module(loss: str) -> None:
    """The example in a module's docstring builds this module, and runs."""
    module = MODULES[loss]
    (example,) = re.findall(r"``(\w+\(normalize=True\)\(.*\))``", module.__doc__ or "")
    assert example.startswith(f"{module.__name__}(")
    names = dict(zip(LOSS_OF[loss].arguments, features(loss, 16), strict=True))
    names |= {
        module.__name__: module,
        "labels": torch.arange(16) // 2,
        "logit_scale": torch.ones(()),
    }
    assert torch.isfinite(eval(example, {}, names))


def test_numbers_at_the_ends_are_silent() -> None:
    jnp = pytest.importorskip("jax.numpy")
    import jax

    import infonce.jax as ij

    z = (pairs("random", 6, 6, 3, np.float32, 0)[0] * np.float32(3e37)).astype(np.float32)
    for rows in (z, z * np.float32(1e-30), np.full_like(z, np.inf)):
        tensor = torch.tensor(rows, requires_grad=True)
        it.clip_loss(tensor, tensor, temperature=1e-3).backward()
        half = jnp.asarray(1e4, jnp.float16)  # whose gradient has no room in its dtype
        jax.value_and_grad(lambda s, a: ij.clip_loss(a, a, scale=s))(half, jnp.asarray(rows))
    with pytest.raises(ValueError, match=r"temperature: expected a number in .* got 1e-09"):
        it.clip_loss(tensor, tensor, temperature=1e-9)


# --- learned numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["clip", "siglip"])
def test_a_learnable_module_trains_its_scale(loss: str) -> None:
    """A learnable scale trains as a parameter of the model does, and is part of the state."""
    z = [side.detach() for side in features(loss, 16)]
    module = MODULES[loss](learnable=True, scale=4.0, normalize=True).double()
    names = ["log_scale", "bias"] if loss == "siglip" else ["log_scale"]
    assert list(dict(module.named_parameters())) == names == list(module.state_dict())
    log_scale = torch.tensor(4.0).log().double().requires_grad_()
    bias = torch.tensor(-10.0, dtype=torch.float64, requires_grad=True)
    leaves = [log_scale, bias][: len(names)]
    optimizers = [
        torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        for parameters in (module.parameters(), leaves)
    ]
    for _ in range(STEPS):
        options = {"bias": bias} if loss == "siglip" else {}
        want = call(loss, z, scale=log_scale.exp(), normalize=True, **options)
        for value, optimizer in zip((module(*z), want), optimizers, strict=True):
            torch.testing.assert_close(value, want)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    assert abs(log_scale.detach() - math.log(4.0)) > 1e-3
    for name, leaf in zip(names, leaves, strict=True):
        torch.testing.assert_close(module.state_dict()[name], leaf.detach().reshape(1))
    loaded = MODULES[loss](learnable=True, temperature=0.07, normalize=True).double()
    loaded.load_state_dict(module.state_dict())
    assert torch.equal(loaded(*z), module(*z))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0")
@pytest.mark.parametrize("loss", LOSSES)
def test_data_parallel(loss: str) -> None:
    """Each of two GPUs computes the loss of half of the rows, at the numbers of the module."""
    module = torch_wrappers.make(loss).cuda()
    args = arguments(loss, [side.detach().cuda() for side in features(loss, 24)])
    torch.nn.DataParallel(module, [0, 1])(*args).sum().backward()
    got = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    module.zero_grad()
    for half in (slice(0, 12), slice(12, 24)):
        module(*(tensor[half] for tensor in args)).backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad)


@pytest.mark.parametrize("name", ["temperature", "scale", "bias"])
def test_a_parameter_given_to_a_module_is_its_own(name: str) -> None:
    """A module owns a given parameter: a copy of the module does not train the original."""
    z = [side.detach() for side in features("siglip")]
    numbers = {"scale": 3.0, "temperature": 0.5, "bias": -2.0}
    others = {} if name != "bias" else {"scale": 3.0}
    own = torch.nn.Parameter(torch.tensor(numbers[name]))
    module = it.SigLIPLoss(**{name: own}, **others)
    assert dict(module.named_parameters()) == {name: own}
    copied = copy.deepcopy(module).double()
    (parameter,) = copied.parameters()
    leaf = parameter.detach().clone().requires_grad_()
    copied(*z).backward()
    want = it.siglip_loss(*z, **{name: leaf}, **others)
    want.backward()
    torch.testing.assert_close(parameter.grad, leaf.grad, rtol=0, atol=0)
    assert own.grad is None
    assert leaf.grad.abs() > 1e-6


def test_keywords_of_a_call_take_the_place_of_learned_numbers() -> None:
    z = features("siglip")
    module = it.SigLIPLoss(learnable=True, temperature=0.1, bias=-3.0)
    want = it.siglip_loss(*z, -1.0, temperature=0.5)
    assert torch.equal(module(*z, -1.0, temperature=0.5), want)
    assert torch.equal(module(*z, bias=-1.0, scale=2.0), want)
    kept = it.SigLIPLoss(temperature=0.1, bias=-1.0)
    assert torch.equal(kept(*z, scale=2.0), want)


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("loss", "compiled"), [("clip", False), ("siglip", True)])
def test_a_setting_that_changes_is_followed(loss: str, compiled: bool) -> None:
    """The next call follows attributes that were given at construction, and that were not."""
    z = [2 * side.detach() for side in features(loss)]
    module = MODULES[loss](temperature=0.5)
    torch.compiler.reset()
    run = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
    now: dict[str, Any] = {"temperature": 0.5}
    changes = [("temperature", 0.25), ("normalize", True), ("reduction", "sum"),
               ("temperature", torch.tensor(0.3)), ("temperature", None), ("scale", 3.0),
               ("weights", torch.linspace(0.5, 2.0, 12)),
               ("normalize", False)]  # fmt: skip
    if loss == "siglip":
        changes.append(("bias", -1.0))
    for name, value in changes:
        setattr(module, name, value)
        assert getattr(module, name) is value
        now[name] = value
        given = {key: value for key, value in now.items() if value is not None}
        if "temperature" in given or "scale" in given:
            torch.testing.assert_close(run(*z), call(loss, z, **given))
        assert f"{name}=" in repr(module)


def test_a_parameter_may_come_later() -> None:
    module = it.CLIPLoss()
    module.scale = torch.nn.Parameter(torch.tensor(3.0))
    z = features("clip")
    assert list(dict(module.named_parameters())) == ["scale"]
    assert torch.equal(module(*z), it.clip_loss(*z, scale=3.0))


@pytest.mark.parametrize(
    ("given", "name", "value", "words"),
    [
        ({"scale": 1.0}, "scale", -1.0, "scale: expected a positive number, got -1.0"),
        ({"scale": 1.0}, "temperature", 1.0, "temperature, scale: expected one of them, got both"),
        ({}, "margin", "1", "margin: expected a number or an array of one number, got '1'"),
        ({}, "reduction", "avg", 'reduction: expected one of "mean", "sum", "none", got .avg'),
        ({}, "own", [1], "own: expected None for clip, which has none, got list"),
        ({}, "wrt", (), r"infonce.torch.CLIPLoss\(\): unexpected keyword argument 'wrt'"),
        ({}, "log_scale", 1.0, r"infonce.torch.CLIPLoss\(\): unexpected keyword argument 'log_sc"),
        ({}, "learnable", True, "learnable: expected False as at construction, got bool True"),
        ({}, "max_scale", 50.0, "max_scale: expected learnable=True with it, got False"),
        ({"learnable": True, "scale": 9.0}, "scale", 8.0,
         "scale: expected None beside log_scale, which the module learns, got float 8.0"),
        ({"learnable": True, "scale": 9.0}, "log_scale", 2.0, "cannot assign .* as parameter 'log"),
        ({"learnable": True, "scale": 9.0}, "min_scale", 200.0,
         "max_scale: expected a positive number, at least min_scale, 200.0, got 100.0"),
        ({"learnable": True, "scale": 9.0}, "max_scale", -1, "max_scale: expected a positive num"),
    ],
)  # fmt: skip
def test_a_setting_that_is_refused_changes_nothing(
    given: dict[str, Any], name: str, value: Any, words: str
) -> None:
    module = it.CLIPLoss(**given)
    before = repr(module)
    with pytest.raises((TypeError, ValueError), match=f"^{words}"):
        setattr(module, name, value)
    assert repr(module) == before


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, ValueError, "temperature, scale: expected one of them, got neither"),
        ({"scale": 200.0}, ValueError, "max_scale: expected at least the scale, 200.0, got 100.0"),
        ({"scale": 1.0, "max_scale": "9"}, TypeError, "max_scale: expected a number or an array"),
        ({"scale": torch.nn.Parameter(torch.ones(()))}, ValueError,
         "learnable: expected False with a Parameter as scale, got True"),
        ({"scale": 1.0, "learnable": 1}, TypeError, "learnable: expected True or False, got int 1"),
        ({"scale": 1.0, "min_scale": 2.0}, ValueError,
         "min_scale: expected at most the scale, 1.0, got 2.0"),
        ({"scale": 1.0, "min_scale": -2.0}, ValueError, "min_scale: expected at least 0, got -2.0"),
        ({"learnable": False, "min_scale": 2.0}, ValueError, "min_scale: expected learnable=True"),
        ({"learnable": False, "max_scale": 50.0}, ValueError, "max_scale: expected learnable=True"),
    ],
)  # fmt: skip
def test_what_cannot_be_learned(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=f"^{words}"):
        it.CLIPLoss(**{"learnable": True, **options})


@pytest.mark.parametrize("loss", ["clip", "siglip"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1}, "temperature: expected a positive number, got -1"),
        ({"scale": math.nan}, "scale: expected a finite number, got nan"),
        ({"scale": torch.nn.Parameter(torch.tensor(-2.0))}, "scale: expected a positive number"),
        ({"scale": torch.ones(2)}, "scale: expected a number or an array of one number"),
        ({"temperature": 0.1, "scale": 10.0}, "temperature, scale: expected one of them, got bo"),
        ({"temperature": torch.nn.Parameter(torch.tensor(0.1)), "scale": 10.0},
         "temperature, scale: expected one of them, got both"),
        ({"temperature": 0.1, "scale": torch.ones((), device="meta")},
         "temperature, scale: expected one of them, got both"),
        ({"normalize": 1}, "normalize: expected True or False, got int 1"),
        ({"method": "fast"}, 'method: expected one of "auto"'),
        ({"workspace": "1 Gig"}, "workspace: expected a number of bytes"),
        ({"label_smoothing": 1.0}, "label_smoothing: expected (a number in|0.0 for siglip)"),
        ({"label_smoothing": 0.1, "decoupled": True},
         "(label_smoothing: expected 0.0 with decoupled|decoupled: expected False for siglip"
         "|label_smoothing: expected 0.0 for siglip)"),
    ],
)  # fmt: skip
def test_what_is_wrong_at_construction(loss: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{words}"):
        MODULES[loss](**options)


def test_what_may_come_with_the_call() -> None:
    """A scale, and options that others need."""
    query, key = features("info_nce")
    own, guide = torch.ones(12, 1, 5, dtype=torch.float64), (query.detach(), key.detach())
    module = it.InfoNCELoss(guide_margin=0.1, in_batch=True, dim_weights=[1.0, 0.5])
    got = module(query, key, scale=2.0, guide=guide, own=own, dims=[2, 5])
    want = it.info_nce_loss(query, key, scale=2.0, guide=guide, own=own, dims=[2, 5],
                            guide_margin=0.1, dim_weights=[1.0, 0.5])  # fmt: skip
    assert torch.equal(got, want)
    it.InfoNCELoss(in_batch=False)
    it.CLIPLoss(scale=torch.nn.Parameter(torch.ones((), device="meta")))


# --- float16 features under a GradScaler ----------------------------------------------------------

SCALER = 65536.0  # what it multiplies the loss by at first


def fitted(loss: str) -> tuple[list[np.ndarray], float]:
    """256 float16 rows beside their positives, and the scale of a loss of about 1e-5."""
    image, text = pairs("aligned", 256, 256, 64, np.float16, 0)
    z = [np.concatenate([image, text])] if loss == "nt_xent" else [image, text]
    return z, {"gte": 22.0, "nt_xent": 21.0}.get(loss, 20.0)


def assert_rounded_once(got: Any, want: Any) -> None:
    """Errors are those of one rounding to float16: 2^-12 of most numbers, 2^-25 for the
    smallest."""
    got, want = np.asarray(got, np.float64), SCALER * np.asarray(want, np.float64)
    error = np.linalg.norm(got - want)
    assert error < 4e-4 * np.linalg.norm(want) + 2.0**-25 * np.sqrt(want.size)
    assert ((got == 0) & (abs(want) > 2.0**-25)).mean() < 1e-3


@pytest.mark.parametrize(
    ("loss", "way"),
    [*(("clip", way) for way in ("eager", "again", "rows", "compiled", "func", "jax", "jit")),
     *((loss, "eager") for loss in ("gte", "info_nce", "lit", "nt_xent"))],
)  # fmt: skip
def test_a_large_upstream_gradient_of_float16_features(loss: str, way: str) -> None:
    z, scale = fitted(loss)
    want = judged(loss, tuple(z), scale=scale)
    assert 3e-6 < want.loss < 3e-5
    wanted = [g for name, g in want.grads.items() if name != "scale" and g is not None]
    reduction = "none" if way == "rows" else "mean"
    if way in ("jax", "jit"):
        jax = pytest.importorskip("jax")
        import infonce.jax as ij

        def upscaled(*z: Any) -> Any:
            return SCALER * getattr(ij, f"{loss}_loss")(*z, scale=scale)

        run = jax.grad(upscaled, tuple(range(len(wanted))))
        grads = (jax.jit(run) if way == "jit" else run)(*map(jax.numpy.asarray, z))
    else:

        def step(*z: Any) -> Any:
            return SCALER * call(loss, z, scale=scale, reduction=reduction).mean()

        leaves = [torch.tensor(side, requires_grad=True) for side in z]
        if way == "compiled":
            torch.compiler.reset()
            step = torch.compile(step, fullgraph=True, backend="aot_eager")
        if way == "func":
            grads = torch.func.grad(step, tuple(range(len(wanted))))(*map(torch.tensor, z))
        else:
            value = step(*leaves)
            if way == "again":
                torch.autograd.grad(value, leaves[: len(wanted)], retain_graph=True)
            grads = torch.autograd.grad(value, leaves[: len(wanted)])
    for got, expected in zip(grads, wanted, strict=True):
        assert str(got.dtype).endswith("float16")
        assert_rounded_once(got, expected)


@pytest.mark.parametrize(
    ("dtype", "compiled"), [(torch.float16, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_the_gradient_of_a_scale_is_rounded_once(dtype: Any, compiled: bool) -> None:
    z, number = fitted("clip")
    want = SCALER * judged("clip", tuple(z), scale=number).grads["scale"]
    scale = torch.tensor(number, dtype=dtype, requires_grad=True)
    tensors = [torch.tensor(side) for side in z]

    def step(scale: Any) -> Any:
        return SCALER * call("clip", tensors, scale=scale)

    if compiled:
        torch.compiler.reset()
        step = torch.compile(step, fullgraph=True, backend="aot_eager")
    step(scale).backward()
    assert scale.grad.dtype == dtype
    assert scale.grad.item() == pytest.approx(want, rel=torch.finfo(dtype).eps / 2 + 1e-4)


def test_what_other_dtypes_wait_in() -> None:
    """Only float16 takes more memory; the loss of others does no more work."""
    for dtype, held in ((torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16),
                        (torch.float32, torch.float32)):  # fmt: skip
        z = [side.detach().to(dtype).requires_grad_() for side in features("clip")]
        loss = call("clip", z, scale=2.0)
        waiting = [g for g in loss.grad_fn.call.grads if g is not None]
        assert [g.dtype for g in waiting] == [held, held]
        loss.backward()
        assert [side.grad.dtype for side in z] == [dtype, dtype]


# --- arguments that change in place before another backward pass: see also test_torch_nodes.py ----

VECTORS = {
    "labels": lambda: torch.arange(11, -1, -1),
    "ids": lambda: torch.arange(12) // 2,
    "weights": lambda: torch.linspace(0.5, 2.0, 12),
    "key_bias": lambda: torch.linspace(-1.0, 1.0, 12),
}


@pytest.mark.parametrize("name", VECTORS)
def test_a_change_in_place_inside_of_torch_func_changes_nothing(name: str) -> None:
    """Losses keep copies inside of torch.func, where autograd sees no change."""
    vector, (query, key) = VECTORS[name](), (z.detach() for z in features("info_nce"))

    def step(query: Any) -> Any:
        return it.info_nce_loss(query, key, scale=3.0, **{name: vector})

    one = torch.ones((), dtype=torch.float64)
    want = torch.func.vjp(step, query)[1](one)
    _, vjp = torch.func.vjp(step, query)
    vector.copy_(vector.flip(0))
    assert torch.equal(vjp(one)[0], want[0])


@pytest.mark.parametrize("way", ["eager", "compiled", "jax", "jit"])
def test_a_scale_of_one_number_and_a_workspace_as_text(way: str) -> None:
    """Adapters take both as functions of arrays do. The gradient has the scale's shape."""
    z = [side.detach().float() for side in features("clip")]
    want = infonce.clip_loss_and_grad(*z, scale=2.0, workspace="1 MiB")

    def step(scale: Any, *z: Any) -> Any:
        return it.clip_loss(*z, scale=scale, workspace="1 MiB")

    if way in ("jax", "jit"):
        jax = pytest.importorskip("jax")
        import infonce.jax as ij

        def loss(scale: Any, *z: Any) -> Any:
            return ij.clip_loss(*z, scale=scale, workspace="1 MiB")

        arrays = jax.numpy.full(1, 2.0), *map(jax.numpy.asarray, z)
        run = jax.value_and_grad(loss)
        value, gradient = (jax.jit(run) if way == "jit" else run)(*arrays)
        with pytest.raises(ValueError, match=r"^workspace: expected a number of bytes, or"):
            ij.clip_loss(*arrays[1:], scale=1.0, workspace="1 Gig")
    else:
        scale = torch.full((1,), 2.0, requires_grad=True)
        if way == "compiled":
            torch.compiler.reset()
            step = torch.compile(step, fullgraph=True, backend="aot_eager")
        value = step(scale, *z)
        (gradient,) = torch.autograd.grad(value, scale)
        value = value.detach()
    assert gradient.shape == (1,)
    assert float(value) == pytest.approx(float(want.loss), rel=1e-6)
    assert float(gradient[0]) == pytest.approx(float(want.grads.scale), rel=1e-6)
