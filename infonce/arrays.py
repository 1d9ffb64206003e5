"""Arrays of other libraries as NumPy or CuPy arrays on the same memory, and results back to them.

No library is imported that the caller has not imported, but CuPy for arrays on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .kernels.problem import SILENT
from .spec import Loss

Array = Any
NO_CONTEXT = contextlib.nullcontext()


def _loaded(module: str, name: str, array: Array) -> bool:
    library = sys.modules.get(module)
    return library is not None and isinstance(array, getattr(library, name))


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            f"arrays on a GPU need CuPy ({error}): "
            "pip install 'infonce-kernels[cuda13]' or '[cuda12]'"
        ) from None
    return cupy


def gpu_missing() -> str | None:
    """Why there is no GPU to compute on; None if there is one."""
    try:
        count = _cupy().cuda.runtime.getDeviceCount()
    except Exception as error:  # a driver that is missing, too old or broken fails in many ways
        return " ".join(str(error).split())
    return None if count else "no device"


def on_gpu(array: Array) -> bool:
    """Whether what `native` returned is a CuPy array. (Not by its CUDA array interface,
    which takes time to build.)"""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(array, cupy.ndarray)


def kinds(features: Sequence[Array]) -> list[tuple[Any, ...] | None]:
    """Shape, dtype and GPU (None: the host) of each that `native` returned; None for no array."""
    return [
        (z.shape, z.dtype, None)
        if isinstance(z, np.ndarray)
        else (z.shape, z.dtype, z.data.device_id)
        if on_gpu(z)
        else None
        for z in features
    ]


def compute_context(array: Array) -> Any:
    """Context for the computation on `array`: its device is the current one, or NumPy does not warn
    of overflow."""
    if not on_gpu(array):
        return np.errstate(**SILENT)
    return NO_CONTEXT if array.data.device_id == current_device() else array.device


def current_device() -> int:
    """CuPy's current GPU."""
    device: int = sys.modules["cupy"].cuda.runtime.getDevice()
    return device


def namespace(array: Array) -> Any:
    """The module of an array: numpy or cupy."""
    return np if isinstance(array, np.ndarray) else _cupy()


# raised by libraries that cannot export an array; errors of a device have classes of their own
REFUSALS = (TypeError, ValueError, AttributeError, BufferError, RuntimeError, NotImplementedError)


def native(array: Array, name: str = "array") -> Array:
    """A NumPy or CuPy array on the memory of `array`; other values are returned unchanged.

    Subclasses of NumPy's become plain arrays. TypeError, naming `name`, for masked arrays and for
    arrays whose memory cannot be read.
    """
    if type(array) is np.ndarray or on_gpu(array) or isinstance(array, np.generic):
        return array
    try:
        return _viewed(array)
    except REFUSALS as error:
        if type(error) not in REFUSALS:
            raise
        reason = " ".join(str(error).split())
        raise TypeError(
            f"{name}: expected an array that can be read, got {type(array).__name__}: {reason}"
        ) from None


def natives(arrays: Sequence[Array], names: Sequence[str]) -> list[Array]:
    """Each array as a NumPy or CuPy array, on the same memory if it has one (`_viewed`).

    `names` are those of the arguments, for errors.
    """
    return list(map(native, arrays, names))


def _viewed(array: Array) -> Array:
    """Another library's array, or a subclass of NumPy's."""
    if isinstance(array, np.ndarray):
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(".filled(value) makes one without a mask")
        return np.asarray(array)
    if _loaded("torch", "Tensor", array):
        return _view_torch(array) if array.is_cuda else _from_torch(array)
    if _loaded("jax", "Array", array):
        if isinstance(array, sys.modules["jax"].core.Tracer):
            raise TypeError("infonce.jax has the losses for jit, grad and vmap")
        if {device.platform for device in array.devices()} == {"cpu"}:
            return np.asarray(array)  # no copy
        return _cupy().from_dlpack(array)
    if hasattr(array, "__cuda_array_interface__"):
        return _cupy().asarray(array)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        on_host = array.__dlpack_device__()[0] == 1
        return np.from_dlpack(array) if on_host else _cupy().from_dlpack(array)
    return array


def _from_torch(tensor: Any) -> Array:
    """A NumPy array on a tensor's memory."""
    torch = sys.modules["torch"]
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:  # NumPy's DLPack does not know it
        import ml_dtypes

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _view_torch(tensor: Any) -> Array:
    """A CuPy array on a tensor's memory. (DLPack would do, and take five times as long.)"""
    cupy = _cupy()
    dtype = _torch_dtypes().get(tensor.dtype)
    if dtype is None:
        return cupy.from_dlpack(tensor.detach())
    item = dtype.itemsize
    memory = cupy.cuda.UnownedMemory(
        tensor.data_ptr(), tensor.numel() * item, tensor, tensor.get_device()
    )
    strides = None if tensor.is_contiguous() else [step * item for step in tensor.stride()]
    return cupy.ndarray(tensor.shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)


