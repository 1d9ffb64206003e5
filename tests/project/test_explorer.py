"""The page of docs/explorer.md: its arithmetic under node, the page itself in a browser."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import ml_dtypes
import mpmath as mp
import numpy as np
import pytest
from infonce.kernels.arrays import formats

from infonce.notebooks import explorer

SCRIPTS = Path(__file__).parents[2] / "docs" / "static" / "explorer"
BROWSER = next(filter(shutil.which, ("chromium", "google-chrome", "chromium-browser")), None)
needs_node = pytest.mark.skipif(not shutil.which("node"), reason="no node to run JavaScript")
FILES = {"Formats": "formats.js", "Exact": "exact.js", "Rounding": "rounding.js"}
LOAD = "".join(
    f"const {name} = require({json.dumps(str(SCRIPTS / file))});" for name, file in FILES.items()
)

# those of the settings `given`, at scale 10
RELATIVE_ERRORS = """
    const rows = Formats.features(given), dots = Exact.products(rows);
    const exact = Exact.loss(rows, dots, 10, true);
    const bounds = Rounding.bounds(rows, exact, 10, given);
    return Rounding.errors(Rounding.loss(rows, 10, given), exact, bounds).relative
"""


def javascript(code: str, arguments: Any = None) -> Any:
    """The result of JavaScript code, which sees `arguments` as `given`."""
    read = "const given = JSON.parse(require('fs').readFileSync(0));"
    program = f"{LOAD}{read}console.log(JSON.stringify((() => {{{code}}})()))"
    done = subprocess.run(
        ["node", "-e", program], input=json.dumps(arguments), capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def float32_bits() -> np.ndarray:
    """Random numbers, and all that lie half-way between numbers of a format or beside them; the
    borders of subnormal numbers, overflow, infinity and NaN."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 40_000, dtype=np.uint32)
    middle = rng.normal(0, 8, 20_000).astype(np.float32).view(np.uint32)  # float16 has these
    small = rng.uniform(-1e-4, 1e-4, 20_000).astype(np.float32).view(np.uint32)
    some = np.concatenate([bits, middle, small])
    halves = [
        (some & np.uint32(2**32 - 2**dropped)) | np.uint32(2 ** (dropped - 1))
        for dropped in (13, 16)
    ]
    near = np.concatenate([half + np.uint32(step) for half in halves for step in (2**32 - 1, 0, 1)])
    edges = np.float32([0, 65504, 65519.996, 65520, 65536, 2**-24, 2**-25, 2**-25 * 1.0001, 2**-14,
                        3.4028235e38, 1e-45, np.inf, np.nan])  # fmt: skip
    both = np.concatenate([edges, -edges]).view(np.uint32)
    return np.concatenate([some, near, both]).astype(np.uint32)


@needs_node
@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16", "fp16", "bf16x3"])
def test_formats_round_to_the_same_bits(name: str) -> None:
    bits = float32_bits()
    x = bits.view(np.float32)
    got = javascript(
        "const bits = Uint32Array.from(given.bits), x = new Float32Array(bits.buffer);"
        "const rounded = Float32Array.from(x, Formats.ROUND[given.name]);"
        "return [...new Uint32Array(rounded.buffer)]",
        {"bits": bits.tolist(), "name": name},
    )
    with np.errstate(all="ignore"):
        if name == "bf16x3":
            high = x.astype(ml_dtypes.bfloat16).astype(np.float32)
            want = high + (x - high).astype(ml_dtypes.bfloat16).astype(np.float32)
        else:
            want = formats.round_to_format(x, name)
    got, numbers = np.array(got, np.uint32), ~np.isnan(want)
    assert np.isnan(got.view(np.float32)[~numbers]).all()
    different = numbers & (got != want.view(np.uint32))
    assert not different.any(), [hex(b) for b in bits[different][:5]]


