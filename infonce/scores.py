"""`maxsim_scores`: the scores of late interaction alone, for evaluation."""

from __future__ import annotations

from typing import Any

from . import arrays, dispatch
from .checks import tokens, validation
from .kernels.problem import WORKSPACE, Array, Problem
from .spec import CHOICES


def maxsim_scores(
    query: Array, key: Array, *, query_mask: Array | None = None, key_mask: Array | None = None,
    token_mean: bool = False, normalize: bool = False, precision: str = "auto",
    workspace: int | str | None = None,
) -> Array:  # fmt: skip
    """MaxSim scores of all pairs of queries and keys, which are sets of token vectors.

    >>> scores = infonce.maxsim_scores(query, key, key_mask=mask)  # [M, N]
    >>> best = scores.argmax(axis=1)

    ``s_ij = sum_a max_b <q_ia, k_jb>`` over the tokens that count: each token of the query takes
    its largest product with a token of the key. The losses `info_nce_loss`, `clip_loss`,
    `lit_loss` and `siglip_loss` take features of three dimensions as such sets, and s in place of
    dot products. Products of tokens are computed in tiles: memory is that of the scores.

    Parameters
    ----------
    query : array [M, L, D]
    key : array [N, K, D]
    query_mask : bool array [M, L], optional
        Tokens of queries that count; others are not read. A query without tokens has scores of 0.
    key_mask : bool array [N, K], optional
        Tokens of keys that count; others are not read. Each key needs one.
    token_mean : bool
        Divide scores by the number of the query's tokens.
    normalize : bool
        Divide tokens by their L2 norm first.
    precision : str
        Of the products, as in `clip_loss`.
    workspace : int or str, optional
        Upper limit of temporary memory, 256 MiB by default.

    Returns
    -------
    array [M, N]
        float64 for products in float64, otherwise float32; of the library of `query`, without a
        gradient.

    Raises
    ------
    TypeError, ValueError
        Before any work, naming the argument, what came and what was expected.

    References
    ----------
    Khattab, Zaharia: ColBERT: Efficient and Effective Passage Search via Contextualized Late
    Interaction over BERT, SIGIR 2020, equation 3.
    """
    names = ("query", "key")
    options = {"query_mask": query_mask, "key_mask": key_mask, "token_mean": token_mean}
    for name, value in (("token_mean", token_mean), ("normalize", normalize)):
        validation.flag(name, value)
    validation.choice("precision", precision, CHOICES["precision"])
    with arrays.use_caller_stream(query):
        features = arrays.natives((query, key), names)
        with arrays.compute_context(features[0]):
            descriptions = arrays.describe_arrays(features)
            validation.features(names, features, descriptions, 1, may_have_tokens=True)
            if features[0].ndim != 3:
                raise ValueError(
                    "query: expected 3 dimensions [rows, tokens, features], got shape "
                    f"{features[0].shape}"
                )
            xp, on_gpu = arrays.namespace(features[0]), arrays.on_gpu(features[0])
            sides = tokens.make(xp, features, options)
            tokens.require_width(*sides)
            dtypes = {z.dtype.name for z in features}
            problem = Problem(
                *sides, scale=1.0, upstream=1.0, normalize=normalize,
                compute_precision=validation.precision(precision, dtypes, not on_gpu, True),
                workspace=validation.workspace(workspace) or WORKSPACE,
            )  # fmt: skip
            result: Any = dispatch.backend(False, on_gpu, True).scores(problem)
            arrays.keep_until_read(features[0], query, key, query_mask, key_mask)
            return arrays.converter_to(query)(result)
