"""infonce.torch over the processes of torch.distributed, against one process with all rows."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

import torch_ranks  # noqa: E402
import torch_trouble  # noqa: E402
from torch_problems import run_ranks  # noqa: E402
from trouble import Trouble  # noqa: E402

import infonce.torch as it  # noqa: E402
from infonce.torch.lightly import negative_mises_fisher_weights  # noqa: E402
from infonce.torch.open_clip import DistillClipLoss  # noqa: E402

pytestmark = pytest.mark.extras


def start(cases: list[str], size: int, folder: Path, device: str = "cpu") -> None:
    """Runs cases one after the other; each rank saves what it got."""
    warnings = "The given NumPy array is not writable", "Converting a tensor with requires_grad"
    options = [word for text in warnings for word in ("-W", f"error:{text}")]  # PyTorch's
    program = [*options, torch_ranks.__file__, ",".join(cases)]
    codes = [0, 3] if "failures" in cases else []
    run_ranks(program, size, str(size), str(folder), device, codes=codes)


def saved(folder: Path, case: str) -> list[Any]:
    """The results of a case, one for each rank that saved any."""
    return [torch.load(file) for file in sorted(folder.glob(f"{case}-*.pt"))]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Processes take seconds to start: they do several cases."""
    folder = tmp_path_factory.mktemp("two")
    start(
        ["clip", "siglip", "queue", "cached", "failures"], 2, folder
    )  # after the last one there is one rank left
    return folder


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("three")
    start(["drop_ins"], 3, folder)
    return folder


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPU a rank: features travel by NCCL, and so do DDP's sums."""
    if (devices := torch.cuda.device_count()) < 2:
        pytest.skip(f"needs 2 GPUs, found {devices}")
    folder = tmp_path_factory.mktemp("gpus")
    start(["clip", "siglip", "queue", "drop_ins"], 2, folder, "cuda")
    return folder


PLACES = [3, pytest.param(2, marks=pytest.mark.gpu)]  # processes on the CPU, and on GPUs


@pytest.fixture
def start_ranks(request: pytest.FixtureRequest) -> Any:
    """A function that returns the saved results of a case over `size` ranks."""

    def saved_by_ranks(case: str, size: int) -> list[Any]:
        ranks = saved(request.getfixturevalue({2: "two_gpus", 3: "three_ranks"}[size]), case)
        assert len(ranks) == size
        return ranks

    return saved_by_ranks


