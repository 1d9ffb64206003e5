"""Calls of a loss captured in CUDA graphs, replayed by one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import arrays
from ..checks import validation

Array = Any


class Captured:
    """What `capture` returns. Call it to compute again, on CuPy's current stream.

    A call takes no arrays: it reads the arrays that `capture` got. Write new features into these.
    Arrays of other shapes need another capture.

    Attributes
    ----------
    result : LossAndGrad or array
        The same arrays after every call, with new contents. Before the first call they hold
        nothing: the capture records the computation, and does not run it.
    """

    def __init__(self, function: Callable[..., Any], inputs: tuple[Array, ...], options: Any):
        import cupy

        # Arrays stay allocated, a 0-d scale among the options too: the graph reads their memory
        self._arguments = inputs, options
        self._pool = cupy.cuda.MemoryPool()  # owns the graph's temporary memory and results
        self._stream = cupy.cuda.Stream(non_blocking=True)  # a default stream cannot be captured
        before = cupy.cuda.get_current_stream().record()
        with cupy.cuda.using_allocator(self._pool.malloc), self._stream:
            self._stream.wait_event(before)
            # compile kernels, and fill the pool: neither is allowed during the capture
            function(*inputs, **options)
            self._stream.synchronize()
            self._stream.begin_capture()
            try:
                self.result = function(*inputs, **options)
            finally:
                self._graph = self._stream.end_capture()

    def __call__(self) -> Any:
        self._graph.launch()
        return self.result


def capture(function: Callable[..., Any], *inputs: Array, **options: Any) -> Captured:
    """Capture one call of a loss in a CUDA graph.

    ``step = infonce.capture(infonce.clip_loss_and_grad, image, text, scale=scale)`` evaluates the
    loss once and records its computation. ``step()`` repeats the computation, by one launch, with
    the current contents of `image`, `text` and a 0-d `scale`. It returns the same result object
    with new contents: copy results that must outlive the next call. A graph saves most time for
    small and medium batches.

    Parameters
    ----------
    function : one of this package's functions, such as `infonce.clip_loss_and_grad`
    inputs : CuPy arrays
        Their memory is read at every call: write new features into the same arrays.
    options
        Of `function`; arrays among them are on the GPU. Memory of the call stays reserved as long
        as the result lives: at most `workspace`, outputs, vectors of length M or N, and a workspace
        for cuBLAS: 32 MiB from compute capability 9.0 on, 4 MiB before.

    Returns
    -------
    Captured

    Raises
    ------
    TypeError
        `function` cannot be called, there are no inputs, or they are not CuPy arrays
        (`cupy.from_dlpack` makes them of CUDA tensors, without a copy).
    """
    if not callable(function):
        raise TypeError(f"function: expected a callable, got {validation.what(function)}")
    if not inputs:
        raise TypeError("inputs: expected CuPy arrays after the function, got none")
    for i, array in enumerate(inputs):
        if not arrays.on_gpu(array):
            raise TypeError(f"inputs[{i}]: expected a CuPy array, got {validation.what(array)}")
    with inputs[0].device:
        return Captured(function, inputs, options)
