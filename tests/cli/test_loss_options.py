"""`infonce loss` with options of the softmax, sets of labels and losses of classes."""

import json
import math
import re

import numpy as np
import pytest
from command_line import D, M, close, fail, run, succeed

import infonce
from infonce import reference

LABELS = np.arange(M) % 5 - 1
WEIGHTS = np.linspace(0.0, 2.0, M)
BIASES = np.linspace(-1.0, 1.0, M)


def save(folder, **arrays):
    """Paths of arrays by name."""
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return [folder / f"{name}.npy" for name in arrays]


@pytest.fixture
def files(tmp_path):
    """Paths of labels, weights and biases."""
    paths = save(tmp_path, labels=LABELS, weights=WEIGHTS, key_bias=BIASES)
    return {path.stem: path for path in paths}


def report(*arguments):
    return json.loads(succeed("loss", *arguments, "--scale", 3, "--json"))


def test_ranks_of_other_logits_are_not_reported(pair, files, tmp_path):
    """Nor of rows without one positive, unless they are asked for."""
    base, plain = pair[:2], report(*pair[:2])["retrieval"]
    for flags, same in (
        (("--margin", 0.2), True), (("--label-smoothing", 0.1), True), (("--hardness", 1.5), True),
        (("--key-bias", files["key_bias"]), False), (("--false-negative-margin", 9.0), False),
        (("--decoupled",), True), (("--weights", files["weights"]), True),
    ):  # fmt: skip
        assert report(*base, *flags)["retrieval"] == (plain if same else None), flags
    for labels in (np.stack([np.arange(M), LABELS], axis=1), LABELS):
        np.save(tmp_path / "sets.npy", labels)
        flags = (*base, "--loss", "info_nce", "--labels", tmp_path / "sets.npy")
        assert report(*flags)["retrieval"] is None
        error = fail("loss", *flags, "--scale", 3, "--metrics")
        assert "--metrics: expected one positive a row" in error


def repeated(report):
    """The loss that the function returns for what a report says of the inputs and options."""
    features = [np.load(file["source"]) for file in report["inputs"].values()]
    options = {name: value for name, value in report["options"].items() if value is not None}
    if "temperature" in options:
        del options["scale"]
    for name, value in options.items():
        if isinstance(value, str) and value.endswith(".npy"):
            options[name] = np.load(value)
        elif isinstance(value, list) and str(value[0]).endswith(".npy"):
            arrays = tuple(map(np.load, value))
            options[name] = arrays if len(arrays) > 1 else arrays[0]
    return getattr(infonce, f"{report['loss']}_loss")(*features, **options)


def test_json_has_all_that_the_loss_depends_on(pair, files, tmp_path):
    rng, rows = np.random.default_rng(10), np.arange(M)
    ids, others, own, mask, guide, key = save(
        tmp_path, ids=rows // 2, others=rows // 3, own=rng.normal(size=(M, 2, D)),
        own_mask=rng.random((M, 2)) < 0.6, guide=rng.normal(size=(M, 3)),
        guide_of_keys=rng.normal(size=(M, 3)),
    )  # fmt: skip
    calls = [
        ("--temperature", 0.2, "--normalize", "--ids", ids, "--weights", files["weights"],
         "--margin", 0.2, "--decoupled"),
        ("--scale", 0.5, "--hardness", 0.5, "--ids", ids, "--ids", others,
         "--key-bias", files["key_bias"]),
        ("--temperature", 0.7, "--label-smoothing", 0.2, "--loss", "lit"),
        ("--loss", "siglip", "--normalize"),
        ("--loss", "siglip", "--bias", -3, "--temperature", 0.5),
        ("--loss", "info_nce", "--labels", files["labels"], "--scale", 2,
         "--false-negative-margin", 0.1),
        ("--loss", "info_nce", "--own", own, "--own-mask", mask, "--no-in-batch", "--scale", 3),
        ("--guide", guide, "--guide", key, "--guide-margin", 0.3, "--scale", 3),
        ("--dims", f"2,{D}", "--dim-weights", "0.5,1", "--scale", 3),
        ("--loss", "distill", "--teacher-query", guide, "--teacher-key", key, "--scale", 3,
         "--teacher-scale", 2.0),
    ]  # fmt: skip
    for call in calls:
        result = json.loads(succeed("loss", *pair[:2], *call, "--json"))
        assert close(result["value"]["total"], repeated(result)), call
    out = ("--grad-out", tmp_path / "out", "--grad-dtype", "float64")
    assert report(*pair[:2], *out)["options"]["grad_dtype"] == "float64"


