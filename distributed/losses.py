"""The losses over ranks, equal to the losses of one process that has the rows of all ranks.

Each function takes this rank's rows and returns this rank's gradients of the loss of the whole
batch. All ranks of `comm` call the same function with the same options.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from infonce import losses as single
from infonce import spec
from infonce.checks.keywords import require, surplus, with_own
from infonce.checks.teacher import DISTILL, Teacher
from infonce.spec import Loss

from .call import evaluate
from .communicators.base import TIMEOUT
from .communicators.mpi import is_started

RANK_OPTIONS: dict[str, Any] = {
    "comm": None,
    "transport": "auto",
    "exchange": "auto",
    "timeout": TIMEOUT,
    "gradient_scale": "global",
}
TEACHER_OPTIONS = {"teacher_temperature", "teacher_scale", "two_sided"}  # of `distill_loss`
# Three texts that docstrings get: after the first sentence, after the parameters, at the end
BATCH = """\
The batch is spread over the ranks of `comm`. Each rank passes its own rows. The loss is that of the
rows of all ranks, and gradients are for the rows of this rank."""
DOC = """
comm : mpi4py communicator, default MPI.COMM_WORLD
    The ranks that share the batch; or an `infonce.distributed.Communicator`. Feature arrays are
    [rows of this rank, D]; the numbers of rows may differ, and may be 0. `labels` are indices of
    the keys of all ranks, in the order of the ranks, or classes; without them, query i of all ranks
    belongs to key i of all ranks. `ids`, `groups`, `positive_ids` and classes are compared across
    ranks. `weights` and `key_bias` are those of this rank's rows and keys.
transport : {"auto", "mpi", "nccl", "cuda-aware", "staged"}
    The library that sends arrays. "auto": MPI for NumPy arrays; for CuPy arrays NCCL if every rank
    has it and a GPU of its own, else MPI if it says that it is CUDA-aware, else pinned host memory
    and MPI.
