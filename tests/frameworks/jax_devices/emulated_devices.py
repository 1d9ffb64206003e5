"""The callbacks of GPUs that share a batch, on the emulated GPU: ``python emulated_devices.py
DEVICES LOSS...``. Their collectives are NumPy's, for JAX has no emulated devices."""

import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2]
sys.path.append(str(TESTS / "emulator"))

import emulation  # noqa: E402

emulation.begin()

import cupy  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402

import infonce  # noqa: E402
from infonce import spec  # noqa: E402
from infonce.checks.teacher import ALL_LOSSES  # noqa: E402
from infonce.jax import rounds  # noqa: E402
from infonce.jax.callback import TEACHER_INPUTS, Axis, TracedCall, output_shapes  # noqa: E402

R = int(sys.argv[1])
M, D = 8, 16  # rows of a device, width
DTYPE = np.float32


def shard(array: np.ndarray, rank: int) -> np.ndarray:
    return array[rank * M : (rank + 1) * M]


def filled(shapes: Any) -> Any:
    return jax.tree.map(lambda shape: cupy.empty(shape.shape, shape.dtype), shapes)


def evaluate(
    name: str, z: list[np.ndarray], numbers: dict[str, Any], by_row: dict[str, Any]
) -> Any:
    """Loss, d queries, d keys, and gradients of the numbers, as `axis.evaluate` has them."""
    kind, struct = ALL_LOSSES[name], jax.ShapeDtypeStruct
    wrt = tuple(arg for arg in (*kind.arguments, *numbers) if arg not in kind.locked)
    call = TracedCall(kind, (), False, wrt, Axis(("data",), R, False))
    arguments = []
    for rank in range(R):
        absent = dict.fromkeys(
            (
                "bias",
                "labels",
                "grad_out",
                "guide",
                *TEACHER_INPUTS,
                *spec.INTEGER_OPTIONS,
                *spec.ARRAY_OPTIONS,
            )
        )
        arrays = {"features": tuple(shard(side, rank) for side in z)}
        arrays |= jax.tree.map(lambda of_all, rank=rank: shard(of_all, rank), by_row)
        arrays |= {k: np.asarray(v, DTYPE) for k, v in numbers.items()}
        arguments.append({**absent, **arrays})
    owns = [
        np.concatenate(struct["features"] if kind.joint else struct["features"][-1:])
        for struct in arguments
    ]
    keys = np.concatenate(owns)
    guide_key = by_row["guide"][1] if "guide" in by_row else None
    gathered = {
        "keys": keys,
        "key_masks": None,
        "auxiliary_keys": by_row.get("teacher_key", guide_key),
    }
    plan = rounds.plan_callbacks(call, {**arguments[0], **gathered})
    inputs = [
        {
            **jax.tree.map(cupy.asarray, {**struct, **gathered, "rank": np.int32(i)}),
            "earlier_callbacks": [],
        }
        for i, struct in enumerate(arguments)
    ]
    for travel in plan.travels:
        payload = (travel.vector_count, len(owns[0]), 2)
        numbers_of = (R, *payload) if travel.to_owners else payload
        shapes = {
            "error_and_results": struct((1 + travel.result_count, 2), np.uint32),
            "travelling": struct(numbers_of, np.uint32),
        }
        outs = [filled(shapes) for _ in range(R)]
        for out, device in zip(outs, inputs, strict=True):
            rounds.run_callback(call, plan, out, device)
        sent = np.stack([out["travelling"].get() for out in outs])
        for i, (out, device) in enumerate(zip(outs, inputs, strict=True)):
            arrived = cupy.asarray(sent[:, i] if travel.to_owners else sent)
            results = out["error_and_results"]
            device["earlier_callbacks"] = [
                *device["earlier_callbacks"], {"error_and_results": results, "arrived": arrived}
            ]  # fmt: skip
    shapes = {k: v for k, v in output_shapes(call, arguments[0]).items() if k not in kind.arguments}
    dq_shape = owns[0].shape if kind.symmetric else (M, D)
    shapes |= {"dq": struct(dq_shape, plan.sum_dtype), "weight": None}
    shapes |= {"partial_dk": struct(keys.shape, plan.sum_dtype)} if plan.has_partial_dk else {}
    outs = [filled(shapes) for _ in range(R)]
    for out, device in zip(outs, inputs, strict=True):
        rounds.run_callback(call, plan, out, device)
    dq = np.concatenate([out["dq"].get() for out in outs])
    dk = sum(out["partial_dk"].get() for out in outs) if plan.has_partial_dk else None
    loss, *grads = (sum(float(out[k].get()) for out in outs) for k in ("loss", *numbers))
    return loss, dq, dk, grads


def close(got: Any, want: Any, tolerance: float) -> None:
    assert np.abs(np.subtract(got, want)).max() <= tolerance * np.abs(want).max(), (got, want)


rng = np.random.default_rng(0)
for case in sys.argv[2:]:
    name, _, guided = case.partition(" ")  # "clip guide"
    kind = ALL_LOSSES[name]
    z = [rng.standard_normal((M * R, D)) for _ in kind.arguments]
    z = [(side / np.linalg.norm(side, axis=1, keepdims=True)).astype(DTYPE) for side in z]
    by_row: dict[str, Any] = {"labels": np.arange(M * R) % 5} if name == "sup_con" else {}
    second = rng.standard_normal((2, M * R, 3)).astype(DTYPE)
    by_row |= {"guide": tuple(second)} if guided else {}
    by_row |= dict(zip(TEACHER_INPUTS, second, strict=False)) if kind.taught else {}
    numbers = {"scale": 5.0} | ({"bias": -3.0} if kind.sigmoid else {})
    want = getattr(infonce, f"{name}_loss_and_grad")(*z, **numbers, **by_row)
    order = np.arange(M * R)
    if name == "nt_xent":  # both views of a sample on one device
        order = order.reshape(2, R, -1).swapaxes(0, 1).ravel()
    loss, dq, dk, grads = evaluate(name, [side[order] for side in z], numbers, by_row)
    close(loss, want.loss, 1e-6)
    close(grads, [getattr(want.grads, k) for k in numbers], 5e-6)
    if kind.symmetric:
        close(dq if dk is None else dq + dk, want.grads[0][order], 5e-6)
    else:
        close(dq, want.grads[0], 5e-6)
        close(dk, want.grads[1], 5e-6)
    print(case, "is equal", flush=True)