def test_means_of_directions_say_that_they_are_unweighted(pair, files):
    image, text, u, v = pair
    base = (image, text, "--weights", files["weights"])
    value = report(*base)["value"]
    assert close(value["unweighted"]["rows"], reference.info_nce(u, v, scale=3.0).loss, 1e-4)
    assert value["total"] != pytest.approx(sum(value["unweighted"].values()) / 2, rel=1e-3)
    assert "mean loss, unweighted" in succeed("loss", *base, "--scale", 3)
    assert "unweighted" not in succeed("loss", image, text, "--scale", 3)


def test_the_table_names_the_options(pair, files):
    words = succeed("loss", *pair[:2], "--scale", 3, "--margin", 0.2, "--weights", files["weights"])
    assert f"--margin 0.2, --weights {files['weights']}" in " ".join(words.split())
    plain = succeed("loss", *pair[:2], "--temperature", 0.25)
    assert "options --temperature 0.25\n" in re.sub(" +", " ", plain).replace(" \n", "\n")


def test_bad_options(pair, files, tmp_path):
    image, text, *_ = pair
    eye, words, guide, few, mask, outside, ids, others = save(
        tmp_path, eye=np.eye(M, dtype=np.int64), words=np.array(["a"] * M), guide=np.ones((M, 3)),
        few=np.ones((3, 3)), mask=np.ones((M, 2), bool),
        outside=np.full((M, 3), 2 * M), ids=np.arange(M), others=np.arange(M) + M,
    )  # fmt: skip
    of_info_nce, of_labels = ("--loss", "info_nce"), ("--loss", "info_nce", "--labels")
    taught = ("--loss", "distill", "--teacher-query", guide)
    refused = {
        ("--label-smoothing", 1): "--label-smoothing: expected a number in [0, 1), got 1.0",
        ("--label-smoothing", 0.1, "--decoupled"):
            "--label-smoothing: expected 0.0 with decoupled, got float 0.1",
        ("--margin", 0.1, "--loss", "siglip"): "--margin: expected 0.0 for siglip, which has none",
        ("--metrics", "--loss", "siglip"): "--metrics: expected False for siglip, which has none",
        ("--metrics", "--false-negative-margin", 1):
            "--metrics: expected False with false_negative_margin, got True",
        ("--weights", text): f"--weights ({text}): expected shape (48,), got (48, 12)",
        ("--key-bias", files["key_bias"], "--loss", "gte"):
            f"--key-bias ({files['key_bias']}): expected None for gte, which has none",
        ("--labels", files["labels"]): "--labels is of info_nce and sup_con",
        (*of_labels, words): "expected integers, got dtype <U1",
        (*of_labels, eye): "got key 0 more than once in row 0: labels.argmax(axis=1) makes labels",
        ("--guide", guide): "--guide: expected 2 for clip, got 1",
        ("--guide", guide, "--guide", few): "expected shape",
        (*taught, "--teacher-key", guide, "--teacher-scale", -1):
            "--teacher-scale: expected a positive number, got -1.0",
        (*taught, "--teacher-key", few): f"--teacher-key ({few}): expected shape",
        taught: "distill: expected --teacher-query and --teacher-key",
        ("--teacher-key", guide): "--teacher-key is of distill",
        (*of_info_nce, "--own-mask", mask): "--own-mask",
        (*of_info_nce, "--own", image, "--own-indices", outside): "--own-indices (",
        ("--positive-ids", ids, "--positive-ids", ids):
            "--positive-ids: expected one array for clip, got a pair",
    }  # fmt: skip
    for options, message in refused.items():
        assert message in fail("loss", image, text, "--scale", 3, *options), options
    assert "sup_con: expected --labels" in fail("loss", image, "--loss", "sup_con", "--scale", 1)
    nothing = ("--loss", "lit", "--positive-ids", ids, "--positive-ids", others)
    assert "no row has a positive" in run("loss", image, text, "--scale", 3, *nothing).stderr


def test_no_negatives(tmp_path):
    np.save(tmp_path / "one.npy", np.ones((1, 3)))
    one = (tmp_path / "one.npy",) * 2
    result = run("loss", *one, "--scale", 1, "--decoupled", "--normalize", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["value"]["total"] is None
    assert f"the loss is {-math.inf}: --decoupled leaves nothing" in result.stderr
