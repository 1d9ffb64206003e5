"""Drop-in replacements for sentence_transformers' losses `MultipleNegativesRankingLoss`,
`GISTEmbedLoss`, and the same with gradient caching.

They are subclasses: constructors, settings, encoding and gradient caching are those of the
installed sentence-transformers. The loss of the embeddings is computed here, in memory linear in
the batch. What differs: the loss is float32 (float64 for float64 embeddings); `similarity_fct` is
cos_sim or dot_score; with `gather_across_devices` the loss is that of all processes' rows, whose
numbers may differ. The `MatryoshkaLoss` of sentence-transformers takes these losses.
"""

from .cached import CachedMultipleNegativesRankingLoss
from .gist import CachedGISTEmbedLoss, GISTEmbedLoss
from .ranking import MultipleNegativesRankingLoss

__all__ = [
    "CachedGISTEmbedLoss",
    "CachedMultipleNegativesRankingLoss",
    "GISTEmbedLoss",
    "MultipleNegativesRankingLoss",
]
