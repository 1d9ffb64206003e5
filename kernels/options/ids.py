"""`ids`: pairs of equal ids are left out, except for positives."""

from .base import INTEGERS, PairOption, VectorPair

IDS = PairOption(
    None,
    INTEGERS,
    """Names of the samples: pairs of equal ids that are not positives are left out, so that
        duplicates are no negatives. Any integer dtype: 64-bit hashes are compared as they are.""",
    cli_help="Pairs of equal ids are no negatives, .npy; one file or two: of rows, of columns.",
    name="ids",
    vectors=(VectorPair("query_ids", "key_ids"),),
    equal=True,
    changes_logits=False,
)
