"""The softmax of a row by definition: loops over pairs, in any number type, without a shift."""

import numpy as np


def kept_keys(i, positives, columns, ids, groups, itself_too=True):
    """Keys that query i is compared with."""
    kept = []
    for j in range(columns):
        if j == i and not itself_too:
            continue
        if j not in positives and ids[0] is not None and ids[0][i] == ids[1][j]:
            continue
        if j not in positives and groups[0] is not None and groups[0][i] != groups[1][j]:
            continue
        kept.append(j)
    return kept


def row_by_definition(
    dot,
    positives,
    kept,
    *,
    scale,
    margin=0.0,
    decoupled=False,
    label_smoothing=0.0,
    hardness=0.0,
    key_bias=None,
    false_negative_margin=None,
    guide_dot=None,
    guide_margin=0.0,
):
    """Loss and log-sum-exp of one row, from its products with the kept keys: log sum exp, less the
    mean over the targets. What is not differentiated is real."""
    if positives and false_negative_margin is not None:
        limit = max(dot[p].real for p in positives) + false_negative_margin
        kept = [j for j in kept if j in positives or dot[j].real <= limit]
    if positives and guide_dot is not None:
        limit = max(guide_dot[p] for p in positives) + guide_margin
        kept = [j for j in kept if j in positives or guide_dot[j] <= limit]
    x, total, target = {}, 0.0, {}
    for j in kept:
        x[j] = scale * (dot[j] - margin * (j in positives))
        if key_bias is not None:
            x[j] = x[j] + key_bias[j]
        if j in positives:
            total = total + (0 if decoupled else np.exp(x[j]))
            target[j] = (1 - label_smoothing) / len(positives) + label_smoothing / len(kept)
        else:
            total = total + np.exp(hardness * dot[j].real) * np.exp(x[j])
            target[j] = label_smoothing / len(kept)
    with np.errstate(divide="ignore"):
        lse = np.log(total)  # -inf where nothing takes part
    return (lse - sum(target[j] * x[j] for j in kept) if positives else 0.0), lse


def rows_by_definition(dot, positives, ids, groups, itself_too=True, guide_dot=None, **options):
    """Row by row."""
    rows = [
        row_by_definition(
            dot[i], positive_keys,
            kept_keys(i, positive_keys, len(dot[i]), ids, groups, itself_too),
            guide_dot=None if guide_dot is None else guide_dot[i], **options,
        )
        for i, positive_keys in enumerate(positives)
    ]  # fmt: skip
    losses, lse = zip(*rows, strict=True)
    return np.array(losses), np.array(lse)


def four_comparisons(q, k, i, others):
    """The positive pair of row i, then four pairs for each other row."""
    yield q[i], k[i]
    for j in others:
        yield from ((q[i], k[j]), (q[j], k[i]), (q[i], q[j]), (k[i], k[j]))


def unit(z):
    """Rows divided by their norms."""
    return z / np.sqrt((z * z).sum(axis=1, keepdims=True))


def gte_by_definition(q, k, ids, groups, guide=None, **options):
    """Four comparisons for each pair."""
    ids = range(len(q)) if ids is None else ids
    groups = [0] * len(q) if groups is None else groups
    rows = []
    for i in range(len(q)):
        others = [j for j in range(len(q)) if ids[j] != ids[i] and groups[j] == groups[i]]
        dots, guide_dot = (
            None if of is None else [(a * b).sum() for a, b in four_comparisons(*of, i, others)]
            for of in ((q, k), guide)
        )
        kept = range(len(dots))
        rows.append(row_by_definition(dots, {0}, kept, guide_dot=guide_dot, **options))
    losses, lse = zip(*rows, strict=True)
    return np.array(losses), np.array(lse)
