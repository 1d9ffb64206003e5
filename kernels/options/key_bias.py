"""`key_bias`: a number of each key, which is added to its logits."""

from .base import PairOption, VectorPair

KEY_BIAS = PairOption(
    None,
    "float array [N], optional",
    """Bias of each key, added to its logits in the rows' softmax, positives included: pass
        -log Q_j for keys that were sampled with probability Q_j. The bias gets no gradient. In the
        gradient of the scale, the bias is part of the probabilities, and not of the logits. Not
        with ``metrics=True``.""",
    cli_help="Added to the logits of each key, .npy.",
    name="key_bias",
    vectors=(VectorPair("query_bias", "key_bias", "logits", "row_bias", "column_bias"),),
    define="BIAS",
    shifts=True,
)
