"""Conversion of the caller's arrays to NumPy or CuPy arrays on the same memory, and back.

`dispatch` converts features before the checks of a call, and results after its computation. Torch
and JAX are never imported: if the caller has not imported them, no argument is an array of theirs.
CuPy is imported for arrays on a GPU.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import itertools
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .kernels.problem import SILENT
from .spec import Loss

Array = Any
NO_CONTEXT = contextlib.nullcontext()
HostMemory = ctypes.c_char * sys.maxsize  # memory from an address on; an array on it has a size


def _is_instance(array: Array, module: str, class_name: str) -> bool:
    """Whether `array` is of a class of the library `module`. The library is not imported here."""
    library = sys.modules.get(module)
    return library is not None and isinstance(array, getattr(library, class_name))


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
    """The reason, in one line, why CuPy finds no GPU; None if it finds one."""
    try:
        count = _cupy().cuda.runtime.getDeviceCount()
    except Exception as error:  # a driver that is missing, too old or broken fails in many ways
        return " ".join(str(error).split())
    return None if count else "no device"


def on_gpu(array: Array) -> bool:
    """Whether `array`, a result of `native`, is a CuPy array.

    The attribute `__cuda_array_interface__` of CuPy arrays would tell too, but takes longer.
    """
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(array, cupy.ndarray)


def describe_arrays(features: Sequence[Array]) -> list[tuple[Any, ...] | None]:
    """(shape, dtype, number of the GPU or None for the host) of each result of `native`.

    The entry is None if the value is no array of NumPy or CuPy.
    """
    return [
        (z.shape, z.dtype, None)
        if isinstance(z, np.ndarray)
        else (z.shape, z.dtype, z.data.device_id)
        if on_gpu(z)
        else None
        for z in features
    ]


def compute_context(array: Array) -> Any:
    """Context for the computation on `array`, a result of `native`.

    On a GPU, CuPy's current device becomes the device of the array. On the host, NumPy does not
    warn of overflow.
    """
    if not on_gpu(array):
        return np.errstate(**SILENT)
    return NO_CONTEXT if array.data.device_id == current_device() else array.device


def current_device() -> int:
    """The number of CuPy's current GPU."""
    device: int = sys.modules["cupy"].cuda.runtime.getDevice()
    return device


def namespace(array: Array) -> Any:
    """The module of an array: numpy or cupy."""
    return np if isinstance(array, np.ndarray) else _cupy()


# Classes of the errors of a library that cannot export an array. Errors of a device are of
# subclasses of these: `native` compares classes exactly, and so raises errors of a device unchanged
REFUSALS = (TypeError, ValueError, AttributeError, BufferError, RuntimeError, NotImplementedError)


def native(array: Array, name: str = "array") -> Array:
    """A NumPy or CuPy array on the memory of `array`.

    A value that is no array is unchanged: the check of its argument refuses or converts it.
    Subclasses of NumPy's become plain arrays. TypeError, naming the argument `name`, for masked
    arrays and for arrays whose memory cannot be read.
    """
    if type(array) is np.ndarray or on_gpu(array) or isinstance(array, np.generic):
        return array
    try:
        return _view(array)
    except REFUSALS as error:
        if type(error) not in REFUSALS:
            raise
        reason = " ".join(str(error).split())
        raise TypeError(
            f"{name}: expected an array that can be read, got {type(array).__name__}: {reason}"
        ) from None


def natives(arrays: Sequence[Array], names: Sequence[str]) -> list[Array]:
    """`native` of each array. `names` are the names of the arguments, for errors."""
    return list(map(native, arrays, names))


def _view(array: Array) -> Array:
    """`native` of another library's array, of a subclass of NumPy's, or of no array."""
    if isinstance(array, np.ndarray):
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(".filled(value) makes one without a mask")
        return np.asarray(array)
    if _is_instance(array, "torch", "Tensor"):
        return view_tensor(array)
    if _is_instance(array, "jax", "Array"):
        if isinstance(array, sys.modules["jax"].core.Tracer):
            raise TypeError("infonce.jax has the losses for jit, grad and vmap")
        if {device.platform for device in array.devices()} == {"cpu"}:
            return np.asarray(array)  # no copy
        return _cupy().from_dlpack(array)
    if hasattr(array, "__cuda_array_interface__"):
        return _cupy().asarray(array)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        on_host = array.__dlpack_device__()[0] == 1  # kDLCPU of DLPack
        return np.from_dlpack(array) if on_host else _cupy().from_dlpack(array)
    return array


