"""`infonce.explain` and the command `infonce explain`, without a GPU."""

import html
import inspect
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import fail, succeed
from hypothesis import given, settings
from hypothesis import strategies as st
from infonce.kernels.options import PAIR_OPTIONS

import infonce
from infonce import explanation
from infonce.checks.teacher import ALL_LOSSES
from infonce.explanation.devices import GPUS
from infonce.spec import LOSSES

CLIP = ["explain", "clip", "65536", "512", "--dtype", "bfloat16", "--device", "h200"]

KERNELS = ["sm90/sweep_lse", "sm90/sweep_gradient", "cuBLAS: dQ and dK"]


def output(*arguments: str) -> str:
    return str(succeed(*arguments))


def test_the_table_is_that_of_the_function() -> None:
    """Kernels are in the order of the passes."""
    printed = output(*CLIP)
    places = [printed.index(kernel) for kernel in KERNELS]
    assert places == sorted(places)
    assert "65536 x 65536 logits of 512 features" in printed
    assert "NVIDIA H200" in printed
    for part in ("row_partials", "column_partials", "gradient_block", "dk_accumulator"):
        assert part in printed


def test_json_is_what_the_function_returns() -> None:
    explained = infonce.explain("clip", 65536, 512, dtype="bfloat16", device="h200")
    assert json.loads(output(*CLIP, "--json")) == json.loads(json.dumps(explained.as_dict()))
    assert explained.method == "tiled"
    assert [work.kernel for work in explained.work] == KERNELS
    flops = 2 * 65536**2 * 512
    assert [work.flops / flops for work in explained.work] == [1, 1, 2]
    assert explained.seconds == pytest.approx(4 * flops / 989e12)
    assert sum(explained.memory["gradient"].values()) <= explained.workspace <= 2**30


def test_distillation_has_log_sum_exps_of_both_models() -> None:
    explained = infonce.explain("distill", 65536, 512, dtype="bfloat16", device="h200")
    assert [work.kernel for work in explained.work] == [
        "sm90/sweep_lse", "sm90/sweep_lse", "sm90/sweep_distill", "cuBLAS: dQ and dK"
    ]  # fmt: skip
    flops = 2 * 65536**2 * 512
    assert [work.flops / flops for work in explained.work] == [1, 1, 2, 2]
    assert [*explained.memory] == ["log-sum-exp", "distillation"]
    most = max(sum(parts.values()) for parts in explained.memory.values())
    assert most <= explained.workspace <= 2**30
    # no sweep takes the two parts of float32 with a teacher: all passes have portable kernels
    kernels = [work.kernel for work in infonce.explain("distill", 65536, 512).work]
    assert kernels == ["tiled/lse", "tiled/lse", "tiled/distill", "cuBLAS: dQ and dK"]


def test_prefixes_are_calls_and_own_negatives_a_note() -> None:
    explained = infonce.explain("clip", 8192, 256, dtype="bfloat16", dims=(64, 256))
    parts = [infonce.explain("clip", 8192, d, dtype="bfloat16") for d in (64, 256)]
    assert [(w.kernel, w.flops) for w in explained.work] == [
        (w.kernel, w.flops) for p in parts for w in p.work
    ]
    assert explained.recorded is None
    assert "sweep" in output("explain", "clip", "8192", "256", "--dims", "64,256")
    explained = infonce.explain("info_nce", 8192, 256, own=3, normalize=True)
    assert any("3 own negatives" in note for note in explained.notes)
    kept = {"products": 8192 * 3 * 4, "norms": 8192 * 4 * 8}
    assert explained.memory["own negatives"] == kept
    assert "own negatives" in output("explain", "info_nce", "8192", "256", "--own", "3")
    less = infonce.explain("info_nce", 8192, 256, own=3, workspace=2**20).workspace
    plain = infonce.explain("info_nce", 8192, 256, own=3).memory["own negatives"]
    assert less + sum(plain.values()) <= 2**20


