"""Faults that the code has had: text of today, and the fault in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A change of the code, and what should find it."""

    name: str
    file: str
    old: str  # text that occurs once
    new: str
    executors: str = ".*"  # expression for names; "": none, because the fault is about errors
    tests: Sequence[str] = ()  # arguments of pytest, of runs for what no executor shows
    words: str = ""  # what is changed


DROP_INS = "tests/matrix/test_matrix.py -k drop_in"
GPU_RANKS = "tests/matrix/test_matrix.py -m emulated -k MPI"

FAULTS = [
    # --- arrays and numbers between user and engine -----------------------------------------------
    Mutant(
        "the sum of weights is compared with a subnormal number, which JAX's threads take for 0",
        "infonce/checks/rows.py",
        "weights / (weights.sum() or 1.0)",
        "weights / xp.maximum(weights.sum(), 5e-324)",
        "JAX.*",
    ),
    Mutant(
        "storages of tensors cannot be resized after a call",
        "infonce/arrays.py",
        "        memory = HostMemory.from_address(address)\n",
        "        if dtype.kind != 'V':\n            return tensor.detach().numpy()\n"
        "        memory = HostMemory.from_address(address)\n",
        "torch.*",
    ),
    Mutant(
        "a tensor on the negative of its memory is read as if it had its values",
        "infonce/arrays.py",
        "    if tensor.is_neg():",
        "    if False:",
        "",
        ["tests/losses/test_arrays.py tests/frameworks/test_torch_errors.py"],
    ),
    Mutant(
        "prefixes that are not the widest have gradients of the dtype of features",
        "infonce/checks/prefixes.py",
        """            prefix_options = {**others, "grad_out": grad_out * weight, "out": written}
            result = evaluate([z[..., :d] for z in features], prefix_options)
""",
        """            prefix_options = {**others, "grad_out": grad_out * weight}
            if is_widest:
                prefix_options["out"] = written
            result = evaluate([z[..., :d] for z in features], prefix_options)
            if not is_widest:
                written = {n: getattr(result.grads, n) for n in written}
""",
        "NumPy.*|MPI.*",
    ),
    Mutant(
        "upstream gradients in 16 bits are multiplied by weights of prefixes in 16 bits",
        "infonce/checks/prefixes.py",
        """        grad_out = validation.grad_out(
            xp, others.pop("grad_out", 1.0), others.get("reduction", "mean"), len(features[0])
        )
""",
        """        grad_out = others.pop("grad_out", 1.0)
        if not isinstance(grad_out, (int, float)):
            grad_out = xp.asarray(arrays.native(grad_out, "grad_out"))
""",
        "NumPy.*",
    ),
    Mutant(
        "a guide that is not finite spoils losses in products alone, by naive",
        "kernels/arrays/naive.py",
        "        finite &= finite_rows & xp.isfinite(guide_key).all()\n",
        "",
        "NumPy.*",
    ),
    Mutant(
        "a guide that is not finite spoils losses in products alone, by blocks of arrays",
        "kernels/arrays/backend.py",
        "        if problem.auxiliary_query is not None:\n            bad_rows",
        "        if hasattr(problem, 'teacher_query'):\n            bad_rows",
        "NumPy.*",
    ),
    # --- infonce.grad_cache and that of PyTorch ---------------------------------------------------
    Mutant(
        "a number that an encoder returns gets its gradient twice, if it is a parameter",
        "infonce/torch/caching.py",
        "z.clone() if _is_number(z) else z.new_empty",
        "z if _is_number(z) else z.new_empty",
        "torch, grad_cache",
    ),
    Mutant(
        "a module without parameters gives its inputs no gradient",
        "infonce/torch/caching.py",
        "self.trained = not isinstance(encoder, nn.Module) or "
        "any(z.requires_grad for z in tensors)",
        "self.trained = not isinstance(encoder, nn.Module) or any(\n"
        "            z.requires_grad for z in encoder.parameters())",
        "torch, grad_cache",
    ),
    Mutant(
        "grad_cache computes no loss without gradients",
        "infonce/torch/caching.py",
        "    with_gradients = torch.is_grad_enabled()\n",
        "    with_gradients = torch.is_grad_enabled()\n"
        "    if not with_gradients:\n        raise RuntimeError('expected gradients')\n",
        "torch, grad_cache",
    ),
    Mutant(
        "infonce.grad_cache takes no names of arguments",
        "infonce/training/grad_cache.py",
        "require_batch(inputs, chunk, (list, tuple, Mapping))",
        "require_batch(inputs, chunk)",
        "NumPy, grad_cache",
    ),
    Mutant(
        "a mapping of arrays is no entry of inputs",
        "infonce/training/grad_cache.py",
        "    if isinstance(entry, Mapping):\n        return {",
        "    if False:\n        return {",
        "NumPy, grad_cache|torch, grad_cache",
    ),
    Mutant(
        "an encoder may return other numbers of rows than it is given",
        "infonce/training/grad_cache.py",
        "len(shape) < 2 or shape[0] != n",
        "len(shape) < 2",
        "",
        ["tests/losses/test_grad_cache.py"],
    ),
    # --- JAX --------------------------------------------------------------------------------------
    Mutant(
        "results of a callback are declared to be equal on all devices",
        "infonce/jax/callback.py",
        "    return _vary(out, _all_varying_axes(inputs))",
        "    return out",
        "JAX.*",
    ),
    # --- PyTorch's modules and nodes --------------------------------------------------------------
    Mutant(
        "modules look for their numbers among their parameters",
        "infonce/torch/modules.py",
        "        call_options = {name: getattr(self, name) for name in self._given}\n",
        "        held = {**self.__dict__, **self._parameters}\n"
        "        call_options = {name: held[name] for name in self._given if name in held}\n",
        "torch, learned.*",
    ),
    Mutant(
        "a scale beyond its limit has no gradient",
        "infonce/torch/core/learned_scale.py",
        "excess * gradient < 0, 0.0",
        "excess != 0, 0.0",
        "torch, learned.*",
    ),
    Mutant(
        "a scale beyond its limit has the gradient that leads away",
        "infonce/torch/core/learned_scale.py",
        "excess * gradient < 0, 0.0",
        "excess * gradient > 0, 0.0",
        "torch, learned.*",
    ),
    Mutant(
        "the module writes the limit to its parameter",
        "infonce/torch/modules.py",
        '            call_options["scale"] = learned_scale(',
        "            log_scale.data.clamp_(max=math.log(self.max_scale))\n"
        '            call_options["scale"] = learned_scale(',
        "torch, learned.*",
    ),
    Mutant(
        "a second backward pass multiplies the gradients of the first",
        "infonce/torch/core/autograd.py",
        "        grads, call.grads = call.grads, None\n",
        "        grads = call.grads\n",
        "torch.*",
    ),
    Mutant(
        "distillation is a node of its own, without torch.func",
        "infonce/torch/functions.py",
        "    run: Any = _apply\n    if torch.compiler",
        """    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, scale: Any, *features: Any) -> Any:
            leaves = [z.detach().requires_grad_() for z in features]
            number = scale
            if isinstance(scale, Tensor):
                number = scale.detach().requires_grad_()
            with torch.enable_grad():
                given = {**options, "scale": number}
                given.pop("temperature", None)
                ctx.loss = _apply(teacher.loss, leaves, given, teacher=named)
            ctx.leaves = [number, *leaves]
            return ctx.loss.detach()

        @staticmethod
        def backward(ctx: Any, upstream: Any) -> Any:
            leaves = [z for z in ctx.leaves if isinstance(z, Tensor)]
            grads = list(torch.autograd.grad(ctx.loss, leaves, upstream, allow_unused=True))
            return (*[None] * (3 - len(grads)), *grads)

    given_scale = options.get("scale")
    given_scale = 1 / options["temperature"] if given_scale is None else given_scale
    return Node.apply(given_scale, query, key)
    run: Any = _apply
    if torch.compiler""",
        "torch.*",
    ),
    # --- drop-ins ---------------------------------------------------------------------------------
    Mutant(
        "drop-ins know the keywords of clip_loss",
        "infonce/torch/core/drop_in.py",
        "keywords.torch_function(self.kind)",
        "keywords.torch_function(spec.CLIP)",
        "",
        [DROP_INS, "tests/frameworks/test_drop_in_options.py"],
    ),
    Mutant(
        "drop-ins check no setting when it is set",
        "infonce/torch/core/drop_in.py",
        "        self.check_setting(name, value)\n        super()",
        "        super()",
        "",
        [DROP_INS, "tests/frameworks/test_drop_in_options.py"],
    ),
    Mutant(
        "drop-ins take options that would be right for a part of the loss",
        "infonce/torch/core/drop_in.py",
        "                require(name, options.pop(name), expected, instead)\n",
        "                pass\n",
        "",
        [DROP_INS, "tests/frameworks/test_drop_in_options.py"],
    ),
    Mutant(
        "Qwen3's loss fails with 0 hard negatives",
        "infonce/torch/memory_efficient_clip/qwen3.py",
        "            own = own if own.shape[1] else None\n",
        "",
        "",
        [DROP_INS],
    ),
    Mutant(
        "Qwen3's loss with queries as negatives takes in_batch=False",
        "infonce/torch/memory_efficient_clip/qwen3.py",
        '[*OPTIONS, "in_batch"]',
        "[*OPTIONS]",
        "",
        [DROP_INS, "tests/frameworks/test_drop_in_options.py"],
    ),
    Mutant(
        "Qwen3's loss broadcasts documents",
        "infonce/torch/memory_efficient_clip/qwen3.py",
        '        require_shape("doc_features", documents, tuple(query.shape))\n',
        "",
        "",
        [DROP_INS, "tests/frameworks/test_drop_in_options.py"],
    ),
    Mutant(
        "the positives of DCLW are computed in 16 bits",
        "infonce/torch/lightly.py",
        "nn.functional.normalize(z.to(loss.dtype), dim=1)",
        "nn.functional.normalize(z, dim=1)",
        "",
        [DROP_INS],
    ),
    Mutant(
        "a bias that all logits share has no gradient, for which DDP waits",
        "infonce/torch/open_clip.py",
        "        loss = with_zero_gradient(loss, logit_bias)\n",
        "",
        "",
        [DROP_INS],
    ),
    Mutant(
        "DistillClipLoss gives its options to one of its losses",
        "infonce/torch/open_clip.py",
        "            teacher_scale=dist_logit_scale, **self._options(logit_scale),\n",
        "            teacher_scale=dist_logit_scale, scale=logit_scale,\n",
        "",
        [DROP_INS],
    ),
    Mutant(
        "padding counts as tokens of a query",
        "infonce/torch/colpali_engine.py",
        "    return (query != 0).any(2)\n",
        "    return (query == query).any(2)\n",
        "",
        [DROP_INS],
    ),
    # --- ranks and processes ----------------------------------------------------------------------
    Mutant(
        "a process group connects under the number of groups of each process",
        "infonce/torch/core/process_group.py",
        'f"infonce/{self._name}"',
        'f"infonce/{len(_communicators)}"',
        "torch, gloo.*",
    ),
    Mutant(
        "a rank that fails does not tell the others why",
        "infonce/torch/core/process_group.py",
        'lambda: self._store.compare_set("failed", "", reason)',
        "lambda: None",
        "",
        ["tests/frameworks/test_torch_ranks.py -k catches"],
    ),
    Mutant(
        "questions about blocks have the room of a tile",
        "distributed/passes.py",
        "            block.workspace = max(block.workspace, room)\n",
        "",
        "MPI.*",
        ["tests/distributed"],
    ),
    Mutant(
        "ranks use each other's numbers of rows before they compare their functions",
        "distributed/agreement.py",
        "    require_equal_values("
        '[(pickle.dumps({"function": report.function}),) for report in reports])\n',
        "",
        "",
        ["tests/distributed"],
    ),
    Mutant(
        "a rank raises an error of dims alone, and the others wait",
        "distributed/call.py",
        "            if prefix_count:\n                raise\n            refusal = error\n",
        "            raise\n",
        "",
        ["tests/distributed"],
    ),
    Mutant(
        "a rank raises an error of its timeout alone, and the others wait",
        "distributed/call.py",
        '        return TIMEOUT, ValueError(\n            f"timeout',
        '        raise ValueError(\n            f"timeout',
        "",
        ["tests/distributed/test_ranks.py -m slow -k equal_to_one_process"],
    ),
    Mutant(
        "operations on arrays of a rank's GPU do not know which rows have no positive",
        "distributed/run.py",
        "request.on_gpu and vectors.has_plan(unweighted)",
        "request.on_gpu",
        "",
        [GPU_RANKS],
    ),
    Mutant(
        "vectors of ranks that offload take the reference of a GPU's sums for a maximum",
        "distributed/run.py",
        "Vectors(np, passes_on_gpu=True)",
        "Vectors(np)",
        "",
        [GPU_RANKS],
    ),
]
