"""Gradient caching for PyTorch: encoders run a chunk at a time around the loss of a whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ..checks import validation
from ..training.grad_cache import chunk_slices, one_each, require_batch

Encoder = Callable[..., Any]  # chunks of its inputs -> features [rows, D], or a tuple of outputs


def grad_cache(
    encoders: Encoder | Sequence[Encoder],
    inputs: Sequence[Any],
    loss: Callable[..., Any],
    chunk: int,
    **options: Any,
) -> Any:
    """Run the backward pass of a loss whose encoders see `chunk` rows at a time.

    >>> loss = infonce.torch.grad_cache([encoder, encoder], [image, text], criterion, chunk=4)
    >>> optimizer.step()

    Gradients are added to the parameters' ``.grad``. To rounding they are those of
    ``criterion(encoder(image), encoder(text)).backward()``, the temperature's and the bias's
    included, in the encoders' memory for `chunk` rows: each chunk is encoded without a graph, the
    loss of all rows gives the gradients of the features, and each chunk is encoded again, with its
    graph, for the gradients of the parameters.

    Parameters
    ----------
    encoders : sequence of callables, or one callable
        A sequence has one for each entry of `inputs`, chunk -> features [rows, D]; an encoder may
        be there twice. One callable takes a chunk of each of `inputs`, and returns a tuple of the
        arguments of `loss`: features, and tensors of one number such as a learned scale. The rows
        of a batch must not see each other, as in batch normalisation.
    inputs : list or tuple
        Tensors, mappings of tensors, or anything with a length and slices.
    loss : callable (*features, **options) -> 0-d tensor, or tuple that begins with it
        A function or module of `infonce.torch`, or any other that autograd differentiates. Under a
        GradScaler, pass ``lambda *z: scaler.scale(criterion(*z))``.
    chunk : int
        Rows that an encoder sees at a time.
    **options
        Passed on to the loss: ``scale=log_scale.exp()``; over the processes of `torch.distributed`,
        each of which passes its own rows, ``group=``.

    Returns
    -------
    0-d tensor
        The loss of the whole batch, detached; if the loss returns a tuple, that tuple.

    Raises
    ------
    TypeError, ValueError
        Before any work for arguments that do not fit, and then for an encoder that returns another
        number of rows, and for a loss without a gradient.
    RuntimeError
        If gradients are disabled, as by `torch.no_grad`.

    Notes
    -----
    Dropout draws the same numbers both times: the states of PyTorch's random generators, on the CPU
    and on the GPUs of inputs and parameters, are kept for each chunk.

    Modules of `DistributedDataParallel` and `fully_shard` synchronise gradients once, with the last
    chunk, if they are encoders or inside of encoders that are modules; inside of functions, with
    each chunk. `fully_shard` needs as many chunks on all processes.

    References
    ----------
    Gao et al.: Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup, 2021.
    """
    towers = _towers(encoders, inputs, chunk)
    if not callable(loss):
        raise TypeError(f"loss: expected a callable, got {validation.what(loss)}")
    if not torch.is_grad_enabled():
        raise RuntimeError("grad_cache: expected enabled gradients, got torch.no_grad()")
    for tower in towers:
        tower.require_same_chunks()
    with torch.no_grad():
        outputs = [tower.encode() for tower in towers]
    torch.clear_autocast_cache()  # older versions keep weights that were converted without a graph
    for tower, leaves in zip(towers, outputs, strict=True):
        for leaf in leaves:
            leaf.requires_grad_(tower.trained)
    result = loss(*(leaf for leaves in outputs for leaf in leaves), **options)
    value, *others = result if isinstance(result, tuple) else (result,)
    if not isinstance(value, Tensor) or not value.requires_grad:
        raise TypeError(
            "loss: expected a function of tensors with a gradient, such as "
            f"infonce.torch.clip_loss, got one that returns {validation.what(value)}"
        )
    value.backward()
    steps = [
        (tower, i, [leaf.grad for leaf in leaves])
        for tower, leaves in zip(towers, outputs, strict=True)
        if any(leaf.grad is not None for leaf in leaves)
        for i in range(len(tower.chunks))
    ]
    last_step = {module: i for i, (tower, *_) in enumerate(steps) for module in tower.parallel}
    for step, (tower, i, gradients) in enumerate(steps):
        with ExitStack() as stack:
            for module in tower.parallel:
                if last_step[module] != step:
                    stack.enter_context(_skip_synchronisation(module))
            tower.backward(i, gradients)
    return (value.detach(), *others) if isinstance(result, tuple) else value.detach()


class _Tower:
    """An encoder and the inputs that it takes."""

    def __init__(self, name: str, encoder: Encoder, inputs: Sequence[Any], chunk: int) -> None:
        self.name, self.encoder, self.inputs = name, encoder, inputs
        lengths = [len(z) for entry in inputs for z in _list_arrays(entry)]
        if len(set(lengths)) != 1:
            raise ValueError(f"inputs: expected as many rows in each of {name}, got {lengths}")
        self.chunks = chunk_slices(lengths[0], chunk)
        self.states: list[_RandomState] = []  # before each chunk's first pass
        self.parallel: list[Any] = []  # modules that synchronise gradients
        self.trained = True
        tensors = [z for entry in inputs for z in _list_arrays(entry)]
        if isinstance(encoder, nn.Module):
            parameters = list(encoder.parameters())
            self.trained = any(z.requires_grad for z in parameters)
            self.parallel = list(dict.fromkeys(_find_parallel(encoder)))
            tensors += parameters
        self.gpus = {z.device for z in tensors if isinstance(z, Tensor) and z.is_cuda}
        if torch.cuda.is_initialized():
            self.gpus.add(torch.device("cuda", torch.cuda.current_device()))

    def encode(self) -> list[Tensor]:
        """The outputs for all rows."""
        chunks = []
        for rows in self.chunks:
            self.states.append(_RandomState(self.gpus))
            chunks.append(self._run(rows))
        return [z[0] if _is_number(z[0]) else torch.cat(z) for z in zip(*chunks, strict=True)]

    def backward(self, i: int, gradients: Sequence[Tensor | None]) -> None:
        """The backward pass of a chunk: of features, and with the last chunk of other outputs."""
        rows, is_last = self.chunks[i], i + 1 == len(self.chunks)
        with self.states[i].restore():
            outputs = self._run(rows)
        pairs = [
            (z, gradient if _is_number(z) else gradient[rows])
            for z, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and z.requires_grad and (is_last or not _is_number(z))
        ]
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))

    def _run(self, rows: slice) -> list[Tensor]:
        """The outputs for a chunk."""
        out = self.encoder(*(_select_rows(entry, rows) for entry in self.inputs))
        outputs = list(out) if isinstance(out, (tuple, list)) else [out]
        for z in outputs:
            if not isinstance(z, Tensor):
                raise TypeError(
                    f"{self.name}: expected a function that returns a tensor, or a tuple of them, "
                    f"got one that returns {validation.what(z)}"
                )
            n = rows.stop - rows.start
            if z.numel() != 1 if _is_number(z) else len(z) != n:
                raise ValueError(
                    f"{self.name}: expected features of {n} rows, or a tensor of one number, got "
                    f"shape {tuple(z.shape)}"
                )
        return outputs

    def require_same_chunks(self) -> None:
        """ValueError if processes differ, as `fully_shard` gathers parameters for each chunk."""
        n = len(self.chunks)
        for module in filter(_is_sharded, self.parallel):
            module.reshard()  # sharded parameters know their processes
            mesh = next(z.device_mesh for z in module.parameters() if hasattr(z, "device_mesh"))
            extremes = torch.tensor([n, -n], device=mesh.device_type)
            for group in mesh.get_all_groups():
                dist.all_reduce(extremes, dist.ReduceOp.MAX, group)
            most, least = extremes.tolist()
            if most != -least:
                raise ValueError(
                    f"chunk: expected as many chunks on all processes with fully_shard, got {n} "
                    f"here, and from {-least} to {most} on all"
                )


class _RandomState:
    """The states of PyTorch's random generators."""

    def __init__(self, gpus: set[torch.device]) -> None:
        self.cpu_state = torch.get_rng_state()
        self.gpu_states = {gpu: torch.cuda.get_rng_state(gpu) for gpu in gpus}

    @contextmanager
    def restore(self) -> Iterator[None]:
        """Context in which the generators have these states; then those from before it."""
        with torch.random.fork_rng(list(self.gpu_states)):
            torch.set_rng_state(self.cpu_state)
            for gpu, state in self.gpu_states.items():
                torch.cuda.set_rng_state(state, gpu)
            yield