def test_own_negatives_take_the_time_of_their_bytes() -> None:
    """Read once for the sums and once for the gradients, which are written. Of a table, a row is
    read and written once, however often it is used."""
    m, k, d, item = 16384, 16, 512, 2
    asked: dict[str, Any] = {"dtype": "bfloat16", "device": "h100"}
    plain = infonce.explain("info_nce", m, d, **asked)
    for rows, read, written in ((0, m * k, m * k), (1000, 1000, 1000), (10**6, m * k, 10**6)):
        explained = infonce.explain("info_nce", m, d, own=k, own_table=rows, **asked)
        own = explained.work[len(plain.work) :]
        queries_and_dq = (4 + bool(rows)) * m  # read in each kernel; dQ is read and written
        moved = d * item * (2 * read + written + queries_and_dq)
        assert sum(work.bytes for work in own) == moved
        assert explained.seconds - plain.seconds == pytest.approx(moved / 3.35e12)
        assert [work.kernel for work in own] == ["own", "own", "own_table"][: 2 + bool(rows)]
    loss = infonce.explain("info_nce", m, d, own=k, wrt=(), **asked)
    assert [work.kernel for work in loss.work][-1] == "own"
    memory = infonce.explain("info_nce", m, d, own=k, own_table=1000, **asked).memory
    assert memory["own negatives"] == {
        "products": 4 * m * k, "sorted uses": 8 * (4 * m * k + 1001),
        "pieces": (m * k // 32 + m * k // 1024) * (4 * d + 16),
    }  # fmt: skip
    assert "own_table" in output(
        "explain", "info_nce", "512", "64", "--own", "4", "--own-table", "9"
    )


def test_recorded_seconds_stand_beside_the_bound() -> None:
    """`explain` shows a recorded time only if the same call was measured on the same device."""
    asked: dict[str, Any] = {"dtype": "bfloat16", "device": "h200"}
    explained = infonce.explain("clip", 65536, 512, **asked)
    rows = json.loads(explanation.RESULTS.read_text())["results"]
    times = [row.get("median_s") for row in rows if (row["loss"], row["size"]) == ("clip", 65536)]
    assert explained.recorded in times
    assert explained.recorded > explained.seconds
    assert f"recorded {1e3 * explained.recorded:.3f} ms" in output(*CLIP)
    assert infonce.explain("clip", 65536, 512, **{**asked, "device": "h100"}).recorded is None
    assert infonce.explain("clip", 65536, 512, normalize=True, **asked).recorded is None
    assert infonce.explain("clip", 65536, 520, **asked).recorded is None
    assert infonce.explain("clip", 65536, 512, wrt=("image",), **asked).recorded is None


def test_a_call_without_gradients_has_a_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever the type of an empty `wrt`. An installation has no records."""
    with monkeypatch.context() as patch:
        seconds = "_recorded_seconds"
        patch.setattr(explanation, seconds, lambda case, gpu: float(case["gradient"]))
        for wrt, recorded in (((), 0.0), ([], 0.0), (frozenset(), 0.0), (None, 1.0)):
            assert infonce.explain("clip", 65536, 512, wrt=wrt).recorded == recorded
    monkeypatch.setattr(explanation, "RESULTS", tmp_path / "none.json")
    assert infonce.explain("clip", 65536, 512, dtype="bfloat16").recorded is None


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_on_every_device(loss: str) -> None:
    for rows, device, wrt in itertools.product((64, 8192), GPUS, (None, ())):
        explained = infonce.explain(loss, rows, 256, device=device, wrt=wrt)
        names = [work.kernel for work in explained.work]
        assert names
        assert explained.seconds > 0
        assert any("cuBLAS" in name for name in names) == (wrt is None and names[0][0] != "f")


def test_columns_of_ids() -> None:
    """True is one column; the command counts its switch. Further columns take shared memory."""
    plain, one, four = (infonce.explain("clip", 65536, 512, ids=n) for n in (False, True, 4))
    kernels = [e.schedule.passes[0].kernel for e in (plain, one, four)]
    assert [kernel.defines["IDS"] for kernel in kernels] == [0, 1, 4]
    stages = [kernel.defines["STAGES"] for kernel in kernels]
    assert stages[0] >= stages[1] >= stages[2] >= 2
    named = ["explain", "clip", "65536", "512", "--json"]
    assert json.loads(output(*named, "--ids")) == json.loads(json.dumps(one.as_dict()))


def test_less_memory_takes_more_launches() -> None:
    much, little = (
        infonce.explain("clip", 16384, 512, dtype="bfloat16", workspace=workspace)
        for workspace in ("1GiB", "64MiB")
    )
    assert sum(work.launches for work in little.work) > sum(work.launches for work in much.work)
    assert little.workspace <= 64 * 2**20


def test_queries_and_keys_of_other_numbers() -> None:
    explained = infonce.explain("info_nce", 1000, 384, keys=5000, dtype="bfloat16", wrt=["query"])
    assert explained.call.startswith("1000 x 5000 logits")
    assert explained.work[-1].kernel == "cuBLAS: dQ"


def test_naive_and_fused() -> None:
    small = infonce.explain("clip", 512, 512)
    assert (small.method, [work.kernel for work in small.work]) == ("fused", ["fused/fused"])
    assert "13 vectors" in output("explain", "clip", "512", "512")
    assert "naive" in output("explain", "clip", "512", "512", "--method", "naive")


@pytest.mark.parametrize(("loss", "options"), [
    *((loss, {"method": "naive"}) for loss in ("clip", "lit", "nt_xent", "siglip", "sup_con")),
    *((loss, {"method": "fused", "groups": True}) for loss in ("clip", "lit", "nt_xent", "siglip")),
    ("clip", {"method": "naive", "metrics": True}),
])  # fmt: skip
def test_naive_has_work_and_memory(loss: str, options: dict[str, Any]) -> None:
    """Also a call of the method fused that falls back: as many products as any other method."""
    found = infonce.explain(loss, 400, 64, **options)
    assert found.method == "naive"
    product = 2 * 400 * 400 * 64
    plain = loss != "sup_con" and "groups" not in options
    # of logits, and of gradients; by kernels, dL/dx of views has a product for rows and for columns
    products = {"clip": 3, "lit": 2, "siglip": 3, "sup_con": 2}.get(loss, 3 if plain else 2)
    assert sum(work.flops for work in found.work) == products * product
    assert found.seconds == sum(work.seconds for work in found.work) > 0
    assert found.workspace == sum(found.memory["loss and gradient"].values())
    assert found.workspace >= (2 if plain else 10) * 400 * 400 * 4
    alone = infonce.explain(loss, 400, 64, wrt=(), **options)
    assert sum(work.flops for work in alone.work) == product
    assert alone.workspace < found.workspace


@settings(max_examples=150)
@given(
    loss=st.sampled_from([*LOSSES, "distill"]), rows=st.integers(1, 3000).map(lambda k: 2 * k),
    features=st.integers(1, 1300), dtype=st.sampled_from(explanation.DTYPES),
    device=st.sampled_from(["h200", "a100"]), workspace=st.integers(2**20, 2**28),
    method=st.sampled_from(["auto", "fused", "tiled"]),
)  # fmt: skip
def test_the_workspace_is_within_that_of_the_call(
    loss: str, rows: int, features: int, workspace: int, **options: Any
) -> None:
    options |= {"workspace": workspace}
    try:
        found = infonce.explain(loss, rows, features, **options)
    except ValueError as error:
        if not re.match('workspace: expected at least|method: "fused" keeps', str(error)):
            raise
        return
    assert found.method == "naive" or found.workspace <= workspace


def test_the_least_workspace_of_an_error_works() -> None:
    with pytest.raises(ValueError, match="workspace: expected at least") as error:
        infonce.explain("clip", 9000, 64, workspace="1KiB")
    least = int(re.findall(r"at least (\d+)", str(error.value))[0])
    assert infonce.explain("clip", 9000, 64, workspace=least).workspace <= least
    with pytest.raises(ValueError, match=f"workspace: expected at least {least}"):
        infonce.explain("clip", 9000, 64, workspace=least - 1)


def test_each_option_of_pairs_is_a_flag() -> None:
    """Of the function and of the command."""
    usage, parameters = succeed("explain", "--help"), inspect.signature(infonce.explain).parameters
    for option in PAIR_OPTIONS:
        assert option.name in parameters
        if option.name != "positive_ids":  # classes, which kernels of lit do not read
            call = infonce.explain("lit", 4096, 64, **{option.name: True}).schedule.call
            assert [*call.pairs] == [option]
        assert f"--{option.name.replace('_', '-')} " in usage
    with pytest.raises(TypeError, match="unexpected keyword argument 'group'"):
        infonce.explain("lit", 64, 64, group=True)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("clap", 64, 64), {}, "loss: expected one of"),
        (("clip", 0, 64), {}, "rows: expected a positive integer, got int 0"),
        (("clip", 64, 6.5), {}, "features: expected a positive integer, got float 6.5"),
        (("clip", 64, 64), {"device": "h300"}, 'device: expected one of "b200"'),
        (("clip", 64, 64), {"dtype": "int8"}, "dtype: expected one of"),
        (("clip", 64, 64), {"ids": -1}, "ids: expected 0 to 4 columns, got -1"),
        (("clip", 64, 64), {"keys": 128}, "keys: expected 64 for clip, got 128"),
        (("nt_xent", 65, 64), {}, "rows: expected an even number"),
        (("clip", 64, 64), {"positive_ids": True, "metrics": True}, "metrics: not with"),
        (("clip", 64, 64), {"guide": True, "metrics": True}, "metrics: expected False with guide"),
        (("siglip", 64, 64), {"metrics": True}, "metrics: siglip does not take it"),
        (("clip", 64, 64), {"wrt": ["query"]}, "wrt: expected names among image, text, scale"),
        (("clip", 64, 64), {"dtype": "bfloat16", "device": "t4", "method": "tiled"},
         "precision: expected"),
        (("clip", 9000, 64), {"method": "fused"}, 'method: "fused" keeps the 9000 x 9000'),
        (("info_nce", 64, 64), {"own_table": 2}, "own_table: expected 0 without own"),
        (("info_nce", 64, 64), {"own": 2, "own_table": -1},
         "own_table: expected an integer of at least 0"),
        (("info_nce", 64, 64), {"own": True}, "own: expected an integer of at least 0"),
        (("clip", 64, 64), {"own": 2}, "own: clip does not take it"),
        (("clip", 64, 64), {"dims": (64, 300)}, "dims: expected increasing integers"),
        (("sup_con", 64, 64), {"dims": (64,)}, "dims: sup_con does not take it"),
        (("distill", 64, 32), {"guide": True}, "guide: distill does not take it"),
    ],
)  # fmt: skip
def test_bad_input(arguments: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        infonce.explain(*arguments, **options)


def test_errors_of_the_command_name_its_arguments() -> None:
    for arguments, message in (
        (("0",), "FEATURES: expected a positive integer, got int 0"),
        (("64", "--keys", "-1"), "--keys: expected a positive integer, got int -1"),
        (("64", "--dims", "-4,8"), "--dims: expected increasing integers in [1, 64]"),
        (("64", "--dims", "4,x"), "expected integers separated by commas, got '4,x'"),
        (("64", "--workspace", "0"), "--workspace': expected a positive number of bytes"),
        (("64", "--own", "2"), "--own: clip does not take it"),
        (("64", "--positive-ids", "--guide"), "--guide: not with positive_ids"),
        (("64", *["--ids"] * 5), "ids: expected 0 to 4 columns, got 5"),
        (("64", "--keys", "9", "--positive-ids"), "--keys: expected 64 for clip, got 9\n"),
        (("64", "--loss-alone", "--wrt", "image", "--wrt", "text"),
         "--loss-alone: expected no --wrt beside it, got image, text"),
    ):  # fmt: skip
        assert message in fail("explain", "clip", "64", *arguments)


def test_positive_ids_add_no_work_to_the_passes() -> None:
    """Beside a given workspace, sums over classes have a part of it; ids need their kernels."""
    plain, classes, with_ids = (
        infonce.explain("clip", 65536, 512, dtype="bfloat16", **options)
        for options in ({}, {"positive_ids": True}, {"positive_ids": True, "ids": True})
    )
    assert classes.work == plain.work
    assert classes.recorded is None  # the measurement is of a call without
    assert classes.workspace == plain.workspace
    assert not classes.schedule.call.pair_defines(1)
    assert with_ids.schedule.call.pair_defines(1) == {"POSITIVE_IDS": 1}
    little: Any = {"dtype": "bfloat16", "workspace": 2**26}
    half = infonce.explain("clip", 65536, 512, positive_ids=True, **little)
    assert half.workspace <= 2**25
    assert infonce.explain("clip", 65536, 512, **little).workspace > 2**25


def test_it_needs_no_cupy() -> None:
    """Nor a GPU: a machine without either explains."""
    code = (
        "import sys; sys.modules['cupy'] = None; import infonce\n"
        "print(infonce.explain('clip', 65536, 512, dtype='bfloat16').method)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "tiled\n"), done.stderr


@pytest.mark.parametrize("loss", ALL_LOSSES)
@pytest.mark.parametrize("more", [{}, {"method": "naive"}, {"wrt": ()}])
def test_an_explanation_prints_as_the_command_does(
    loss: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where rich displays tables by itself, and has colours."""
    options = {"method": ["--method", "naive"], "wrt": ["--loss-alone"]}
    flags = [flag for name in more for flag in options[name]]
    printed = [
        line.rstrip() for line in output("explain", loss, "4096", "512", *flags).splitlines()
    ]
    plan = infonce.explain(loss, 4096, 512, **more)
    assert str(plan).splitlines() == printed
    assert len(printed) > 6
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert str(plan).splitlines() == printed
    assert html.unescape(plan._repr_html_()) == f"<pre>{plan}</pre>"
    assert "\x1b" not in str(plan)
