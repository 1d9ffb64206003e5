"""Gradient caching for PyTorch: encoders run a chunk at a time around the loss of a whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ..checks import validation
from ..training.grad_cache import (
    chunk_slices,
    copy_chunk,
    count_rows,
    list_arrays,
    one_each,
    require_batch,
    select_rows,
)

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

    Gradients are added to the ``.grad`` of all parameters, also of a learned temperature or bias.
    Up to rounding they are those of ``criterion(encoder(image), encoder(text)).backward()``, but
    the encoders need memory for `chunk` rows only:

    1. Each chunk is encoded without a graph.
    2. The loss of all rows gives the gradients of the features.
    3. Each chunk is encoded again, with its graph, which gives the gradients of the parameters.

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
        The loss of the whole batch, detached; if the loss returns a tuple, that tuple. If gradients
        are disabled, as by `torch.no_grad`, only the loss is computed: step 1, then the loss.

    Raises
    ------
    TypeError, ValueError
        Before any work for arguments that do not fit, and then for an encoder that returns another
        number of rows, and for a loss without a gradient.

    Notes
    -----
    Dropout draws the same numbers both times: the states of PyTorch's random generators, on the CPU
    and on the GPUs of inputs and parameters and the current GPU, are kept for each chunk.

    `DistributedDataParallel` and `fully_shard` synchronise gradients once, with the last chunk, if
    the encoder is a module; if it is a function that calls such modules, with each chunk.
    `fully_shard` needs the same number of chunks on all processes.

    References
    ----------
    Gao et al.: Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup, 2021.
    """
    towers = _make_towers(encoders, inputs, chunk)
    if not callable(loss):
        raise TypeError(f"loss: expected a callable, got {validation.what(loss)}")
    with_gradients = torch.is_grad_enabled()
    for tower in towers:
        tower.require_same_chunks()

    # Step 1: outputs for all rows, without a graph. They are the leaves of the loss's graph.
    with torch.no_grad():
        outputs = [tower.encode() for tower in towers]
    # Autocast caches converted weights. Weights of step 1 have no graph, but step 3 needs a graph.
    # Older versions of PyTorch would use the cached weights in step 3 too.
    torch.clear_autocast_cache()
    if with_gradients:
        for tower, leaves in zip(towers, outputs, strict=True):
            for leaf in leaves:
                leaf.requires_grad_(tower.trained)

    # Step 2: gradients of the leaves
    result = loss(*(leaf for leaves in outputs for leaf in leaves), **options)
    value, *others = result if isinstance(result, tuple) else (result,)
    if not isinstance(value, Tensor) or (with_gradients and not value.requires_grad):
        raise TypeError(
            "loss: expected a function of tensors with a gradient, such as "
            f"infonce.torch.clip_loss, got one that returns {validation.what(value)}"
        )
    if with_gradients:
        value.backward()

    # Step 3: gradients of the parameters. A module synchronises them in its last step. A tower
    # whose outputs have no gradient, such as a frozen one, is not encoded again.
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
    """An encoder, the entries of `inputs` that it takes, and how they are divided into chunks."""

    def __init__(self, name: str, encoder: Encoder, inputs: Sequence[Any], chunk: int) -> None:
        self.name, self.encoder, self.inputs = name, encoder, inputs
        self.chunks = chunk_slices(count_rows(name, inputs), chunk)
        self.random_states: list[_RandomState] = []  # of each chunk, before it is first encoded
        self.parallel: list[Any] = []  # modules that synchronise gradients over processes
        tensors = [z for entry in inputs for z in list_arrays(entry) if isinstance(z, Tensor)]
        if isinstance(encoder, nn.Module):
            self.parallel = list(dict.fromkeys(_find_parallel(encoder)))
            tensors += encoder.parameters()
        # whether a parameter or an input needs a gradient; True for a function, whose parameters
        # are not known
        self.trained = not isinstance(encoder, nn.Module) or any(z.requires_grad for z in tensors)
        self.gpus = {z.device for z in tensors if z.is_cuda}
        if torch.cuda.is_initialized():
            self.gpus.add(torch.device("cuda", torch.cuda.current_device()))

    def encode(self) -> list[Tensor]:
        """The encoder's outputs for all rows, computed chunk by chunk, in memory of their own.

        An output may be a parameter, an input, or a view of one: its copy has a `.grad` of its own.
        An encoder may return the same memory for each chunk.
        """
        batch: list[Tensor] = []
        for rows in self.chunks:
            self.random_states.append(_RandomState(self.gpus))
            outputs = self._run(rows)
            batch = batch or [
                z.clone() if _is_number(z) else z.new_empty(self.chunks[-1].stop, *z.shape[1:])
                for z in outputs
            ]
            for leaf, z in zip(batch, outputs, strict=True):
                if not _is_number(leaf):
                    copy_chunk(self.name, leaf, rows, z)
        return batch

    def backward(self, i: int, gradients: Sequence[Tensor | None]) -> None:
        """Encode chunk `i` again, with its graph, and run the backward pass through the encoder.

        `gradients` are those of the outputs for all rows. Outputs that are one number, such as a
        scale, are the same for each chunk: their gradient is passed with the last chunk only.
        """
        rows, is_last = self.chunks[i], i + 1 == len(self.chunks)
        with self.random_states[i].restore():
            outputs = self._run(rows)
        pairs = [
            (z, gradient if _is_number(z) else gradient[rows])
            for z, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and z.requires_grad and (is_last or not _is_number(z))
        ]
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))

    def _run(self, rows: slice) -> list[Tensor]:
        """The encoder's outputs for a chunk of rows. ValueError if their shapes do not fit."""
        out = self.encoder(*(select_rows(entry, rows) for entry in self.inputs))
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
        """ValueError if processes have different numbers of chunks, and `fully_shard` is used.

        `fully_shard` gathers parameters for each chunk, so a process with fewer chunks would hang
        the others.
        """
        n = len(self.chunks)
        for module in filter(_is_sharded, self.parallel):
            module.reshard()  # only resharded parameters have `device_mesh`, the processes' mesh
            mesh = next(z.device_mesh for z in module.parameters() if hasattr(z, "device_mesh"))
            extremes = torch.tensor([n, -n], device=mesh.device_type)
            for group in mesh.get_all_groups():
                dist.all_reduce(extremes, dist.ReduceOp.MAX, group)
            most, minus_least = extremes.tolist()
            least = -minus_least
            if most != least:
                raise ValueError(
                    "chunk: expected one number of chunks on all processes with fully_shard, got "
                    f"{n} here, and from {least} to {most} on all"
                )