@pytest.mark.parametrize("fixture", ["two_ranks", pytest.param("two_gpus", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("loss", ["clip", "siglip"])
def test_ddp_trains_as_one_process_does(
    loss: str, fixture: str, request: pytest.FixtureRequest
) -> None:
    ranks = saved(request.getfixturevalue(fixture), loss)
    assert len(ranks) == 2
    want = torch_ranks.train(loss, 0, 1, 2)
    before = dict(torch_ranks.Model().named_parameters())
    for name, value in want.items():
        for got in ranks:
            rtol = 1e-11 if fixture == "two_ranks" else 1e-10
            torch.testing.assert_close(got[name], value, rtol=rtol, atol=1e-12)
        if name in before and (loss, name) != ("clip", "logit_bias"):
            assert (value - before[name]).abs().max() > 1e-4  # it has been trained


@pytest.mark.parametrize("size", PLACES)
def test_drop_ins_share_rows_by_themselves(size: int, start_ranks: Any) -> None:
    """Gradients are those of the loss of all rows, times the ranks, which DDP divides by."""
    ranks, sizes = start_ranks("drop_ins", size), torch_ranks.SIZES[:size]
    sides = [z.clone().requires_grad_() for z in torch_ranks.batches(size, 1)[0]]
    ends = torch.tensor(sizes).cumsum(0).tolist()
    mirrored = torch.cat([torch.arange(end - n, end).flip(0) for n, end in
                          zip(sizes, ends, strict=True)])  # fmt: skip
    mirrored[[end - n for n, end in zip(sizes, ends, strict=True)]] = -1  # no positive
    views, options = torch.cat(sides), {"temperature": 0.5, "normalize": True}
    dcl = it.nt_xent_loss(views, decoupled=True, **options)
    pairs = zip(*(torch.nn.functional.normalize(z, dim=1).split(sizes) for z in sides),
                strict=True)  # fmt: skip
    rest = [  # weights are those among the rows of a rank
        (1 - negative_mises_fisher_weights(a, b)) * (a * b).sum(dim=1) / 0.5 for a, b in pairs
    ]
    teacher = [2 * z.detach().flip(1) for z in sides]
    wanted = {
        "inf_cl": (it.info_nce_loss(*sides, mirrored, scale=2.0), sides),
        "lightly": (it.nt_xent_loss(views, **options), sides),
        "dcl": (dcl, sides),
        "siglip": (it.siglip_loss(*sides, -1.0, scale=2.0), sides),
        "siglip_plus": (torch_ranks.siglip_plus(sides, 0, sum(sizes)), sides),
        "dclw": (dcl + torch.cat(rest).mean(), sides),
        "distill": (sum(DistillClipLoss()(*sides, 2.0, *teacher, 1.5)), sides),
    }
    for name, (loss, inputs) in wanted.items():
        grads = torch.autograd.grad(loss, inputs, retain_graph=True)
        for i, gradient in enumerate(grads):
            got = torch.cat([rank[name][1 + i] for rank in ranks])
            torch.testing.assert_close(got, size * gradient)
        for rank in ranks:
            torch.testing.assert_close(rank[name][0], loss)
    for name, alone in torch_ranks.memory_efficient("").items():  # not times the ranks
        loss = alone(*sides)
        torch.testing.assert_close(sum(rank[name][0] for rank in ranks), loss)
        for i, gradient in enumerate(torch.autograd.grad(loss, sides)):
            torch.testing.assert_close(torch.cat([rank[name][1 + i] for rank in ranks]), gradient)
    unit = torch.nn.functional.normalize(sides[1].detach(), dim=1).float()
    for number, rank in enumerate(ranks):  # rows of all enter each bank
        mismatches, too_large = rank["messages"][:3], rank["messages"][3:]
        assert mismatches == [
            f"rank, world_size: expected {number} and {size}, those of the process group, got "
            f"{came} and {others}"
            for came, others in ((number, size + 1), (number, size + 1), (0, 1))
        ]
        # the host does not read labels on a GPU
        labels = "" if size == 2 else f"labels: expected values in [0, {sum(sizes)})"
        assert labels in "".join(too_large)
        assert len(too_large) == (size != 2)
        torch.testing.assert_close(rank["bank"][: len(unit)], unit)


@pytest.mark.parametrize("fixture", ["two_ranks", pytest.param("two_gpus", marks=pytest.mark.gpu)])
def test_queue_of_the_keys_of_all_ranks(fixture: str, request: pytest.FixtureRequest) -> None:
    """Each rank's batch is before the keys that all ranks passed earlier; ranks differ in rows."""
    ranks, sizes = saved(request.getfixturevalue(fixture), "queue"), torch_ranks.SIZES[:2]
    assert len(ranks) == 2
    model = torch_ranks.Queued(torch_ranks.QUEUE_SIZE, None)
    kept = torch.empty(0, 4, dtype=torch.float64), torch.empty(0, dtype=torch.int64)
    for step, batch in enumerate(torch_ranks.batches(2)):
        model.zero_grad()
        new = []
        for rank, sides in enumerate(zip(*(z.split(sizes) for z in batch), strict=True)):
            query, key = (model.encoder(z) for z in sides)
            new.append((key, torch.arange(sizes[rank]) + 10 * rank + step))
            keys, ids = (torch.cat(z) for z in zip(new[rank], kept, strict=True))
            for got, want in zip(ranks[rank]["steps"][step], (keys.detach(), ids), strict=False):
                torch.testing.assert_close(got, want)
            (torch_ranks.queued_loss(query, keys, ids) / 2).backward()
        for rank in ranks:
            torch.testing.assert_close(rank["steps"][step][2], model.encoder.weight.grad)
        kept = [
            torch.cat(z).detach()[: torch_ranks.QUEUE_SIZE] for z in zip(*new, kept, strict=True)
        ]
    for rank in ranks:
        torch.testing.assert_close(rank["kept"], list(kept))
        assert rank["filled"] == [torch_ranks.QUEUE_SIZE] * 3


@pytest.mark.parametrize(("kind", "way"), torch_ranks.CACHED)
def test_gradient_caching_is_one_pass_over_all_rows(kind: str, way: str, two_ranks: Path) -> None:
    """Encoders with dropout, scale and bias train under DDP and fully_shard as in one process."""
    want = torch_ranks.cached_alone(kind, 2)
    assert all(value.abs().max() > 1e-4 for value in want)
    ranks = saved(two_ranks, "cached")
    assert len(ranks) == 2
    for rank in ranks:
        reductions, values = rank[f"{kind} {way}"]
        assert reductions == torch_ranks.CACHED[kind, way]
        for got, value in zip(values, want, strict=True):
            torch.testing.assert_close(got, value, rtol=1e-10, atol=1e-12)


def test_gradient_caching_needs_as_many_chunks_on_all_ranks(two_ranks: Path) -> None:
    for chunks, rank in zip((2, 3), saved(two_ranks, "cached"), strict=True):
        assert rank["refused"] == (
            "chunk: expected one number of chunks on all processes with fully_shard, got "
            f"{chunks} here, and from 2 to 3 on all"
        )


def test_ranks_that_disagree_or_die(two_ranks: Path) -> None:
    (errors,) = saved(two_ranks, "failures")
    assert (
        "width: expected the same on all ranks, got 3 on rank 0 and 4 on rank 1" in errors["width"]
    )
    assert "after" not in errors  # they are still in step
    assert errors["died"].startswith("rank 1 (process")


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four")
    start(["groups", "late", "caught"], 4, folder)
    return folder


def test_groups_of_which_ranks_are_in_different_numbers(four_ranks: Path) -> None:
    """Ranks connect within each group, whatever other groups they are in."""
    ranks = saved(four_ranks, "groups")
    everywhere = {"world", "nodes", "local", "once", "again"}
    assert [everywhere - {*rank} for rank in ranks] == [set()] * 4
    assert [len(rank) for rank in ranks] == [9, 9, 9, 6]
    for rank in ranks:
        for name, (loss, of_one_process) in rank.items():
            torch.testing.assert_close(loss, of_one_process, msg=name)


def test_an_error_that_its_rank_catches(four_ranks: Path) -> None:
    """The other ranks say whose error it is, soon, though no process ends; so they do later."""
    ranks = saved(four_ranks, "caught")
    for exchange, kind in itertools.product(("ring", "gather"), ("OSError", "KeyboardInterrupt")):
        error = f"{kind}: no more of this"
        for rank, results in enumerate(ranks):
            (first, second), after = results[f"{exchange} {kind}"]
            assert first == (error if rank == 1 else f"RankError: rank 1 failed: {error}")
            assert second == (
                f"RankError: this process group is out of step: rank 1 failed: {error}"
            )
            assert after < 30


def test_first_call_is_bounded(four_ranks: Path) -> None:
    for rank, waited in enumerate(saved(four_ranks, "late")):
        assert rank == 1 or re.search(r"^rank \d waited 2 s for (another|rank 1)", waited["said"])
        assert rank == 1 or 2 <= waited["after"] < 3


def make_troubles(folder: Path, seeds: range, device: str = "cpu") -> None:
    """All troubles with these seeds, and calls that differ, leave the words of the ranks."""
    program = [sys.executable, torch_trouble.__file__, str(folder)]
    environment = {**os.environ, "INFONCE_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    numbers = [str(seeds.start), str(seeds.stop)]
    subprocess.run([*program, *numbers, device], env=environment, check=True, timeout=900)


@pytest.mark.parametrize(
    "seeds", [range(3), pytest.param(range(3, 14), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_ranks_in_trouble(seeds: range, tmp_path: Path) -> None:
    """The other ranks name a rank that is killed, exits, hangs or raises at any line of a call.
    A call that differs raises the same error on all ranks, which stay in step."""
    make_troubles(tmp_path, seeds)
    for seed in seeds:
        Trouble(seed).assert_named((tmp_path / f"{seed}.txt").read_text(), torch_trouble.TIMEOUT)
    assert_differences_named((tmp_path / "differ.txt").read_text(), 3)


@pytest.mark.gpu
def test_ranks_in_trouble_on_two_gpus(tmp_path: Path) -> None:
    if (devices := torch.cuda.device_count()) < 2:
        pytest.skip(f"needs 2 GPUs, found {devices}")
    seeds = range(100, 112)
    make_troubles(tmp_path, seeds, "cuda")
    for seed in seeds:
        trouble = Trouble(seed, 2)
        said = (tmp_path / f"{seed}.txt").read_text()
        trouble.assert_named(said, torch_trouble.TIMEOUT, work=5)  # with compiling kernels
    assert_differences_named((tmp_path / "differ.txt").read_text(), 2)


def assert_differences_named(output: str, ranks: int) -> None:
    """Each rank has said the same of each call that differs."""
    for words in torch_trouble.DIFFERENCES:
        for exchange in torch_trouble.DIFFERENT_EXCHANGES:
            said = re.findall(rf"^rank \d {exchange}: ({words}.*)$", output, re.MULTILINE)
            assert len(said) == ranks, output
            assert len({*said}) == 1, output
            assert "on rank 0" in said[0], output
            assert "on rank 1" in said[0], output
    assert output.count("is in step") == ranks, output
