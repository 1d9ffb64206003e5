"""`ids`: pairs of equal ids are left out, except for positives.

Ids may have several columns, such as the user and the item of a sample: a pair is left out if its
ids are equal in any column. Kernels compare a fixed number of columns, the value of -DIDS.
"""

from .base import INTEGERS, PairOption, VectorPair

# The most columns. A sweep keeps the ids of a tile's keys in shared memory (gpu/config/sweep.py).
# With more columns, the longest rows that it keeps there would leave less than two stages
MOST_COLUMNS = 4

IDS = PairOption(
    None,
    INTEGERS,
    """Names of the samples: pairs of equal ids that are not positives are left out, so that
        duplicates are no negatives. Ids of several columns, [N, C] with C up to 4, are several
        criteria, such as the user and the item: equality in one column suffices. Any integer dtype:
        64-bit hashes are compared as they are. Several columns not with `label_smoothing`.""",
    cli_help="Pairs of equal ids are no negatives, .npy; one file or two: of rows, of columns.",
    name="ids",
    vectors=(VectorPair("query_ids", "key_ids"),),
    equal=True,
    changes_logits=False,
)