def _towers(encoders: Any, inputs: Any, chunk: int) -> list[_Tower]:
    require_batch(inputs, chunk)
    if not isinstance(encoders, (list, tuple)):
        (encoder,) = one_each("encoders", encoders, 1)
        return [_Tower("encoders", encoder, inputs, chunk)]
    each = zip(one_each("encoders", encoders, len(inputs)), inputs, strict=True)
    return [_Tower(f"encoders[{i}]", encoder, [z], chunk) for i, (encoder, z) in enumerate(each)]


def _list_arrays(entry: Any) -> list[Any]:
    """What has rows in an entry of `inputs`."""
    return list(entry.values()) if isinstance(entry, Mapping) else [entry]


def _select_rows(entry: Any, rows: slice) -> Any:
    """A chunk of an entry of `inputs`."""
    if isinstance(entry, Mapping):
        return {name: z[rows] for name, z in entry.items()}
    return entry[rows]


def _is_number(output: Tensor) -> bool:
    """Whether an output of an encoder is no features: a scale or a bias."""
    return bool(output.ndim < 2)


def _find_parallel(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that synchronise gradients."""
    if _is_sharded(module) or hasattr(module, "no_sync"):
        yield module
        return
    for child in module.children():
        yield from _find_parallel(child)


def _is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` has been applied to it."""
    return hasattr(module, "set_requires_gradient_sync")


@contextmanager
def _skip_synchronisation(module: Any) -> Iterator[None]:
    """Context in which a backward pass leaves this process's gradients as they are."""
    if not _is_sharded(module):
        with module.no_sync():
            yield
        return
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)
