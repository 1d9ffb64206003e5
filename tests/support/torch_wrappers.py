"""The wrappers of PyTorch around a module of a loss that learns its numbers: for each of them the
loss and all gradients, by executors of tests/matrix.

`LOCAL` wrappers run in one process, `RANKS` in each process of a process group.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize
from torch_problems import MODULES

SCALE, BIAS, DTYPE = 20.0, -3.0, torch.float64  # neither of them a default
# name of a wrapper -> function of the module: (a call of the wrapped module, and after a backward
# pass the gradients of its numbers by name)
Wrapped = tuple[Callable[..., Any], Callable[[], dict[str, Any]]]
# (module, its positional arguments, its keywords of a call, a function that makes such a module)
Wrapper = Callable[..., Wrapped]


def make(loss: str, **options: Any) -> Any:
    bias = {"bias": BIAS} if loss == "siglip" else {}
    options = {"scale": SCALE, **bias, "normalize": True, "learnable": True, **options}
    module = MODULES[loss](**options).to(DTYPE)
    for name, parameter in module.named_parameters():  # not rounded to float32
        parameter.data.fill_(BIAS if name == "bias" else math.log(SCALE))
    return module


def gradients_of(parameters: Any) -> Callable[[], dict[str, Any]]:
    """A function that returns the gradients of named parameters."""
    named = dict(parameters)

    def gradients() -> dict[str, Any]:
        grads = {name.split(".")[-1]: p.grad for name, p in named.items()}
        return {
            name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in grads.items()
        }

    return gradients


def plain(module: Any, *_: Any) -> Wrapped:
    return module, gradients_of(module.named_parameters())


def replica(module: Any, *_: Any) -> Wrapped:
    """As `replicate` of nn.DataParallel makes one, which needs GPUs."""
    copied = module._replicate_for_data_parallel()
    for name, parameter in module.named_parameters():
        setattr(copied, name, parameter.view_as(parameter))  # no parameter any more
    return copied, gradients_of(module.named_parameters())


class Plus(nn.Module):
    """A parametrization: the number is the parameter and 1."""

    def forward(self, original: Any) -> Any:
        return original + 1.0

    def right_inverse(self, value: Any) -> Any:
        return value - 1.0


def parametrized(module: Any, *_: Any) -> Wrapped:
    named = {}
    for name in list(dict(module.named_parameters())):
        parametrize.register_parametrization(module, name, Plus())
        named[name] = module.parametrizations[name].original
    return module, gradients_of(named)


def on_meta(module: Any, inputs: Any, keywords: Any, make: Callable[[], Any]) -> Wrapped:
    with torch.device("meta"):
        made = make().to(DTYPE)
    made.to_empty(device="cpu")
    for parameter in made.parameters():
        parameter.data.fill_(torch.nan)
    made.reset_parameters()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(dict(made.named_parameters())[name], parameter)
    return plain(made)


def functional(module: Any, *_: Any) -> Wrapped:
    """The module holds other numbers than those of the call."""
    named = {name: p.detach().clone() for name, p in module.named_parameters()}
    for p in module.parameters():
        p.data.fill_(0.5)
    leaves = {name: p.requires_grad_() for name, p in named.items()}
    before = {name: p.detach().clone() for name, p in named.items()}

    def run(*inputs: Any, **keywords: Any) -> Any:
        out = torch.func.functional_call(module, leaves, inputs, keywords)
        assert all(torch.equal(before[name], p) for name, p in leaves.items())
        return out

    return run, gradients_of(leaves)


def averaged(module: Any, *_: Any) -> Wrapped:
    model = torch.optim.swa_utils.AveragedModel(module)
    model.update_parameters(module)
    return model, gradients_of(model.module.named_parameters())


def unpickled(module: Any, *_: Any) -> Wrapped:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return plain(torch.load(file, weights_only=False))


def loaded(shape: tuple[int, ...]) -> Wrapper:
    """From a state whose numbers have another shape."""

    def load(module: Any, *_: Any) -> Wrapped:
        state = {f"0.{name}": p.reshape(shape).clone() for name, p in module.state_dict().items()}
        for p in module.parameters():
            p.data.fill_(0.5)
        nn.Sequential(module).load_state_dict(state)
        return plain(module)

    return load


def compiled(module: Any, *_: Any) -> Wrapped:
    torch.compiler.reset()
    run = torch.compile(module, fullgraph=True, backend="aot_eager")
    return run, gradients_of(module.named_parameters())


def exported(strict: bool) -> Wrapper:
    def export(module: Any, inputs: Any, keywords: Any, *_: Any) -> Wrapped:
        program = torch.export.export(module, inputs, keywords, strict=strict).module()
        return program, gradients_of(program.named_parameters())

    return export


def checkpointed(module: Any, *_: Any) -> Wrapped:
    def run(*inputs: Any, **keywords: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(module, *inputs, use_reentrant=False, **keywords)

    return run, gradients_of(module.named_parameters())


def distributed_data_parallel(module: Any, *_: Any) -> Wrapped:
    return plain(nn.parallel.DistributedDataParallel(module))


def flat(module: Any, *_: Any) -> Wrapped:
    """FSDP1 with one flat parameter, a part of which each process holds."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    names = list(dict(module.named_parameters()))
    model = FullyShardedDataParallel(module, device_id=torch.device("cpu"))

    def gradients() -> dict[str, Any]:
        (parameter,) = model.parameters()
        parts = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, parameter.grad)
        return {name: g.reshape(1) for name, g in zip(names, torch.cat(parts), strict=False)}

    return model, gradients


def original(module: Any, *_: Any) -> Wrapped:
    """FSDP1 that keeps the parameters of the module, as views of the flat one."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)

    def gradients() -> dict[str, Any]:
        grads = {name.split(".")[-1]: p.grad for name, p in model.named_parameters()}
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, grads)
        # a parameter of one number is in one of the processes
        return {name: next(part[name] for part in parts if part[name] is not None and
                           part[name].numel()) for name in grads}  # fmt: skip

    return model, gradients


def fully_sharded(module: Any, *_: Any) -> Wrapped:
    from torch.distributed.fsdp import fully_shard

    fully_shard(module, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    return plain(module)


def in_parts(shape: tuple[int, ...]) -> Wrapper:
    """DTensors that no wrapper gathers: of this shape, split or copied."""

    def distribute(module: Any, *_: Any) -> Wrapped:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for name, parameter in list(module.named_parameters()):
            value = parameter.detach().reshape(shape)
            placements = [Shard(0) if shape else Replicate()]
            setattr(module, name, nn.Parameter(distribute_tensor(value, mesh, placements)))
        run, gradients = plain(module)
        return run, lambda: {name: g.reshape(1) for name, g in gradients().items()}

    return distribute


LOCAL: dict[str, Wrapper] = {
    "plain": plain,
    "replica of DataParallel": replica,
    "parametrize": parametrized,
    "meta": on_meta,
    "functional_call": functional,
    "AveragedModel": averaged,
    "deepcopy": lambda module, *_: plain(copy.deepcopy(module)),
    "pickle": unpickled,
    "0-d state": loaded(()),
    "[1] state": loaded((1,)),
    "compile": compiled,
    "export": exported(strict=False),
    "strict export": exported(strict=True),
    "checkpoint": checkpointed,
}
RANKS: dict[str, Wrapper] = {
    "DDP": distributed_data_parallel,
    "FSDP1": flat,
    "FSDP1, use_orig_params": original,
    "fully_shard": fully_sharded,
    "DTensor [1]": in_parts((1,)),
    "0-d DTensor": in_parts(()),
}
