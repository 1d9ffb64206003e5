"""`groups`: pairs of different groups are left out, except for positives.

kernels/grid.py leaves out whole blocks without a common group, and kernels/linear.py gives each
group a mean of its own for label smoothing.
"""

from .base import INTEGERS, PairOption, VectorPair

GROUPS = PairOption(
    None,
    INTEGERS,
    """Groups of the samples, such as the task or the language: pairs of different groups that
        are not positives are left out. Blocks without a common group are not computed, if samples
        are sorted by their groups; on a GPU, if groups are in host memory. Not with
        `label_smoothing` and `ids` together.""",
    cli_help="Pairs of different groups are no negatives, .npy; one file or two, as --ids.",
    name="groups",
    vectors=(VectorPair("query_groups", "key_groups", "integers"),),
    define="GROUPS",
    equal=False,
)
