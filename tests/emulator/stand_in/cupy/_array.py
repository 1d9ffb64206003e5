"""`ndarray`: memory of an emulated device that NumPy computes on."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from .cuda import memory, runtime
from .cuda import stream as streams
from .cuda.device import Device


class ndarray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array on a device. `data` is where its first element is."""

    __array_priority__ = 100

    def __init__(
        self, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None,
        order: str = "C",
    ) -> None:  # fmt: skip
        shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
        dtype = np.dtype(dtype)
        if strides is None:
            strides = _strides(shape, dtype.itemsize, order)
        if memptr is None:
            memptr = memory.alloc(int(np.prod(shape, dtype=object)) * dtype.itemsize)
        self.data = memptr
        self._host = _at(memptr.ptr, shape, dtype, tuple(strides))

    @classmethod
    def _of(cls, host: np.ndarray, data: Any) -> ndarray:
        array = cls.__new__(cls)
        array._host, array.data = host, data
        return array

    # -- what NumPy knows of it

    shape = property(lambda self: self._host.shape)
    strides = property(lambda self: self._host.strides)
    dtype = property(lambda self: self._host.dtype)
    ndim = property(lambda self: self._host.ndim)
    size = property(lambda self: self._host.size)
    nbytes = property(lambda self: self._host.nbytes)
    itemsize = property(lambda self: self._host.itemsize)
    device = property(lambda self: Device(self.data.device_id))
    T = property(lambda self: self.transpose())

    @property
    def flags(self) -> Any:
        known = self._host.flags
        return SimpleNamespace(c_contiguous=known.c_contiguous, f_contiguous=known.f_contiguous)

    def __len__(self) -> int:
        return len(self._host)

    # -- to and from the host

    def get(
        self, stream: Any = None, *, out: np.ndarray | None = None, blocking: bool = True
    ) -> np.ndarray:
        stream = stream or streams.get_current_stream()
        stream.note_wait("get")
        stream.finish()
        if out is None:
            return self._host.copy(order="K")
        np.copyto(out, self._host)
        return out

    def tobytes(self) -> bytes:
        return self.get().tobytes()

    def set(self, values: np.ndarray, stream: Any = None) -> None:
        if not isinstance(values, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        memory.refuse_host_copy(streams.get_current_stream())
        self._write(values)

    def _write(self, values: np.ndarray) -> None:
        values = values.copy()
        streams.get_current_stream().submit(lambda: np.copyto(self._host, values))

    def __format__(self, spec: str) -> str:
        return format(self.get(), spec)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct "
            "a NumPy array explicitly."
        )

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        raise BufferError("arrays of an emulated GPU are for CuPy alone")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.data.device_id

    # -- operations of NumPy's

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return apply(getattr(ufunc, method) if method != "__call__" else ufunc, *inputs, **options)

    def __array_function__(self, function: Any, _: Any, inputs: Any, options: Any) -> Any:
        return apply(function, *inputs, **options)

    def __getitem__(self, index: Any) -> Any:
        if _has_arrays(index):
            index = _index(index)
            _wait_for_mask(index)
            return apply(operator.getitem, self, index)
        parts = index if isinstance(index, tuple) else (index,)
        view = self._host[index] if Ellipsis in parts else self._host[(*parts, ...)]
        return viewed(self, view)

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, np.ndarray) and value.ndim:
            raise ValueError("Non-scalar numpy.ndarray cannot be used for fill")
        index = _index(index)
        _wait_for_mask(index)
        run(_assign if _has_arrays(index) else operator.setitem, self, index, value)

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def sort(self, axis: int = -1) -> None:
        if not self.flags.c_contiguous:
            raise NotImplementedError("Sorting non-contiguous array is not supported.")
        run(lambda z: z.sort(axis=axis), self)

    def fill(self, value: Any) -> None:
        self[...] = value

    def astype(self, dtype: Any, order: str = "K", copy: bool = True) -> Any:
        same = not copy and self.dtype == np.dtype(dtype)
        return self if same else apply(lambda z: z.astype(dtype, order=order), self)

    def copy(self, order: str = "C") -> Any:
        return apply(lambda z: z.copy(order=order), self)

    def view(self, dtype: Any = None) -> ndarray:
        return viewed(self, self._host.view(dtype))

    def reshape(self, *shape: Any, order: str = "C") -> Any:
        return apply(lambda z: z.reshape(*shape, order=order), self)

    def ravel(self, order: str = "C") -> ndarray:
        return self.reshape(-1, order=order)

    def transpose(self, *axes: Any) -> ndarray:
        return viewed(self, self._host.transpose(*axes))


def _method(name: str) -> Callable[..., Any]:
    return lambda self, *operands, **options: apply(
        lambda z, *more: getattr(z, name)(*more, **options), self, *operands
    )


for _name in ("sum", "max", "min", "mean", "any", "all", "argmax", "argmin", "argsort", "dot"):
    setattr(ndarray, _name, _method(_name))


def _value(of: Callable[[Any], Any]) -> Callable[[ndarray], Any]:
    return lambda self: of(self.get())


for _name, _of in {"__float__": float, "__int__": int, "__bool__": bool, "__complex__": complex,
                   "__index__": operator.index, "__repr__": repr, "item": np.ndarray.item,
                   "tolist": np.ndarray.tolist}.items():  # fmt: skip
    setattr(ndarray, _name, _value(_of))