@functools.cache
def _torch_dtypes() -> dict[Any, np.dtype[Any]]:
    """NumPy's dtype for each of torch's that features, labels and scalars have."""
    import ml_dtypes

    torch = sys.modules["torch"]
    names = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8")
    dtypes = {getattr(torch, name): np.dtype(name) for name in names}
    return {**dtypes, torch.bfloat16: np.dtype(ml_dtypes.bfloat16)}


def converter_to(like: Array) -> Callable[[Array], Array]:
    """The function that makes of a NumPy or CuPy array one of the library of `like`."""
    if _loaded("torch", "Tensor", like):
        torch = sys.modules["torch"]

        def to_torch(array: Array) -> Any:
            if not isinstance(array, np.ndarray):
                # -1: it was made on torch's own stream, there is nothing to wait for
                return torch.from_dlpack(array.__dlpack__(stream=-1))
            if array.dtype.kind == "V":  # bfloat16: faster than its name
                return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
            return torch.from_numpy(array)

        return to_torch
    if _loaded("jax", "Array", like):
        jax = sys.modules["jax"]

        def to_jax(array: Array) -> Any:
            if isinstance(array, np.ndarray):
                return jax.numpy.asarray(array)
            return jax.dlpack.from_dlpack(array)

        return to_jax
    return lambda array: array


_warned: set[str] = set()  # names of losses


def warn_of_lost_gradients(
    loss: Loss, caller_arrays: Sequence[Array], bias: Any, options: Mapping[str, Any]
) -> None:
    """Warn, once for each loss and at its caller's line, that autograd does not see the loss."""
    torch = sys.modules.get("torch")
    if (
        torch is None
        or not torch.is_grad_enabled()
        or not isinstance(caller_arrays[0], torch.Tensor)
    ):
        return
    values = (*caller_arrays, bias, options.get("scale"), options.get("temperature"))
    watched = [getattr(value, "requires_grad", False) is True for value in values]
    if True not in watched or loss.name in _warned:
        return
    names = itertools.compress((*loss.arguments, "bias", "scale", "temperature"), watched)
    warnings.warn(
        f"{loss.name}_loss: no gradient will reach {', '.join(names)}, which autograd watches: use "
        f"infonce.torch.{loss.name}_loss, or torch.no_grad() for the value without a gradient",
        stacklevel=4,  # this, dispatch, and the loss itself
    )
    _warned.add(loss.name)


def use_caller_stream(array: Array) -> Any:
    """Context in which CuPy's current stream is the caller's: torch's own, or CuPy's."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(array, torch.Tensor) or not array.is_cuda:
        return NO_CONTEXT
    cupy = _cupy()
    device = array.get_device()
    theirs = _current_stream(torch, device)
    if theirs and torch.cuda.is_current_stream_capturing():
        return _captured(torch, cupy, device, theirs)
    if device != current_device():
        return _elsewhere(torch, cupy, device, theirs)
    if theirs == cupy.cuda.get_current_stream().ptr:
        return NO_CONTEXT
    return _stream(torch, cupy, device, theirs)


def _current_stream(torch: Any, device: int) -> int:
    """torch's, as CUDA knows it. (What torch's compiler calls takes no time; a Stream does.)"""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    stream: int = torch.cuda.current_stream(device).cuda_stream if raw is None else raw(device)
    return stream


@contextlib.contextmanager
def _elsewhere(torch: Any, cupy: Any, device: int, theirs: int) -> Iterator[None]:
    """On a device that is not the current one."""
    with cupy.cuda.Device(device), _stream(torch, cupy, device, theirs):
        yield


@contextlib.contextmanager
def _captured(torch: Any, cupy: Any, device: int, theirs: int) -> Iterator[None]:
    """In a CUDA graph that torch captures: torch gives the memory, and keeps it for the graph."""

    def malloc(size: int) -> Any:
        tensor = torch.empty(size, dtype=torch.uint8, device=device)
        memory = cupy.cuda.UnownedMemory(tensor.data_ptr(), size, tensor, device)
        return cupy.cuda.MemoryPointer(memory, 0)

    with cupy.cuda.using_allocator(malloc), _elsewhere(torch, cupy, device, theirs):
        yield


_streams: dict[tuple[int, int], Any] = {}  # torch has a few, and keeps them


def _stream(torch: Any, cupy: Any, device: int, theirs: int) -> Any:
    """torch's current stream as CuPy's."""
    key = device, theirs
    if key not in _streams:
        if hasattr(cupy.cuda.Stream, "from_external"):
            _streams[key] = cupy.cuda.Stream.from_external(torch.cuda.current_stream(device))
        else:
            _streams[key] = cupy.cuda.ExternalStream(theirs, device)
    return _streams[key]