exchange : {"auto", "ring", "gather", "hierarchical"}
    How keys travel between ranks. "ring": a shard moves from rank to rank while blocks are
    computed. "gather": each rank receives all keys at once, which is faster if ranks have few rows.
    "hierarchical": a gather inside nodes and a ring between nodes; ValueError unless all nodes have
    the same number of ranks, numbered node by node (INFONCE_LOCAL_SIZE=n makes nodes of n ranks).
    "gather" and "hierarchical": ValueError if their buffers do not fit half of the workspace
    (without a workspace, 1/32 of a GPU's memory). "auto": on GPUs the fastest of those that fit, by
    the model of `infonce.distributed.cost`, "hierarchical" only over several nodes; on CPUs
    "gather" if it fits, else "ring".
timeout : float or None, default 300
    Seconds to wait for other ranks, in the first call as in later ones. Then `RankError` names the
    ranks that do not respond. None: no limit.
gradient_scale : {"global", "ddp"}
    "global": gradients of the mean over all rows of all ranks (sum them over ranks). "ddp": the
    feature gradients times the number of ranks, for frameworks that average parameters' gradients
    over ranks afterwards. d scale and d bias are those of the whole batch, the same on every rank,
    so an average does not change them.
"""
RAISES = """
RankError
    A rank raised an error, ended, or did not respond within `timeout`. The communicator cannot be
    used again; when the processes end, ranks that do not end are aborted.
"""


def _over_ranks(function: Callable[..., Any], kind: Loss, with_grad: bool) -> Callable[..., Any]:
    """The function of `infonce` over ranks.

    Its signature and docstring are those of `function`, with the `RANK_OPTIONS`.
    """
    # the signature
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = [p for p in parameters if p.kind is not p.POSITIONAL_OR_KEYWORD]
    # `nt_xent`, which has labels only over ranks
    pairs_views = kind.symmetric and not (kind.classes or kind.joint)
    if pairs_views:
        labels = inspect.Parameter("labels", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
        positional.append(labels)
    keywords += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in RANK_OPTIONS.items()
    ]
    positional_signature = signature.replace(parameters=positional)
    names = [p.name for p in positional]
    defaults = {p.name: p.default for p in positional if p.default is not p.empty}
    least = len(names) - len(defaults)  # the number of arguments without defaults

    def read_arguments(args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name. Those given by name leave the options. TypeError if one is missing."""
        if len(args) > len(names):
            raise surplus(f"infonce.distributed.{function.__name__}()", names, args)
        named = {name: options.pop(name) for name in names if name in options}
        if named or len(args) < least:
            require(f"infonce.distributed.{function.__name__}()", names[:least], args, named)
        if named and args:  # an argument may come twice
            arguments = positional_signature.bind(*args, **named).arguments
        else:  # the same result without `bind`, which is too slow for small batches
            arguments = dict(zip(names, args, strict=False)) | named
        return defaults | arguments

    @functools.wraps(function)
    def over_ranks(*args: Any, **options: Any) -> Any:
        rank_options = {name: options.pop(name, default) for name, default in RANK_OPTIONS.items()}
        loss, labels, bias, teacher, refusal = kind, None, None, None, None
        caller_arrays: Sequence[Any] = ()
        loss_options: Mapping[str, Any] = options
        try:
            arguments = read_arguments(args, options)
            caller_arrays = [arguments[name] for name in kind.arguments]
            labels, bias = arguments.get("labels"), arguments.get("bias")
            if kind.taught:
                names_of_teacher = TEACHER_OPTIONS & options.keys()
                teacher = Teacher(
                    arguments["teacher_query"], arguments["teacher_key"],
                    **{n.removeprefix("teacher_"): options.pop(n) for n in names_of_teacher},
                )  # fmt: skip
                loss = teacher.loss
            else:
                loss, caller_arrays, loss_options = with_own(kind, caller_arrays, options)
        except Exception as error:
            if rank_options["comm"] is None and not is_started():
                raise  # no rank knows of this one yet, and MPI is not started for an error
            refusal = error  # all ranks learn of it
        return evaluate(
            loss, caller_arrays, labels, bias, loss_options, rank_options, with_grad, teacher,
            refusal,
        )  # fmt: skip

    over_ranks.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*positional, *keywords]
    )
    # the docstring
    doc = inspect.cleandoc(function.__doc__ or "")
    if pairs_views:
        doc = doc.replace(
            "\nReferences",
            "labels : integer array [rows], optional\n    Which row of all ranks is the other view "
            "of each row. Default: both views of a sample\n    are on one rank, i + B for i of its "
            "2B rows.\n\nReferences",
            1,
        )
    before_returns, returns_heading, after = doc.partition("\nReturns\n-------")
    returns, raises_heading, errors = after.partition("\nRaises\n------")
    first_sentence, _, rest = before_returns.rstrip("\n").partition("\n\n")
    rest = rest.replace("= infonce.", "= infonce.distributed.", 1)  # in the example
    over_ranks.__doc__ = (
        f"{first_sentence}\n\n{BATCH}\n\n{rest}"
        + DOC + returns_heading + returns + raises_heading + errors.rstrip("\n") + RAISES
    )  # fmt: skip
    return over_ranks


info_nce_loss = _over_ranks(single.info_nce_loss, spec.INFO_NCE, False)
info_nce_loss_and_grad = _over_ranks(single.info_nce_loss_and_grad, spec.INFO_NCE, True)
nt_xent_loss = _over_ranks(single.nt_xent_loss, spec.NT_XENT, False)
nt_xent_loss_and_grad = _over_ranks(single.nt_xent_loss_and_grad, spec.NT_XENT, True)
clip_loss = _over_ranks(single.clip_loss, spec.CLIP, False)
clip_loss_and_grad = _over_ranks(single.clip_loss_and_grad, spec.CLIP, True)
lit_loss = _over_ranks(single.lit_loss, spec.LIT, False)
lit_loss_and_grad = _over_ranks(single.lit_loss_and_grad, spec.LIT, True)
gte_loss = _over_ranks(single.gte_loss, spec.GTE, False)
gte_loss_and_grad = _over_ranks(single.gte_loss_and_grad, spec.GTE, True)
sup_con_loss = _over_ranks(single.sup_con_loss, spec.SUP_CON, False)
sup_con_loss_and_grad = _over_ranks(single.sup_con_loss_and_grad, spec.SUP_CON, True)
distill_loss = _over_ranks(single.distill_loss, DISTILL, False)
distill_loss_and_grad = _over_ranks(single.distill_loss_and_grad, DISTILL, True)
siglip_loss = _over_ranks(single.siglip_loss, spec.SIGLIP, False)
siglip_loss_and_grad = _over_ranks(single.siglip_loss_and_grad, spec.SIGLIP, True)