class _RandomState:
    """The states of PyTorch's random generators: of the CPU, and of the GPUs of an encoder."""

    def __init__(self, gpus: set[torch.device]) -> None:
        self.cpu_state = torch.get_rng_state()
        self.gpu_states = {gpu: torch.cuda.get_rng_state(gpu) for gpu in gpus}

    @contextmanager
    def restore(self) -> Iterator[None]:
        """Context in which the generators have these states. Afterwards they continue as before."""
        with torch.random.fork_rng(list(self.gpu_states)):
            torch.set_rng_state(self.cpu_state)
            for gpu, state in self.gpu_states.items():
                torch.cuda.set_rng_state(state, gpu)
            yield


def _make_towers(encoders: Any, inputs: Any, chunk: int) -> list[_Tower]:
    """One tower for each encoder of a sequence, or one for a callable that takes all inputs."""
    require_batch(inputs, chunk)
    if not isinstance(encoders, (list, tuple)):
        (encoder,) = one_each("encoders", encoders, 1)
        return [_Tower("encoders", encoder, inputs, chunk)]
    each = zip(one_each("encoders", encoders, len(inputs)), inputs, strict=True)
    return [_Tower(f"encoders[{i}]", encoder, [z], chunk) for i, (encoder, z) in enumerate(each)]


def _is_number(output: Tensor) -> bool:
    """Whether an output of an encoder is one number, such as a scale, instead of features."""
    return bool(output.ndim < 2)


def _find_parallel(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that synchronise gradients: of `fully_shard`, or with `no_sync`."""
    if _is_sharded(module) or hasattr(module, "no_sync"):
        yield module
        return
    for child in module.children():
        yield from _find_parallel(child)


def _is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` has been applied to `module`."""
    return hasattr(module, "set_requires_gradient_sync")


@contextmanager
def _skip_synchronisation(module: Any) -> Iterator[None]:
    """Context in which a backward pass does not synchronise the module's gradients."""
    if not _is_sharded(module):
        with module.no_sync():
            yield
        return
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)