def view_tensor(tensor: Any) -> Array:
    """A NumPy or CuPy array on a tensor's memory, which it keeps alive.

    `Tensor.numpy` is not used, because it forbids to resize the tensor's storage from then on, and
    `fully_shard` resizes the storages of parameters. DLPack takes several times as long; on a GPU,
    dtypes that `_torch_dtypes` lacks take it. An error of `REFUSALS` if the memory is none, or does
    not have the tensor's values.
    """
    memory: Any
    if _is_traced_by_make_fx():  # which does not see what NumPy and CuPy compute
        raise RuntimeError(
            "make_fx would record the loss as a constant: torch.compile and torch.export record it "
            "as an operator"
        )
    on_host, dtype = tensor.is_cpu, _torch_dtypes().get(tensor.dtype)
    if dtype is None or not (on_host or tensor.is_cuda):
        tensor = tensor.detach()
        return _cupy().from_dlpack(tensor) if tensor.is_cuda else tensor.numpy()
    if tensor.is_neg():
        raise RuntimeError("it is the negative of its memory: .resolve_neg() makes one that is not")
    address = tensor.data_ptr()
    if not address and tensor.numel():
        raise RuntimeError("its storage has no memory")
    # torch counts strides in elements, NumPy and CuPy in bytes
    strides = None if tensor.is_contiguous() else [n * dtype.itemsize for n in tensor.stride()]
    if on_host:
        memory = HostMemory.from_address(address)
        memory.tensor = tensor
        return np.ndarray(tensor.shape, dtype, memory, 0, strides)
    cupy = _cupy()
    size = tensor.numel() * dtype.itemsize
    memory = cupy.cuda.UnownedMemory(address, size, tensor, tensor.get_device())
    return cupy.ndarray(tensor.shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)


def _is_traced_by_make_fx() -> bool:
    """Whether `make_fx` records PyTorch's operations now; False with its `pre_dispatch=True`."""
    torch = sys.modules["torch"]
    if not torch._C._len_torch_dispatch_stack():  # faster than the next line, in each small call
        return False
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


@functools.cache
def _torch_dtypes() -> dict[Any, np.dtype[Any]]:
    """torch's dtype -> NumPy's dtype, for features, labels, masks and scalars."""
    import ml_dtypes

    torch = sys.modules["torch"]
    integers = [f"{sign}int{bits}" for sign in ("", "u") for bits in (64, 32, 16, 8)]
    names = ("float64", "float32", "float16", *integers, "bool")
    dtypes = {getattr(torch, name): np.dtype(name) for name in names}
    return {**dtypes, torch.bfloat16: np.dtype(ml_dtypes.bfloat16)}


def converter_to(like: Array) -> Callable[[Array], Array]:
    """The function that converts a NumPy or CuPy array to an array of the library of `like`."""
    if _is_instance(like, "torch", "Tensor"):
        torch = sys.modules["torch"]

        def to_torch(array: Array) -> Any:
            if not isinstance(array, np.ndarray):
                # -1: no synchronisation, because the array was computed on torch's own stream
                return torch.from_dlpack(array.__dlpack__(stream=-1))
            if array.dtype.kind == "V":  # bfloat16; to compare the dtype's name takes longer
                return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
            return torch.from_numpy(array)

        return to_torch
    if _is_instance(like, "jax", "Array"):
        jax = sys.modules["jax"]

        def to_jax(array: Array) -> Any:
            if isinstance(array, np.ndarray):
                return jax.numpy.asarray(array)
            return jax.dlpack.from_dlpack(array)

        return to_jax
    return lambda array: array


# Packages whose frames may lie between the code of the user and a warning
LIBRARIES = ("infonce", "torch", "jax", "numba")
_warned: set[str] = set()  # names of the losses for which `warn_of_lost_gradients` has warned


def warn_of_lost_gradients(
    loss: Loss, caller_arrays: Sequence[Array], bias: Any, options: Mapping[str, Any]
) -> None:
    """Warn if a torch tensor among the arguments requires a gradient, which it will not get.

    Functions of `infonce` are invisible to autograd; functions of `infonce.torch` are not. A loss
    warns once, at the line that calls it.
    """
    torch = sys.modules.get("torch")
    if (
        torch is None
        or not torch.is_grad_enabled()
        or not isinstance(caller_arrays[0], torch.Tensor)
    ):
        return
    values = (*caller_arrays, bias, options.get("scale"), options.get("temperature"))
    requires_grad = [getattr(value, "requires_grad", False) is True for value in values]
    if True not in requires_grad or loss.name in _warned:
        return
    names = itertools.compress((*loss.arguments, "bias", "scale", "temperature"), requires_grad)
    warnings.warn(
        f"{loss.name}_loss: no gradient will reach {', '.join(names)}, which autograd watches: use "
        f"infonce.torch.{loss.name}_loss, or torch.no_grad() for the value without a gradient",
        stacklevel=find_caller_level(),
    )
    _warned.add(loss.name)


def find_caller_level() -> int:
    """The `stacklevel` of the nearest frame outside of `LIBRARIES`, which is the user's code.

    The level counts from the function that calls `find_caller_level`: the function that warns.
    """
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in LIBRARIES:
        level, frame = level + 1, frame.f_back
    return level