@needs_node
def test_numbers_of_a_format_are_those_of_ml_dtypes() -> None:
    formats = javascript("return Formats.FORMATS")
    dtypes = {"fp64": np.float64, "fp32": np.float32, "fp16": np.float16,
              "bf16": ml_dtypes.bfloat16}  # fmt: skip
    for name, dtype in dtypes.items():
        info = ml_dtypes.finfo(dtype)
        assert formats[name]["roundoff"] == float(info.eps) / 2
        assert formats[name]["most"] == info.maxexp - 1
        assert formats[name]["tiny"] == float(info.smallest_subnormal) / 2  # 0 for float64
        assert formats[name]["exponent"] + formats[name]["digits"] == info.bits


@needs_node
def test_exact_values_are_those_of_mpmath() -> None:
    n, d, scale = 9, 12, 40.0
    got = javascript(
        "const rows = Formats.features(given), dots = Exact.products(rows);"
        "const {query, key} = rows, all = Exact.loss(rows, dots, given.scale, true);"
        "const list = (o) => Object.fromEntries(Object.entries(o).map(([k, v]) =>"
        "  [k, v.length ? [...v] : v]));"
        "return list({query, key, ...all})",
        {"n": n, "d": d, "norm": 1.4, "cosine": 0.5, "seed": 3, "scale": scale},
    )
    with mp.workprec(300):
        query, key = (
            mp.matrix(np.reshape(got[name], (n, d)).tolist()) for name in ("query", "key")
        )
        x = scale * query * key.T
        lse = [mp.log(mp.fsum(mp.exp(x[i, j]) for j in range(n))) for i in range(n)]
        losses = [lse[i] - x[i, i] for i in range(n)]
        dx = mp.matrix(n, n)
        for i in range(n):
            for j in range(n):
                dx[i, j] = mp.exp(x[i, j] - lse[i]) - (i == j)
        gradient = dx * key * scale / n
        wanted = {"x": list(x), "lse": lse, "losses": losses, "gradient": list(gradient)}
        wanted["loss"] = [mp.fsum(losses) / n]
        for name, values in wanted.items():
            pairs = zip(np.ravel(got[name]), np.ravel(got[name + "Low"]), values, strict=True)
            for high, low, want in pairs:
                off = abs(mp.mpf(float(high)) + mp.mpf(float(low)) - want)
                assert off < 1e-28 * abs(want), name


@needs_node
@pytest.mark.parametrize("name", ["fp64", "fp32", "bf16x3", "tf32", "fp16", "bf16"])
def test_errors_are_within_their_bounds(name: str) -> None:
    """Errors of logits, rows and elements are below their bounds, and some are above a
    twentieth."""
    worst = javascript(
        """
        const worst = {}, past = [];
        for (const [n, d] of [[8, 16], [24, 48]])
          for (const norm of [0.25, 1, 4])
            for (const cosine of [0, 0.5, 0.98]) {
              const rows = Formats.features({n, d, norm, cosine, seed: n});
              const dots = Exact.products(rows);
              for (const scale of [1, 14, 200]) {
                const exact = Exact.loss(rows, dots, scale, true);
                for (const inFormat of [false, true])
                  for (const textbook of [false, true]) {
                    const settings = {format: given, inFormat, textbook};
                    const bounds = Rounding.bounds(rows, exact, scale, settings);
                    const got = Rounding.loss(rows, scale, settings);
                    const errors = Rounding.errors(got, exact, bounds);
                    for (const part of ["x", "lse", "losses", "gradient"])
                      errors[part].forEach((error, i) => {
                        const share = error === 0 ? 0 : error / bounds[part][i];
                        if (!(error <= bounds[part][i]) && bounds[part][i] !== Infinity)
                          past.push([part, n, d, norm, cosine, scale, inFormat, textbook, share]);
                        worst[part] = Math.max(worst[part] || 0, share);
                      });
                  }
              }
            }
        return {worst, past: past.slice(0, 5)}
        """,
        name,
    )
    assert not worst["past"]
    least = 0.01 if name == "fp64" else 0.05  # where the browser's own functions count
    assert all(least < share < 1 for share in worst["worst"].values()), worst


