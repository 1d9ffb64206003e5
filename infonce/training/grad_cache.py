"""Batches larger than the encoder's memory: features without a graph first, then gradients by
chunks (Gao et al.: Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup, 2021).

The loss needs only features and returns their gradients, so an encoder can be run a chunk at a
time, twice: once for features, and once more to take each chunk's gradient back.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from ..checks import validation
from ..result import LossAndGrad
from ..spec import VECTOR_OPTIONS

EXPECTED = "loss_and_grad: expected a function X_loss_and_grad of infonce or infonce.distributed"
Encode = Callable[[Any], Any]  # chunk of inputs -> features [rows, D], no graph kept
Backward = Callable[[Any, Any], None]  # chunk, gradient of its features -> parameters' gradients


def grad_cache(
    loss_and_grad: Callable[..., LossAndGrad],
    inputs: Sequence[Any] | Mapping[str, Any],
    encode: Encode | Sequence[Encode],
    backward: Backward | Sequence[Backward | None],
    chunk: int,
    **options: Any,
) -> LossAndGrad:
    """Loss of a whole batch, and gradients of encoders that see `chunk` rows at a time.

    For each feature array of the loss: ``z = concat(encode(c) for c in chunks)``. Then one call of
    the loss, and ``backward(c, dz of c)`` for each chunk, which runs the encoder once more with
    its graph and adds to the parameters' gradients. The parameters' gradients equal, to rounding,
    those of one pass over the batch, if the encoder computes each row by itself (no batch
    normalisation). If an encoder draws random numbers (dropout), the callbacks have to make it draw
    the same numbers both times.

    Parameters
    ----------
    loss_and_grad : callable
        A function `X_loss_and_grad` of `infonce` or of `infonce.distributed`: over ranks, each rank
        passes its own rows, and `options` may name `comm`.
    inputs : list, tuple or mapping
        The inputs of each feature array of the loss, in its order, or by the argument's name as in
        ``{"query": ..., "key": ...}``. Each is an object with length and slices, or a mapping of
        such objects, of which a chunk is a dict.
    encode : callable (chunk) -> features [rows, D], or one for each input
        Features without a graph, as any array that the loss takes, a row for each of the chunk. It
        may return the same memory for each chunk.
        Several callables, here and in `backward`, are in the order of `inputs`.
    backward : callable (chunk, gradient), or one for each input; None for a locked encoder
        Receives the gradient of the loss with respect to `encode(chunk)`, as an array of
        the same library. Not called if the loss returns no gradient.
    chunk : int
        Rows that an encoder sees at once.
    **options
        Passed on to the loss. ``gradient_scale="ddp"`` if gradients are averaged afterwards,
        ``grad_out=scaler.get_scale()`` under a GradScaler. Tensors among them require no gradient:
        for a scale that is learned, pass ``scale.detach()``, and call
        ``scale.backward(out.grads.scale)`` afterwards, as `infonce.torch.grad_cache` does.

    Returns
    -------
    LossAndGrad
        Of the whole batch (over ranks: of all ranks).

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit, before any work; for an encoder that returns another number
        of rows; and whatever the loss raises.
    """
    _require_gradients(loss_and_grad)
    _require_detached(options)
    require_batch(inputs, chunk, (list, tuple, Mapping))
    # an input's name, or its place among the arguments of the loss
    names: list[Any] = list(inputs if isinstance(inputs, Mapping) else range(len(inputs)))
    entries = list(inputs.values()) if isinstance(inputs, Mapping) else inputs
    encoders = one_each("encode", encode, len(entries))
    backwards = one_each("backward", backward, len(entries))
    chunks = [
        chunk_slices(count_rows(f"inputs[{name!r}]", [entry]), chunk)
        for name, entry in zip(names, entries, strict=True)
    ]
    features = []
    for i, (run, entry, slices) in enumerate(zip(encoders, entries, chunks, strict=True)):
        name = f"encode[{i}]" if isinstance(encode, (list, tuple)) else "encode"
        features.append(_encode_batch(name, run, entry, slices))
    if isinstance(inputs, Mapping):
        out = loss_and_grad(**dict(zip(names, features, strict=True)), **options)
    else:
        out = loss_and_grad(*features, **options)
    if not hasattr(out, "grads"):
        raise TypeError(f"{EXPECTED}, got one that returns {validation.what(out)}")
    for key, entry, run, slices in zip(names, entries, backwards, chunks, strict=True):
        gradients: Any = out.grads
        gradient = getattr(gradients, key) if isinstance(inputs, Mapping) else gradients[key]
        if run is None or gradient is None:
            continue
        for rows in slices:
            if rows.start < rows.stop:
                run(select_rows(entry, rows), gradient[rows])
    return out


def _encode_batch(name: str, encode: Encode, entry: Any, slices: Sequence[slice]) -> Any:
    """The features of all rows. `name` names the encoder in errors.

    Each chunk is copied before the next one is encoded, because an encoder may return the same
    memory for each. JAX's arrays do not change, so they are concatenated.
    """
    chunks: Iterator[Any] = (_encode_chunk(name, encode, entry, rows) for rows in slices)
    first = next(chunks)
    library = type(first).__module__.partition(".")[0]
    if library in ("jax", "jaxlib"):
        return sys.modules["jax"].numpy.concatenate([first, *chunks])
    chunks, shape = chain([first], chunks), (slices[-1].stop, *first.shape[1:])
    if library == "torch":
        batch = first.new_empty(shape)
    else:
        xp = sys.modules["cupy" if library == "cupy" else "numpy"]
        batch, chunks = xp.empty_like(first, shape=shape), map(xp.asanyarray, chunks)
    for rows, features in zip(slices, chunks, strict=True):
        copy_chunk(name, batch, rows, features)
    return batch


def _encode_chunk(name: str, encode: Encode, entry: Any, rows: slice) -> Any:
    """The features of a chunk. ValueError, naming the encoder `name`, unless they are its rows."""
    features, n = encode(select_rows(entry, rows)), rows.stop - rows.start
    shape: tuple[int, ...] = getattr(features, "shape", ())
    if len(shape) < 2 or shape[0] != n:
        raise ValueError(f"{name}: expected features of {n} rows, got {validation.what(features)}")
    return features


def copy_chunk(name: str, batch: Any, rows: slice, features: Any) -> None:
    """Copy the features of a chunk to their rows of the batch.

    ValueError, naming the encoder `name`, unless all chunks have the same width and dtype.
    """
    if features.shape[1:] != batch.shape[1:] or features.dtype != batch.dtype:
        raise ValueError(
            f"{name}: expected the same width and dtype of all chunks, got "
            f"{validation.what(batch[: rows.start])}, and then {validation.what(features)}"
        )
    batch[rows] = features


def _require_gradients(function: Any) -> None:
    """TypeError for a function that is known, without a call, to return no gradients."""
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    torch, name = sys.modules.get("torch"), getattr(inner, "__name__", type(inner).__name__)
    is_module = torch is not None and isinstance(inner, torch.nn.Module)
    is_ours = str(getattr(inner, "__module__", "")).partition(".")[0] == "infonce"
    loss_alone = is_ours and not name.endswith("_loss_and_grad")
    if is_module or loss_alone or not callable(function):
        instead = (
            "" if torch is None else "; infonce.torch.grad_cache takes losses of infonce.torch"
        )
        raise TypeError(f"{EXPECTED}, got {name}{instead}")


def _require_detached(options: Mapping[str, Any]) -> None:
    """ValueError for tensors that require a gradient: autograd would give them no gradient."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return
    for name in ("scale", "temperature", "bias", *VECTOR_OPTIONS):
        if getattr(options.get(name), "requires_grad", False) is True:
            hint = f"{name}.detach() makes one"
            if name not in VECTOR_OPTIONS:
                result = "scale" if name == "temperature" else name
                hint += f", and out.grads.{result} is the gradient of {result}"
            raise ValueError(
                f"{name}: expected a tensor that requires no gradient, got one that does: {hint}"
            )