class _Described:
    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def _at(address: int, shape: tuple[int, ...], dtype: np.dtype[Any], strides: Any) -> np.ndarray:
    """The memory there as NumPy's array. Nothing is read: there may be none."""
    described = {"data": (address, False), "shape": shape, "typestr": f"|V{dtype.itemsize}",
                 "strides": tuple(map(int, strides)), "version": 3}  # fmt: skip
    if 0 in shape:
        return np.empty(shape, dtype)
    return np.asarray(_Described(described)).view(dtype)


def _strides(shape: tuple[int, ...], item: int, order: str) -> tuple[int, ...]:
    steps, step = [], item
    for n in shape if order == "F" else shape[::-1]:
        steps.append(step)
        step *= int(n)
    return tuple(steps if order == "F" else steps[::-1])


def _has_arrays(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, ndarray | np.ndarray | list) for part in parts)


def _index(index: Any) -> Any:
    """Arrays of the host may be indices."""
    indices = index if isinstance(index, tuple) else (index,)
    parts = tuple(
        on_device(np.asarray(p)) if isinstance(p, np.ndarray | list) else p for p in indices
    )
    return parts if isinstance(index, tuple) else parts[0]


def _wait_for_mask(index: Any) -> None:
    """CuPy counts the elements of a mask on the host, for assignments too."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, ndarray) and part.dtype == bool and part.ndim for part in parts):
        streams.get_current_stream().note_wait("mask")


def _assign(to: np.ndarray, at: Any, values: Any) -> None:
    """Assign to indices. Which of several values at one index stays is not decided: none does."""
    to[at] = values
    places = np.arange(to.size).reshape(to.shape)[at]
    values = np.broadcast_to(np.asarray(values), places.shape).astype(to.dtype)
    lost = (to[at] != values) & (values == values)
    if to.dtype != bool and lost.any():
        poison = np.full(to.itemsize, memory.POISON, np.uint8).view(to.dtype)[0]
        to.flat[places[lost]] = poison


def viewed(owner: ndarray, host: Any) -> Any:
    """An array on the same memory."""
    offset = host.__array_interface__["data"][0] - owner.data.ptr if host.size else 0
    return ndarray._of(host, owner.data + offset)


def on_device(values: np.ndarray, order: str = "K", copied: bool = True) -> ndarray:
    """An array of the host in new memory. `copied`: from the host, unless it is one number."""
    values = np.asarray(values)
    if order == "K":
        order = "F" if values.flags.f_contiguous and not values.flags.c_contiguous else "C"
    array = ndarray(values.shape, values.dtype, order=order)
    if copied and values.ndim:
        array.set(values)
    else:
        array._write(values)
    return array


def host_values(part: Any) -> Any:
    """The arrays of an operation as NumPy's."""
    if isinstance(part, ndarray):
        if part.data.device_id != runtime.getDevice() and part.size:
            raise ValueError(
                f"Array device must be same as the current device: array device = "
                f"{part.data.device_id} while current = {runtime.getDevice()}"
            )
        return part._host
    if isinstance(part, np.ndarray):
        raise TypeError(f"Unsupported type {type(part)}")
    if isinstance(part, tuple | list):
        return type(part)(map(host_values, part))
    return part


def run(function: Callable[..., Any], *operands: Any) -> None:
    """Run a function that writes to existing arrays, on the current stream."""
    values = host_values(operands)

    def work() -> None:
        with np.errstate(all="ignore"):
            function(*values)

    streams.get_current_stream().submit(work)


def apply(function: Callable[..., Any], *operands: Any, **options: Any) -> Any:
    """An operation on the current stream, and its result on the device. Shapes and dtypes must not
    depend on what arrays hold if the stream is being captured."""
    out = options.pop("out", None)
    out = out[0] if isinstance(out, tuple) else out
    values, options = host_values(operands), {k: host_values(v) for k, v in options.items()}
    stream = streams.get_current_stream()
    stream.finish()  # NumPy reads the operands now, so earlier work has to be done

    if stream.is_capturing() and function in (np.matmul, np.dot):
        raise NotImplementedError("calling cuBLAS API during stream capture is unsupported")

    def computed() -> Any:
        with np.errstate(all="ignore"):
            return function(*values, **options)

    result = computed()  # of a stream under capture: for its shape and dtype
    arrays = [z for z in _flat(operands) if isinstance(z, ndarray)]
    if out is not None:
        run(lambda to: np.copyto(to, computed(), casting="same_kind"), out)
        return out
    if isinstance(result, tuple | list):
        parts = range(len(result))
        return type(result)(
            _result(z, arrays, lambda i=i: computed()[i])
            for i, z in zip(parts, result, strict=True)
        )
    return _result(result, arrays, computed)


def _flat(part: Any) -> list[Any]:
    if isinstance(part, tuple | list):
        return [z for inner in part for z in _flat(inner)]
    return [part]


def _result(result: Any, operands: list[ndarray], computed: Callable[[], Any]) -> Any:
    """A view where NumPy has made one."""
    if not isinstance(result, np.ndarray | np.generic):
        return result
    result = np.asarray(result)
    if result.size:
        start = result.__array_interface__["data"][0]
        for array in operands:
            memory_of = array.data.mem
            if memory_of.ptr <= start < memory_of.ptr + memory_of.size:
                return viewed(array, result)
    order = "F" if result.flags.f_contiguous and not result.flags.c_contiguous else "C"
    new = ndarray(result.shape, result.dtype, order=order)
    stream = streams.get_current_stream()
    if stream.is_capturing():
        stream.submit(lambda: np.copyto(new._host, computed()))
    else:
        np.copyto(new._host, result)
    return new
