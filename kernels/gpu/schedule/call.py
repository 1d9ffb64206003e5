"""The description of a call on a GPU: all facts on which its schedule depends, and no arrays."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from ...distill.problem import TaughtProblem
from ...epilogues import RetrievalRanks, Sigmoid, SoftmaxGradient, Statistics
from ...options import (
    FALSE_NEGATIVE_MARGIN,
    IDS,
    NO_OPTIONS,
    POSITIVE_IDS,
    GivenOptions,
    PairOption,
)
from ...problem import WORKSPACE, Array, Gradients, Problem
from .. import config

ITEM = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # dtype -> bytes of an element


class LossForm(Enum):
    """The softmaxes or the sigmoid of a loss, which decide the sums that passes compute."""

    ROWS = "a softmax over the keys of each query"  # info_nce, lit
    BOTH = "a softmax over the keys of each query, and one over the queries of each key"  # clip
    # nt_xent, sup_con, gte: rows are views of samples, and each view is a query and a key
    VIEWS = "a softmax over all other views: queries are keys"
    PAIRS = "a sigmoid of each pair"  # siglip


class Purpose(Enum):
    """The results that a pass computes."""

    STATISTICS = "log-sum-exp"
    RETRIEVAL_RANKS = "ranks"  # retrieval ranks
    GRADIENT = "gradient"
    ONE_PASS = "log-sum-exp and gradient"
    SIGMOID = "sigmoid loss"
    DISTILLATION = "distillation"


@dataclass(frozen=True)
class Matrix:
    """The shape, dtype and strides of features, or of their gradients."""

    rows: int
    columns: int
    dtype: str
    row_stride: int  # bytes from a row to the next row
    column_stride: int  # bytes from an element to the next element of its row
    offset: int = 0  # the address modulo 16

    @staticmethod
    def packed(rows: int, columns: int, dtype: str) -> Matrix:
        """The description of a matrix without gaps, at a multiple of 16 bytes."""
        return Matrix(rows, columns, dtype, columns * ITEM[dtype], ITEM[dtype])

    @staticmethod
    def from_array(array: Array) -> Matrix:
        """The description of an array on a GPU."""
        (rows, columns), (row_stride, column_stride) = array.shape, array.strides
        offset = array.data.ptr % 16
        return Matrix(rows, columns, array.dtype.name, row_stride, column_stride, offset)

    @property
    def row_bytes(self) -> int:
        """Bytes of the elements of a row, without gaps."""
        return self.columns * ITEM[self.dtype]

    @property
    def has_aligned_rows(self) -> bool:
        """Whether each row begins at a multiple of 16 bytes, and rows do not overlap."""
        aligned = self.row_stride % 16 == 0 and self.offset == 0
        return aligned and self.row_stride >= self.row_bytes

    @property
    def is_contiguous(self) -> bool:
        rows_follow = self.rows == 1 or self.row_stride == self.row_bytes
        return rows_follow and (self.columns == 1 or self.column_stride == ITEM[self.dtype])


@dataclass(frozen=True)
class BlockPass:
    """A pass over one block of a call over ranks: this rank's queries and some rank's keys."""

    purpose: Purpose | None  # None: a question about features (`BlockQuestion`), and no pass
    triangle: bool = False  # queries are keys, and each pair is visited once
    column_sums: bool = False  # columns have a softmax, or retrieval ranks
    accumulates: bool = False  # the pass, or a later pass of the call, adds to gradients

    @staticmethod
    def from_epilogue(epilogue: Any, triangle: bool, accumulates: bool) -> BlockPass:
        """The description of the pass with an epilogue, or of a question."""
        match epilogue:
            case Statistics():
                return BlockPass(Purpose.STATISTICS, triangle, epilogue.columns is not None)
            case RetrievalRanks():
                return BlockPass(
                    Purpose.RETRIEVAL_RANKS, triangle, epilogue.column_rank is not None
                )
            case SoftmaxGradient():
                two_sided = epilogue.column_reference is not None
                return BlockPass(Purpose.GRADIENT, triangle, two_sided, accumulates)
            case Sigmoid():
                return BlockPass(Purpose.SIGMOID, triangle, accumulates=accumulates)
        return BlockPass(None)


@dataclass(frozen=True)
class Call:
    """All facts about a call that its schedule depends on; equal calls have equal schedules.

    Fields have the names of the fields of `Problem`. A bool says whether the call has the option.
    """

    loss: LossForm
    query: Matrix
    key: Matrix
    query_gradient: Matrix | None = None  # the destination of dQ; None: not wanted
    key_gradient: Matrix | None = None  # the destination of dK
    compute_precision: str = "fp32"  # resolved precision of products and exponentials: no "auto"
    method: str = "auto"
    workspace: int = WORKSPACE  # bytes
    workspace_given: bool = True  # False: `workspace` is the default, which a call may exceed
    normalize: bool = False
    pairs: GivenOptions = NO_OPTIONS  # options of pairs
    id_columns: int = 1  # columns of ids, if `pairs` has ids
    # names of the vectors of rows (`VectorPair.query`) that the call has: biases, if queries are
    # keys of a softmax, and limits of a block over ranks, which are known before the call
    row_vectors: tuple[str, ...] = ()
    host_groups: bool = False  # the host knows groups: blocks without a common one are left out
    own: int = 0  # own negatives of each row
    table_rows: int = 0  # rows of the table that has the own negatives; 0: there is none
    set_size: int = 1  # positives of each query
    guide_query: Matrix | None = None  # features of the guide; None: the call has no guide
    guide_key: Matrix | None = None
    teacher_query: Matrix | None = None  # features of the teacher; None: the call has no teacher
    teacher_key: Matrix | None = None
    row_loss_options: bool = False  # margin, decoupled or hardness: options of the loss of a row
    # weights of the caller, and 0 for rows without a positive. `select.solve` leaves them out for
    # kernels, which find them in the upstream gradient
    weights: bool = False
    smoothing: bool = False  # label smoothing
    classes: bool = False  # the positives of a row are all others of its class
    max_class_sums: int = 0  # most classes whose features are summed
    joint: bool = False  # rows i and i + B of 2B have one softmax
    retrieval_ranks: bool = False
    moments: bool = False  # sums have first moments, from which the gradient of the scale follows
    joint_copy_bytes: int = 0  # bytes of the workspace for the copies that a joint loss makes
    adds_query: bool = False  # dQ is added to its destination, which is not overwritten
    block: BlockPass | None = None  # None: all passes of a whole call
    portable: bool = False  # no sweeps: a later pass multiplies these features by portable kernels

    @staticmethod
    def from_problem(
        problem: Problem, gradients: Gradients | None, block: BlockPass | None = None
    ) -> Call:  # fmt: skip
        """The description of a problem whose arrays are on a GPU."""
        query, key = Matrix.from_array(problem.query), Matrix.from_array(problem.key)
        dq = dk = None
        if gradients is not None:
            dq, dk = map(_describe_matrix, (gradients.query, gradients.key))
            if dq is None and gradients.want_query:  # a later pass will add to dQ in float32
                m, _, d = problem.shape
                dq = Matrix.packed(m, d, "float32")
        teacher: tuple[Array, Array] = (None, None)
        if isinstance(problem, TaughtProblem):
            teacher = problem.teacher_query, problem.teacher_key
        classes = problem.classes
        sums = None if classes is None else classes.in_sums
        pairs = problem.pair_options
        row_vectors = tuple(
            vector.query for vector in pairs.vectors if vector.find(problem)[0] is not None
        )
        return Call(
            _find_loss(problem), query, key, dq, dk,
            problem.compute_precision, problem.method, problem.workspace, problem.workspace_given,
            problem.normalize, pairs, max(1, problem.id_columns), row_vectors,
            problem.host_groups is not None,
            problem.own_count, 0 if problem.own_indices is None else len(problem.own),
            problem.set_size,
            _describe_matrix(problem.guide_query), _describe_matrix(problem.guide_key),
            _describe_matrix(teacher[0]), _describe_matrix(teacher[1]),
            bool(problem.margin or problem.decoupled or problem.hardness),
            problem.weights is not None, problem.label_smoothing != 0.0, classes is not None,
            0 if sums is None else sums.count, problem.joint, problem.retrieval_ranks,
            problem.moments, problem.joint_copy_bytes,
            gradients is not None and gradients.add_query, block,
        )  # fmt: skip

    @property
    def shape(self) -> tuple[int, int, int]:
        """(queries M, keys N, features D)."""
        return self.query.rows, self.key.rows, self.query.columns

    @property
    def widest(self) -> int:
        """Features of a row of queries, or of the teacher's if that is longer."""
        return max(z.columns for z in (self.query, self.teacher_query) if z is not None)

    @property
    def symmetric(self) -> bool:
        """Whether queries are keys."""
        return self.loss is LossForm.VIEWS

    @property
    def two_sided(self) -> bool:
        """Whether rows and columns have a softmax, and queries are not keys."""
        return self.loss is LossForm.BOTH

    @property
    def gradient(self) -> bool:
        """Whether gradients of features are wanted."""
        return self.query_gradient is not None or self.key_gradient is not None

    @property
    def guided(self) -> bool:
        return self.guide_query is not None

    @property
    def taught(self) -> bool:
        return self.teacher_query is not None

    @property
    def guide_call(self) -> Call:
        """The guide's features as a call, whose dot products are compared with limits.

        Its precision is that of this call, unless the guide's features have another dtype.
        """
        assert self.guide_query is not None
        assert self.guide_key is not None
        compute = self.compute_precision
        if compute != "fp64" and self.guide_query.dtype != self.query.dtype:
            compute = "fp32"  # is accurate for features of all dtypes but float64
        return Call(
            self.loss, self.guide_query, self.guide_key, compute_precision=compute,
            normalize=self.normalize, pairs=GivenOptions([FALSE_NEGATIVE_MARGIN]),
        )  # fmt: skip

    @property
    def ids(self) -> int:
        """The number of columns of ids; 0: the call has no ids."""
        return self.id_columns if IDS in self.pairs else 0

    @property
    def pair_options(self) -> int:
        """The number of options of pairs that the call has, without ids."""
        return len(self.pairs) - (self.ids > 0)

    @property
    def integer_count(self) -> int:
        """Integers (8 bytes) of a row or column for options of pairs, without its first id."""
        more_ids = max(0, self.ids - 1)
        return more_ids + sum(vector.unit == "integers" for vector in self.pairs.vectors)

    @property
    def real_count(self) -> int:
        """Real numbers of a row or column for options of pairs. A softmax has no factors."""
        others = ("", "integers") if self.loss is LossForm.PAIRS else ("", "integers", "factors")
        return sum(vector.unit not in others for vector in self.pairs.vectors)

    @property
    def limits_given(self) -> bool:
        """Whether vectors with which dot products are compared are known before the call."""
        compared = [option.vectors[0].query for option in self.pairs.by_products]
        return any(name in self.row_vectors for name in compared)

    def pair_defines(self, columns: int) -> dict[str, int]:
        """The -D options of kernels for `pair_options`; `columns`: 1 if columns have a softmax.

        An option is 2 if it also has another decision, or another number, for the softmax of the
        column.
        """

        def level(option: PairOption) -> int:
            for_columns = columns if option.splits else option.vectors[0].query in self.row_vectors
            return 2 if for_columns and (option.splits or option.shifts) else 1

        defines = {option.define: level(option) for option in self.pairs if option.define}
        if POSITIVE_IDS in self.pairs and self.loss is LossForm.PAIRS:
            defines["PAIR_WEIGHTS"] = 1
        return defines

    @property
    def own_memory(self) -> dict[str, int]:
        """Bytes of each array that own negatives keep between the passes."""
        real = 8 if self.compute_precision == "fp64" else 4
        table = (self.table_rows, self.query.columns) if self.table_rows else (0, 0)
        return config.own_parts(self.query.rows, self.own, real, self.normalize, table)

    @property
    def linear_terms(self) -> bool:
        """Whether sums of features give a part of the loss."""
        return self.smoothing or self.classes

    @property
    def plain(self) -> bool:
        """Whether each row has one positive, and the softmax has no options but `ids`.

        That is: no other `pair_options`; no margin, decoupled, hardness (`row_loss_options`); no
        weights, own negatives, label smoothing, classes or joint rows.
        """
        options = self.pair_options or self.row_loss_options or self.weights
        options = options or self.own or self.linear_terms or self.joint
        return not (options or self.set_size > 1)

    @property
    def loss_follows_from_row_sums(self) -> bool:
        """Whether the loss and dQ follow from sums of rows only, so that one pass is enough.

        That is: there is one softmax, over keys; there are no retrieval ranks, joint rows or
        teacher; margin, decoupled, hardness, label smoothing and classes are not combined with
        options of pairs (`pair_options`); label smoothing neither with ids nor with several
        positives; and classes have sums.
        """
        of_rows = self.row_loss_options or self.linear_terms
        options = self.joint or self.taught or (of_rows and self.pair_options)
        smoothed = self.smoothing and (self.ids or self.set_size > 1)
        without_sums = self.classes and not self.max_class_sums
        others = options or smoothed or without_sums
        return self.loss is LossForm.ROWS and not (self.retrieval_ranks or others)


def _describe_matrix(array: Array | None) -> Matrix | None:
    return None if array is None else Matrix.from_array(array)


def _find_loss(problem: Problem) -> LossForm:
    if problem.bias is not None:
        return LossForm.PAIRS
    if problem.symmetric:
        return LossForm.VIEWS
    return LossForm.BOTH if problem.two_sided else LossForm.ROWS
