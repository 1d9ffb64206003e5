"""Options and settings of drop-in replacements: each option is right for the whole loss or refused
by its name at construction, and settings are checked whenever they are set."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from option_values import option_values

torch = pytest.importorskip("torch")
import drop_ins  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from infonce.kernels.options import OPTIONS  # noqa: E402

import infonce.torch as it  # noqa: E402
from infonce import spec  # noqa: E402
from infonce.checks import keywords  # noqa: E402
from infonce.torch import colpali_engine as colpali  # noqa: E402
from infonce.torch import infonce_cuda, lightly, open_clip, sup_contrast  # noqa: E402
from infonce.torch import memory_efficient_clip as memeff  # noqa: E402
from infonce.torch import siglip_kernel as siglip  # noqa: E402

pytestmark = pytest.mark.extras
N, D = 8, 6


# --- options --------------------------------------------------------------------------------------

generator = torch.Generator().manual_seed(3)


def draw(*shape: int) -> Any:
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


A, B, OWN, LOGITS = draw(N, D), draw(N, D), draw(N, 2, D), draw(N, 3, 5)
TEACHER = draw(N, 4), draw(N, 4)
TOKENS = torch.randint(5, (N, 3), generator=generator)
VIEWS, ROW, GUIDE = torch.cat([A, B]), torch.arange(N), draw(64, 4)
UNIT = [F.normalize(z, dim=-1) for z in (A, B)]
QUERIES, PAGES = draw(N, 2, D), draw(N, 2, D)  # of two tokens
BANK = F.normalize(draw(5, D), dim=1)
EACH = {"temperature", "scale"}  # no drop-in takes the factor of its logits as an option
QWEN3 = {*EACH, "metrics", "normalize", "own", "own_indices", "false_negative_margin"}
NEGATIVES = {*OPTIONS, "in_batch"}


def of_torch(value: Any) -> Any:
    """Arrays as tensors; other values as they are."""
    if isinstance(value, tuple):
        return tuple(map(of_torch, value))
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def values(rows: int, keys: int, one: bool) -> dict[str, dict[str, Any]]:
    """Keyword -> keywords of a call with it, for a loss of `rows` and `keys`, of `one` array."""
    guide = {"guide": GUIDE[:rows] if one else (GUIDE[:rows], GUIDE[-keys:])}
    plain = option_values(rows, keys, D) | {"labels": np.arange(keys)}
    return {
        **{name: {name: of_torch(value)} for name, value in plain.items()}, "guide": guide,
        "dim_weights": {"dims": (2, D), "dim_weights": (0.5, 2.0)},
        "guide_margin": {**guide, "guide_margin": 0.5},
    }  # fmt: skip


NEUTRAL = {"method", "precision", "workspace", "offload", "check_finite", "progress", "metrics"}


@dataclass
class Row:
    """A drop-in: how it is made with options, called, and computed otherwise."""

    make: Callable[..., Any]
    call: Callable[[Any], Any]
    whole: Callable[..., Any]  # the whole loss with options
    refused: set[str]  # besides the options that the loss itself has not
    rows: int = N
    keys: int = N
    one: bool = False  # one array of features
    always: frozenset[str] = frozenset()  # options that hold in any case


def qwen3(sets: str, own: Any, **options: Any) -> Any:
    """The equation, whose options are for rows of the softmax, or for the mean over them."""
    refused = options.keys() & {*spec.TOKEN_OPTIONS, "label_weights"}
    it.info_nce_loss(A, B, temperature=0.1, **{name: options[name] for name in refused})
    rest = {name: options.pop(name) for name in ("reduction", "weights") if name in options}
    if options.pop("own_mask", None) is not None:
        own = own[:, :1]
    if options.pop("own_bias", None) is not None:
        own = torch.cat([own, own[:, 1:]], dim=1)  # the second one counts twice
    options = {name: value for name, value in options.items() if name not in NEUTRAL}
    return drop_ins.reduced(
        drop_ins.qwen3(*UNIT, F.normalize(own, dim=-1), 10.0, 0.1, sets, **options), **rest
    )


def bank_loss(**options: Any) -> Any:
    loss = lightly.NTXentLoss(0.1, (5, D), **options)
    loss.memory_bank.bank.copy_(BANK)
    return loss


def dclw(**options: Any) -> Any:
    weights = lightly.negative_mises_fisher_weights(*UNIT)
    rest = (1 - weights) * (UNIT[0] * UNIT[1]).sum(1) / 0.1
    return (
        it.nt_xent_loss(VIEWS, temperature=0.1, normalize=True, decoupled=True, **options)
        + rest.mean()
    )


def distilled(**options: Any) -> Any:
    student = it.distill_loss(A, B, *TEACHER, scale=2.0, teacher_scale=0.5, **options)
    return it.clip_loss(A, B, scale=2.0, **options) + student


def caption(**options: Any) -> Any:
    rows = F.cross_entropy(LOGITS.flatten(0, 1), TOKENS.flatten(), ignore_index=0)
    return 0.5 * it.clip_loss(A, B, scale=2.0, **options) + 2 * rows


def with_bank(**options: Any) -> Any:
    keys = torch.cat([ROW * 0, torch.ones(5, dtype=torch.long)])
    options = {"temperature": 0.1, "normalize": True, "ids": (ROW * 0, keys), **options}
    return it.info_nce_loss(A, torch.cat([B, BANK.float().double()]), **options)


def memory_efficient(name: str, **more: Any) -> Callable[..., Any]:
    loss = getattr(memeff, f"MemoryEfficient{name}Loss")
    return lambda **options: loss(temperature=0.1, stable=False, **more, **options)


TABLE = {
    "open_clip.ClipLoss": Row(
        open_clip.ClipLoss, lambda loss: loss(A, B, 2.0),
        lambda **o: it.clip_loss(A, B, scale=2.0, **o), {*EACH, "metrics"},
    ),
    "open_clip.SigLipLoss": Row(
        open_clip.SigLipLoss, lambda loss: loss(A, B, 2.0, -1.0),
        lambda **o: it.siglip_loss(A, B, -1.0, scale=2.0, **o), EACH,
    ),
    "open_clip.CoCaLoss": Row(
        lambda **o: open_clip.CoCaLoss(2.0, 0.5, **o),
        lambda loss: sum(loss(A, B, LOGITS, TOKENS, 2.0)), caption,
        {*EACH, "metrics", "reduction", "weights"},
    ),
    "open_clip.DistillClipLoss": Row(
        open_clip.DistillClipLoss, lambda loss: sum(loss(A, B, 2.0, *TEACHER, 0.5)), distilled,
        {*EACH, "metrics", *spec.SOFTMAX_OPTIONS, *spec.PREFIX_OPTIONS, "ids", "groups"},
    ),
    "lightly.NTXentLoss": Row(
        lambda **o: lightly.NTXentLoss(0.1, **o), lambda loss: loss(A, B),
        lambda **o: it.nt_xent_loss(VIEWS, temperature=0.1, **{"normalize": True, **o}),
        {*EACH, "labels"}, 2 * N, 2 * N, True, always=frozenset({"normalize"}),
    ),
    "lightly.NTXentLoss with a bank": Row(
        bank_loss, lambda loss: loss(A, B), with_bank,
        {*EACH, "ids", "guide", "guide_margin"}, N, N + 5, always=frozenset({"normalize"}),
    ),
    "lightly.DCLLoss": Row(
        lambda **o: lightly.DCLLoss(0.1, **o), lambda loss: loss(A, B),
        lambda **o: it.nt_xent_loss(
            VIEWS, temperature=0.1, **{"normalize": True, "decoupled": True, **o}
        ),
        {*EACH, "labels"}, 2 * N, 2 * N, True, always=frozenset({"normalize", "decoupled"}),
    ),
    "lightly.DCLWLoss": Row(
        lambda **o: lightly.DCLWLoss(0.1, **o), lambda loss: loss(A, B),
        lambda normalize=True, decoupled=True, **o: dclw(**o),
        {*EACH, *spec.PREFIX_OPTIONS, "labels", "reduction", "weights", "margin", "key_bias",
         "metrics"},
        2 * N, 2 * N, True, always=frozenset({"normalize", "decoupled"}),
    ),
    "infonce_cuda.InfoNCELoss": Row(
        infonce_cuda.InfoNCELoss, lambda loss: loss(VIEWS),
        lambda **o: it.nt_xent_loss(VIEWS, temperature=0.5, **o), EACH, 2 * N, 2 * N, True,
    ),
    "colpali_engine.ColbertLoss": Row(
        lambda **o: colpali.ColbertLoss(0.1, **o), lambda loss: loss(QUERIES, PAGES),
        lambda **o: it.info_nce_loss(
            QUERIES, PAGES, temperature=0.1, **{"token_mean": True, **o}
        ),
        {*EACH, "metrics", "query_mask", "token_mean"},
    ),
    "colpali_engine.ColbertSigmoidLoss": Row(
        lambda **o: colpali.ColbertSigmoidLoss(0.1, **o), lambda loss: loss(QUERIES, PAGES),
        lambda **o: it.siglip_loss(QUERIES, PAGES, 0.0, temperature=0.1, token_mean=True, **o)
        / (1 if o.get("reduction") == "sum" else N),
        {*EACH, "query_mask", "token_mean", "positive_ids"},
    ),
    "colpali_engine.ColbertNegativeCELoss": Row(
        lambda **o: colpali.ColbertNegativeCELoss(0.1, **o),
        lambda loss: loss(QUERIES, PAGES, PAGES[:, None]),
        lambda **o: math.log(2) / 2 + it.info_nce_loss(
            QUERIES, PAGES, temperature=0.1, token_mean=True, **o
        ) / 2,
        {*keywords.torch_function(spec.INFO_NCE)}
        - {"method", "workspace", "progress", "offload"},
    ),
    "colpali_engine.BiEncoderLoss": Row(
        lambda **o: colpali.BiEncoderLoss(0.1, **o), lambda loss: loss(A, B),
        lambda **o: it.info_nce_loss(A, B, temperature=0.1, **o), {*EACH, "metrics"},
    ),
    "colpali_engine.BiPairedEncoderLoss": Row(
        lambda **o: colpali.BiPairedEncoderLoss(0.1, **o), lambda loss: loss(A, B),
        lambda **o: it.clip_loss(A, B, temperature=0.1, **o), {*EACH, "metrics"},
    ),
    "colpali_engine.BiSigmoidLoss": Row(
        lambda **o: colpali.BiSigmoidLoss(0.1, **o), lambda loss: loss(A, B),
        lambda **o: it.siglip_loss(A, B, 0.0, temperature=0.1, **o)
        / (1 if o.get("reduction") == "sum" else N),
        {*EACH, "positive_ids"},
    ),
    "colpali_engine.BiNegativeCELoss": Row(
        lambda **o: colpali.BiNegativeCELoss(0.1, **o), lambda loss: loss(A, B, B[:, None]),
        lambda **o: math.log(2) / 2 + it.info_nce_loss(A, B, temperature=0.1, **o) / 2,
        {*keywords.torch_function(spec.INFO_NCE)}
        - {"method", "workspace", "progress", "offload"},
    ),
    "sup_contrast.SupConLoss": Row(
        sup_contrast.SupConLoss, lambda loss: loss(torch.stack([A, B], 1), ROW // 2),
        lambda **o: it.sup_con_loss(VIEWS, (ROW // 2).repeat(2), temperature=0.07, **o),
        {*EACH, "reduction", "weights"}, 2 * N, 2 * N, True,
    ),
    "siglip_kernel.DistributedSigLIPLoss": Row(
        siglip.DistributedSigLIPLoss, lambda loss: loss(A, B, 2.0, -1.0),
        lambda **o: it.siglip_loss(A, B, -1.0, scale=2.0, **o), EACH,
    ),
    "siglip_kernel.SigLIPPlusLoss": Row(
        lambda **o: siglip.SigLIPPlusLoss(0.5, **o).double(),
        lambda loss: loss((A, B), ROW // 3, ROW // 3)["total_loss"],
        lambda **o: it.siglip_loss(
            A, B, 0.0, scale=2.0, positive_ids=ROW // 3, **{"normalize": True, **o}
        ) / (1 if o.get("reduction") == "sum" else N),
        {*EACH, "positive_ids"}, always=frozenset({"normalize"}),
    ),
    "memory_efficient_clip: CLIP": Row(
        memory_efficient("CLIP"), lambda loss: loss(A, B),
        lambda **o: it.clip_loss(A, B, temperature=0.1, normalize=True, **o),
        {*EACH, "metrics", "normalize"},
    ),
    "memory_efficient_clip: LiT": Row(
        memory_efficient("LiT"), lambda loss: loss(A, B),
        lambda **o: it.lit_loss(A, B, temperature=0.1, normalize=True, **o),
        {*EACH, "metrics", "normalize"},
    ),
    "memory_efficient_clip: prefixes": Row(
        memory_efficient("MatryoshkaCLIP", dims=(3, D)), lambda loss: loss(A, B),
        lambda **o: sum(it.clip_loss(A[:, :d], B[:, :d], temperature=0.1, normalize=True, **o)
                        for d in (3, D)),
        {*EACH, "metrics", "normalize"},
    ),
    "memory_efficient_clip: Qwen3": Row(
        memory_efficient("Qwen3"), lambda loss: loss(A, B, OWN),
        lambda **o: it.info_nce_loss(A, B, own=OWN, temperature=0.1, normalize=True,
                                     false_negative_margin=0.1, **o),
        QWEN3,
    ),
    "memory_efficient_clip: Qwen3 with queries and documents": Row(
        memory_efficient("Qwen3", use_qq_negatives=True, use_dd_negatives=True),
        lambda loss: loss(A, B, OWN), lambda **o: qwen3("qd", OWN, **o),
        {*QWEN3, *NEGATIVES, *spec.PREFIX_OPTIONS},
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:norms of rows")
@pytest.mark.parametrize("name", TABLE)
def test_options_are_right_for_the_whole_loss_or_refused(name: str) -> None:
    row = TABLE[name]
    plain, loss = row.make(), None
    kind = plain.kind
    settings = {*plain._settings, *inspect.signature(type(plain)).parameters}
    every = values(row.rows, row.keys, row.one)
    # every keyword of the functions is in the table, and those over processes are tested there
    assert {*every} >= {*keywords.torch_function(kind)} - {*keywords.GROUP} - {"in_batch"}
    without = row.call(plain)
    for keyword, options in every.items():
        if not settings.isdisjoint(options) or (keyword == "labels" and kind is not spec.NT_XENT):
            continue
        if keyword in row.refused or keyword in kind.refused:
            first = next(iter(options))  # of `dims` and `dim_weights`, `guide` and `guide_margin`
            with pytest.raises(ValueError, match=f"^({keyword}|{first}): expected .*, got "):
                row.make(**options)
            continue
        try:
            whole: Any = row.whole(**options)
        except (TypeError, ValueError) as error:  # the function refuses it with this loss
            with pytest.raises(type(error), match=f"^{str(error)[:12]}"):
                row.call(row.make(**options))
            continue
        loss = row.call(row.make(**options))
        if keyword == "metrics":
            loss, whole = loss[0], whole[0]
        torch.testing.assert_close(loss, whole, msg=lambda text, k=keyword: f"{k}: {text}")
        is_same = loss.shape == without.shape and torch.allclose(loss, without, rtol=1e-12)
        assert is_same == (keyword in NEUTRAL | row.always), keyword
    assert loss is not None


# --- settings -------------------------------------------------------------------------------------

IDS = {"img_gid": ROW, "txt_gid": ROW}
CHANGES = {  # a setting: its loss, a value that no constructor takes, the error
    "use_horovod": (open_clip.ClipLoss, True, "use_horovod: expected False, got True"),
    "contrast_mode": (sup_contrast.SupConLoss, "two", 'contrast_mode: expected "all" or "one"'),
    "strategy": (siglip.DistributedSigLIPLoss, "star", 'strategy: expected "ring", "gather" or'),
    "symmetric": (siglip.SigLIPPlusLoss, False, "symmetric: expected True, got False"),
    "soft_weighting": (siglip.SigLIPPlusLoss, False, "soft_weighting: expected True, got False"),
    "soft_label": (siglip.DistributedSigLIPPlusLoss, True, "soft_label: expected False, got True"),
    "use_smooth_max": (colpali.ColbertLoss, True, "use_smooth_max: expected False, got True"),
    "pos_aware_negative_filtering": (colpali.BiSigmoidLoss, True, "pos_aware_negative_filtering: "
                                     "expected False, got True"),
    "temperature": (colpali.BiEncoderLoss, 0.0, r"temperature: expected a positive .* got 0\.0"),
    "in_batch_term_weight": (colpali.BiNegativeCELoss, 1.5, r"in_batch_term_weight: expected a "
                             r"number in \[0, 1\], got"),
    "tau_plus": (memeff.MemoryEfficientCLIPLoss, 0.1, "tau_plus: expected 0.0, got 0.1"),
    "group": (memeff.MemoryEfficientLiTLoss, object(), "group: expected None, got object"),
    "margin": (memeff.MemoryEfficientQwen3Loss, float("nan"), "margin: expected a finite number"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_settings_are_checked_whenever_they_are_set(name: str) -> None:
    make, value, match = CHANGES[name]
    loss = make()
    with pytest.raises(ValueError, match=match):
        setattr(loss, name, value)
    with pytest.raises(ValueError, match=match):
        make(**{name: value})


def test_settings_that_are_checked_at_the_call() -> None:
    """Those that are right together, and options that a setting excludes."""
    distributed, clip, late = (
        make() for make in (siglip.DistributedSigLIPLoss, open_clip.ClipLoss, open_clip.ClipLoss)
    )
    distributed.world_size = clip.world_size = 2
    late.rank = late.world_size = 2
    plus = siglip.DistributedSigLIPPlusLoss(rank=1, world_size=2).double()
    distill = open_clip.DistillClipLoss(world_size=2)
    dcl = lightly.DCLLoss(0.1, reduction="sum")
    dcl.weight_fn = lightly.negative_mises_fisher_weights
    qwen3, wrapped = memeff.MemoryEfficientQwen3Loss(ids=ROW), memeff.MemoryEfficientCLIPLoss()
    qwen3.use_qq_negatives = True
    prefixes = memeff.MatryoshkaLoss(wrapped, [2])
    wrapped.normalized_inputs = True
    uninitialised = r"group: expected torch\.distributed to be initialised"
    place, group = "expected 0 <= rank < world_size, got 2 and 2", "group: expected None, got .*: "
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: distributed(A, B, 1.0), uninitialised), (lambda: clip(A, B, 1.0), uninitialised),
        (lambda: plus((A, B), img_gid=ROW, txt_gid=ROW), uninitialised),
        (lambda: distill(A, B, 1.0, *TEACHER, 1.0), uninitialised),
        (lambda: late(A, B, 1.0), place),
        (lambda: dcl(A, B), "reduction: expected 'mean', got 'sum': weight_fn"),
        (lambda: qwen3(A, B), r"ids: expected None, got Tensor .*: it has no values"),
        (lambda: prefixes(A, B), r"base_loss\.normalized_inputs: expected False, got True"),
        (lambda: lightly.NTXentLoss(0.1, 4, group=object()), f"{group}the negatives are the r"),
        (lambda: sup_contrast.SupConLoss(group=object()), f"{group}labels are those of t"),
    ]  # fmt: skip
    for make in (siglip.DistributedSigLIPLoss, siglip.DistributedSigLIPPlusLoss):
        calls += [
            (lambda make=make: make(rank=2, world_size=2), place),
            (lambda make=make: make(group=object()), f"{group}pass process_group"),
        ]
    for call, match in calls:
        with pytest.raises((RuntimeError, ValueError), match=match):
            call()
    local = siglip.DistributedSigLIPLoss(strategy="local", world_size=2)
    torch.testing.assert_close(local(A, B, 1.0), it.siglip_loss(A, B, 0.0, scale=1.0))


@pytest.mark.filterwarnings("ignore")  # of the project
def test_gist_checks_the_margin_at_each_call() -> None:
    pytest.importorskip("sentence_transformers")
    from infonce.torch.sentence_transformers import gist

    settings = SimpleNamespace(temperature=0.1, margin_strategy="relative", margin=0.1)
    with pytest.raises(ValueError, match='margin_strategy: expected "absolute" with a margin'):
        gist.guided_loss(settings, UNIT, TEACHER)


# --- arguments ------------------------------------------------------------------------------------


def test_shapes_that_pytorch_would_broadcast() -> None:
    loss = memeff.MemoryEfficientQwen3Loss()
    for own in (OWN[:1], OWN[:, :, :1], OWN[0], A[0]):
        with pytest.raises(ValueError, match=r"hard_negative_features: expected shape \(8, .*6\)"):
            loss(A, B, own)
    with pytest.raises(ValueError, match=r"doc_features: expected shape \(8, 6\), got \(1, 6\)"):
        loss(A, B[:1])
    torch.testing.assert_close(loss(A, B, OWN[:, :0]), loss(A, B))
    for two_views in (lightly.NTXentLoss(), lightly.NTXentLoss(0.1, 4), lightly.DCLLoss()):
        with pytest.raises(ValueError, match=r"out1: expected shape \(8, 6\), got \(6, 6\)"):
            two_views(A, B[:6])
