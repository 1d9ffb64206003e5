"""For tests of infonce.torch: features, calls, the published formulas of the losses in PyTorch,
and trainings with another project's loss."""

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

import infonce.torch as it  # noqa: E402
from infonce import spec  # noqa: E402

MODULES = {"clip": it.CLIPLoss, "gte": it.GTELoss, "info_nce": it.InfoNCELoss,
           "lit": it.LiTLoss, "nt_xent": it.NTXentLoss, "siglip": it.SigLIPLoss,
           "sup_con": it.SupConLoss}  # fmt: skip
LOSSES = list(MODULES)
STEPS = 6  # steps of a training with another project's loss
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="this torch sees no GPU"),
        ],
    ),
]


def features(loss: str, rows: int = 12, dim: int = 5, device: str = "cpu", **options: Any) -> Any:
    generator = torch.Generator().manual_seed(rows)
    options = {"dtype": torch.float64, "generator": generator, **options}
    sides = [torch.randn(rows, dim, **options) for _ in spec.LOSSES[loss].arguments]
    return [F.normalize(z, dim=1).to(device).requires_grad_() for z in sides]


def classes(rows: int, device: Any = "cpu") -> Any:
    """Labels of sup_con [rows]: four classes; -1 for rows of no class; and the last row has a class
    of its own, so it has no positive."""
    labels = torch.arange(rows, device=device) % 5 - 1
    labels[-1] = 99
    return labels


def formula(loss: str, z: Any, scale: Any, bias: Any = -10.0) -> Any:
    """The loss of features `z` by its published formula, over the whole matrix of logits x."""
    if loss == "gte":  # logits of all pairs of the 2B rows
        z = [torch.cat(z), torch.cat(z)]
    x = scale * z[0] @ z[-1].T
    n = len(x)
    y = torch.arange(n, device=x.device)
    if loss in ("nt_xent", "sup_con", "gte"):
        x = x.masked_fill(torch.eye(n, dtype=torch.bool, device=x.device), -torch.inf)
    if loss == "nt_xent":
        return F.cross_entropy(x, (y + n // 2) % n)
    if loss == "sup_con":
        labels = classes(n, x.device)
        same = (labels[:, None] == labels) & (labels >= 0)
        same.fill_diagonal_(False)
        positive = x.masked_fill(~same, 0).sum(1) / same.sum(1).clamp(min=1)
        return (x.logsumexp(1) - positive)[same.any(1)].mean()
    if loss == "gte":  # a softmax for each pair of rows, in which the logit of the pair is once
        half = n // 2
        positive = x.diagonal(half)
        negatives = x.masked_fill((y[:, None] - y).abs() == half, -torch.inf).logsumexp(1)
        terms = torch.stack([positive, negatives[:half], negatives[half:]])
        return (terms.logsumexp(0) - positive).mean()
    if loss == "siglip":
        t = 2 * torch.eye(n, dtype=x.dtype, device=x.device) - 1
        return -F.logsigmoid(t * (x + bias)).sum() / n
    if loss == "clip":
        return (F.cross_entropy(x, y) + F.cross_entropy(x.T, y)) / 2
    return F.cross_entropy(x, y)


def arguments(loss: str, z: Any) -> tuple[Any, ...]:
    """The positional arguments of a loss: features, and for sup_con its required labels."""
    return (*z, classes(len(z[0]), z[0].device)) if loss == "sup_con" else (*z,)


def call(loss: str, z: Any, **options: Any) -> Any:
    return getattr(it, f"{loss}_loss")(*arguments(loss, z), **options)


FORMS = ["function", "module"]


def with_options(form: str, loss: str, **options: Any) -> Callable[..., Any]:
    """The function of a loss, or its module, with these options; both take others at the call."""
    if form == "function":
        return functools.partial(getattr(it, f"{loss}_loss"), **options)
    module: Callable[..., Any] = MODULES[loss](**options)
    return module


def run_ranks(
    program: Sequence[str], size: int, *arguments: str, codes: Sequence[int] = ()
) -> None:
    """Runs `python PROGRAM RANK ARGUMENTS` of each rank; they end with these exit codes, or 0."""
    environment = {**os.environ, "INFONCE_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, *program, str(rank), *arguments], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    expected = [*codes] or [0] * size
    assert [process.returncode for process in processes] == expected, "\n".join(outputs)


def sentence_model(width: int = 128, dropout: float = 0.1, positions: int = 128) -> Any:
    """A sentence-transformers model with random weights, whose tokens are single characters."""
    from sentence_transformers import SentenceTransformer

    try:
        from sentence_transformers.sentence_transformer import modules
    except ImportError:  # before sentence-transformers 6
        from sentence_transformers import models as modules
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, set_seed

    words = ["[PAD]", "[UNK]", *(chr(code) for code in range(32, 127))]
    tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    set_seed(0)
    config = BertConfig(
        vocab_size=len(words), hidden_size=width, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=2 * width, max_position_embeddings=positions,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=128
        ).save_pretrained(folder)
        BertModel(config).save_pretrained(folder)
        encoder = modules.Transformer(folder)
    return SentenceTransformer(modules=[encoder, modules.Pooling(width)], device="cpu")


def assert_same_training(run: Callable[[Any], list[Any]], theirs: Any, ours: Any) -> None:
    """A training gives the same losses and parameters with either loss, and the loss changes.

    `run(loss)` returns the STEPS losses and then the parameters, all float64. `theirs` is another
    project's loss, `ours` the drop-in replacement.
    """
    got, want = run(ours), run(theirs)
    assert abs(want[0] - want[STEPS - 1]) > 1e-3
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