@needs_node
def test_many_rows() -> None:
    """Half a million logits, more than a call of a function may have arguments."""
    given = {"format": "bf16", "n": 720, "d": 8, "norm": 1, "cosine": 0.5, "seed": 1}
    parts = javascript(RELATIVE_ERRORS, given).values()
    assert all(0 < part["error"] <= part["bound"] for part in parts)


@pytest.mark.parametrize("form", explorer.FORMATS)
def test_errors_of_the_notebook_are_within_their_bounds(form: str) -> None:
    worst = np.zeros(4)
    for norm in (0.25, 1.0, 4.0):
        for cosine in (0.0, 0.5, 0.98):
            query, key = explorer.pairs(24, 48, norm, cosine)
            for scale in (1.0, 14.0, 200.0):
                want = explorer.exact(query, key, scale)
                got = explorer.compute(query, key, scale, form)
                bounds = explorer.bounds(query, key, want, scale, form).parts()
                parts = zip(explorer.errors(got, want), bounds, strict=True)
                shares = [np.max(np.where(e == 0, 0, e / bound)) for e, bound in parts]
                worst = np.maximum(worst, shares)
    assert (worst < 1).all()
    if form != "fp64":  # whose exact values have more digits on some processors only
        assert (worst > 0.005).all(), worst


@needs_node
def test_products_in_a_format_are_those_of_the_notebooks() -> None:
    """Products differ only by the order of sums in float32."""
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((2, 12, 20)).astype(np.float32)
    for name in ("fp32", "bf16x3", "tf32", "fp16", "bf16"):
        code = "return [...Rounding.product(given.a, given.b, 12, 12, 20, given.name)]"
        got = javascript(code, {"a": a.ravel().tolist(), "b": b.ravel().tolist(), "name": name})
        want = formats.product(a, b.T, name)
        bound = 2 * 22 * 2.0**-24 * (np.abs(a) @ np.abs(b.T))  # both sums, in any order
        assert (np.abs(np.reshape(got, (12, 12)) - want) < bound).all(), name


@needs_node
@pytest.mark.skipif(not BROWSER, reason="no browser to open the page")
def test_page_in_a_browser(tmp_path: Path) -> None:
    """The page shows the numbers that its scripts compute under node, in plots and in digits."""
    names = re.findall(
        r'_static/explorer/(\w+\.js)"', (SCRIPTS.parents[1] / "explorer.md").read_text()
    )
    assert set(names) == {path.name for path in SCRIPTS.glob("*.js")}
    scripts = "".join(f"<script src='{(SCRIPTS / name).as_uri()}'></script>" for name in names)
    page = tmp_path / "page.html"
    page.write_text(f"<meta charset=utf-8><body><div id=explorer></div>{scripts}")
    done = subprocess.run(
        [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu",
         f"--user-data-dir={tmp_path / 'user'}", "--virtual-time-budget=60000", "--dump-dom",
         f"{page.as_uri()}#format=fp16&n=16&temperature=0.1"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    shown = done.stdout
    assert "aria-busy" not in shown, shown[-2000:] + done.stderr[-2000:]
    result = re.search(r'data-result="([^"]*)"', shown)
    assert result, shown[-2000:]
    want = javascript(
        RELATIVE_ERRORS,
        {"format": "fp16", "n": 16, "d": 64, "norm": 1, "cosine": 0.5, "seed": 1},
    )
    assert json.loads(result[1].replace("&quot;", '"')) == want
    assert shown.count("<svg") == 9  # four against temperature, four of formats, one histogram
    assert shown.count('class="digits"') == 8
    assert shown.count("<circle") == 4 * (13 + 6)