def use_caller_stream(array: Array) -> Any:
    """Context in which CuPy computes on the caller's stream.

    For a torch tensor on a GPU, this is torch's current stream of its device, so that the call runs
    after the kernels that compute the tensor, and before those that read the result. Otherwise it
    is CuPy's current stream, which stays as it is. Memory comes from CuPy's allocator; while torch
    captures a graph, from torch.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(array, torch.Tensor) or not array.is_cuda:
        return NO_CONTEXT
    cupy = _cupy()
    device = array.get_device()
    stream_pointer = _torch_stream_pointer(torch, device)
    # 0 is the default stream, which cannot be captured
    if stream_pointer and torch.cuda.is_current_stream_capturing():
        return _use_memory_of_torch(torch, cupy, device, stream_pointer)
    if device != current_device():
        return _use_device(torch, cupy, device, stream_pointer)
    if stream_pointer == cupy.cuda.get_current_stream().ptr:
        return NO_CONTEXT
    return _as_cupy_stream(torch, cupy, device, stream_pointer)


def _torch_stream_pointer(torch: Any, device: int) -> int:
    """The address (cudaStream_t) of torch's current stream on a device.

    The private function, which torch's compiler calls, saves the time to make a `Stream`.
    """
    get_pointer = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    pointer: int
    if get_pointer is None:
        pointer = torch.cuda.current_stream(device).cuda_stream
    else:
        pointer = get_pointer(device)
    return pointer


@contextlib.contextmanager
def _use_device(torch: Any, cupy: Any, device: int, stream_pointer: int) -> Iterator[None]:
    """Context in which CuPy computes on `device`, which may not be its current device, and on
    torch's stream."""
    with cupy.cuda.Device(device), _as_cupy_stream(torch, cupy, device, stream_pointer):
        yield


@contextlib.contextmanager
def _use_memory_of_torch(torch: Any, cupy: Any, device: int, stream_pointer: int) -> Iterator[None]:
    """`_use_device`, while torch captures a CUDA graph. CuPy's memory comes from torch, because
    torch keeps what is allocated during the capture as long as the graph."""

    def malloc(size: int) -> Any:
        tensor = torch.empty(size, dtype=torch.uint8, device=device)
        memory = cupy.cuda.UnownedMemory(tensor.data_ptr(), size, tensor, device)
        return cupy.cuda.MemoryPointer(memory, 0)

    with cupy.cuda.using_allocator(malloc), _use_device(torch, cupy, device, stream_pointer):
        yield


# (event, arrays) of calls that the GPU may not have done
_read_by_gpu: deque[tuple[Any, list[Any]]] = deque()
_read_by_gpu_lock = threading.Lock()
_NOT_FOREIGN = int, float, str, type(None), np.ndarray, np.generic
atexit.register(_read_by_gpu.clear)  # while the libraries are still there


def keep_until_read(feature: Array, *values: Any) -> None:
    """Keep arrays of JAX, and of others with streams of their own, until the GPU has read them.

    If nobody refers to such an array, its library uses the memory for others, at once: it does not
    know of the work that is queued on CuPy's current stream. (PyTorch's current stream is CuPy's.)
    `feature` is a result of `native`; `values` are the caller's arrays, also in lists and mappings.
    """
    if not on_gpu(feature):
        return
    foreign = _find_foreign(values)
    cuda = sys.modules["cupy"].cuda
    # An event of a capture is never done. Whoever captures keeps the arrays of the graph
    if not foreign or cuda.get_current_stream().is_capturing():
        return
    event = cuda.Event(disable_timing=True)
    event.record()
    with _read_by_gpu_lock:
        while _read_by_gpu and _read_by_gpu[0][0].done:
            _read_by_gpu.popleft()
        _read_by_gpu.append((event, foreign))


def _find_foreign(values: Iterable[Any]) -> list[Any]:
    """The arrays of other libraries than NumPy, CuPy and PyTorch, also in lists and mappings. Each
    call on a GPU comes here, so numbers and known arrays leave first."""
    found, rest = [], [*values]
    while rest:
        value = rest.pop()
        if isinstance(value, _NOT_FOREIGN) or on_gpu(value):
            continue
        if _is_instance(value, "torch", "Tensor"):
            continue
        if isinstance(value, (tuple, list)):
            rest += value
        elif isinstance(value, dict):
            rest += value.values()
        elif hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__"):
            found.append(value)
    return found


# (device, address) -> CuPy's stream. Entries are never removed: torch's pool of streams is small
_streams: dict[tuple[int, int], Any] = {}


def _as_cupy_stream(torch: Any, cupy: Any, device: int, stream_pointer: int) -> Any:
    """torch's current stream of a device as CuPy's, a context that makes it the current one."""
    key = device, stream_pointer
    if key not in _streams:
        if hasattr(cupy.cuda.Stream, "from_external"):
            _streams[key] = cupy.cuda.Stream.from_external(torch.cuda.current_stream(device))
        else:
            _streams[key] = cupy.cuda.ExternalStream(stream_pointer, device)
    return _streams[key]