def require_batch(inputs: Any, chunk: Any, types: tuple[type, ...] = (list, tuple)) -> None:
    """TypeError or ValueError unless `inputs` are of `types` and not empty, and `chunk` at least
    1."""
    if not validation.is_integer(chunk):
        raise TypeError(f"chunk: expected an integer, got {validation.what(chunk)}")
    if chunk < 1:
        raise ValueError(f"chunk: expected at least 1, got {chunk}")
    if not isinstance(inputs, types) or not inputs:
        *first, last = [type_.__name__.lower() for type_ in types]
        raise TypeError(
            f"inputs: expected a {', '.join(first)} or {last} with one entry for each feature "
            f"array of the loss, got {validation.what(inputs)}"
        )


def list_arrays(entry: Any) -> list[Any]:
    """The arrays of an entry of `inputs`: the values of a mapping, or the entry itself."""
    return list(entry.values()) if isinstance(entry, Mapping) else [entry]


def select_rows(entry: Any, rows: slice) -> Any:
    """A chunk of an entry of `inputs`."""
    if isinstance(entry, Mapping):
        return {name: z[rows] for name, z in entry.items()}
    return entry[rows]


def count_rows(name: str, entries: Sequence[Any]) -> int:
    """The number of rows of all arrays of `entries`. `name` names the entries in errors."""
    arrays = [z for entry in entries for z in list_arrays(entry)]
    for z in arrays:
        if not (hasattr(z, "__len__") and hasattr(z, "__getitem__")):
            raise TypeError(
                f"inputs: expected objects with length and slices in {name}, got "
                f"{validation.what(z)}"
            )
    lengths = [len(z) for z in arrays]
    if len(set(lengths)) != 1:
        raise ValueError(
            f"inputs: expected the same number of rows in each of {name}, got {lengths}"
        )
    return lengths[0]


def chunk_slices(rows: int, chunk: int) -> list[slice]:
    """Slices of at most `chunk` rows, which cover `rows` rows.

    One empty slice for 0 rows, which a rank may have: `encode` makes features [0, D] of it.
    """
    return [slice(i, min(i + chunk, rows)) for i in range(0, max(rows, 1), chunk)]


def one_each(name: str, value: Any, n: int) -> list[Any]:
    """A list of n callables: `value` n times, or its n items. Errors name the argument `name`."""
    each = list(value) if isinstance(value, (list, tuple)) else [value] * n
    if len(each) != n:
        raise ValueError(f"{name}: expected one callable or {n} of them, got {len(each)}")
    for one in each:
        if not callable(one) and not (one is None and name == "backward"):
            raise TypeError(f"{name}: expected a callable, got {type(one).__name__} {one!r}"[:120])
    return each
