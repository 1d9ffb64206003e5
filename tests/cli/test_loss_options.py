"""`infonce loss` with options of the softmax, sets of labels and losses of classes."""

import json
import math
import re

import numpy as np
import pytest
from command_line import M, close, fail, run, succeed

import infonce
from infonce import reference
from infonce.spec import DEFAULTS

LABELS = np.arange(M) % 5 - 1
WEIGHTS = np.linspace(0.0, 2.0, M)
BIASES = np.linspace(-1.0, 1.0, M)


@pytest.fixture
def files(tmp_path):
    """Paths of labels, weights and biases."""
    arrays = {"labels": LABELS, "weights": WEIGHTS, "key_bias": BIASES}
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    return {name: tmp_path / f"{name}.npy" for name in arrays}


def report(*arguments):
    return json.loads(succeed("loss", *arguments, "--scale", 3, "--json"))


def test_options_are_reported(pair, files):
    image, text, *_ = pair
    flags = ("--margin", 0.2, "--hardness", 1.5, "--decoupled", "--false-negative-margin", 9.0)
    result = report(image, text, *flags, "--weights", files["weights"])
    options = {"margin": 0.2, "hardness": 1.5, "decoupled": True, "false_negative_margin": 9.0}
    options |= {"weights": str(files["weights"]), "scale": 3.0}
    others = result["options"].keys() - options
    assert result["options"] == options | {name: DEFAULTS[name] for name in others}
    assert result["retrieval"] is None  # the logits are others
    result = report(image, text, "--label-smoothing", 0.1, "--key-bias", files["key_bias"])
    assert result["retrieval"] is None
    result = report(image, text, "--hardness", 1.5)
    assert result["retrieval"] == report(image, text)["retrieval"]


def test_several_positives_or_none(pair, tmp_path):
    """Labels of rows that have no rank: without metrics, unless these are asked for."""
    image, text, *_ = pair
    for labels in (np.stack([np.arange(M), LABELS], axis=1), LABELS):
        np.save(tmp_path / "sets.npy", labels)
        base = (image, text, "--loss", "info_nce", "--labels", tmp_path / "sets.npy")
        assert report(*base)["retrieval"] is None
        assert "--metrics: expected one positive a row" in fail(
            "loss", *base, "--scale", 3, "--metrics"
        )


def repeated(report):
    """The loss that the function returns for what a report says of the inputs and options."""
    features = [np.load(file["source"]) for file in report["inputs"].values()]
    options = {name: value for name, value in report["options"].items() if value is not None}
    if "temperature" in options:
        del options["scale"]
    for name in {"weights", "key_bias", "labels"} & options.keys():
        options[name] = np.load(options[name])
    if "ids" in options:
        ids = [np.load(path) for path in options["ids"]]
        options["ids"] = ids[0] if len(ids) == 1 else tuple(ids)
    return getattr(infonce, f"{report['loss']}_loss")(*features, **options)


def test_json_has_all_that_the_loss_depends_on(pair, files, tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(M) // 2)
    np.save(tmp_path / "others.npy", np.arange(M) // 3)
    ids, others = ("--ids", tmp_path / "ids.npy"), ("--ids", tmp_path / "others.npy")
    weights, key_bias = (f"--{name.replace('_', '-')}" for name in ("weights", "key_bias"))
    calls = [
        ("--temperature", 0.2, "--normalize", *ids, weights, files["weights"]),
        ("--scale", 0.5, "--hardness", 0.5, *ids, *others, key_bias, files["key_bias"]),
        ("--temperature", 0.7, "--label-smoothing", 0.2, "--loss", "lit"),
        ("--loss", "siglip", "--normalize"),
        ("--loss", "siglip", "--bias", -3, "--temperature", 0.5),
        ("--loss", "info_nce", "--labels", files["labels"], "--scale", 2,
         "--false-negative-margin", 0.1),
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
    base = ("loss", image, text, "--scale", 3)
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
    }  # fmt: skip
    for options, message in refused.items():
        assert message in fail(*base, *options)
    assert "sup_con: expected --labels" in fail("loss", image, "--loss", "sup_con", "--scale", 1)
    np.save(tmp_path / "words.npy", np.array(["a"] * M))
    error = fail(*base, "--loss", "info_nce", "--labels", tmp_path / "words.npy")
    assert "expected integers, got dtype <U1" in error
    out = tmp_path / "weights"
    out.mkdir()
    files["weights"].rename(out / "image.npy")
    error = fail(*base, "--weights", out / "image.npy", "--grad-out", out, "--force")
    assert "image.npy is an input" in error


def test_no_negatives(tmp_path):
    np.save(tmp_path / "one.npy", np.ones((1, 3)))
    one = (tmp_path / "one.npy",) * 2
    result = run("loss", *one, "--scale", 1, "--decoupled", "--normalize", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["value"]["total"] is None
    assert f"the loss is {-math.inf}: --decoupled leaves nothing" in result.stderr


def test_one_hot_rows_are_no_labels(pair, tmp_path):
    np.save(tmp_path / "eye.npy", np.eye(M, dtype=np.int64))
    words = fail("loss", *pair[:2], "--loss", "info_nce", "--labels", tmp_path / "eye.npy",
                 "--scale", 3)  # fmt: skip
    assert "got key 0 more than once in row 0: labels.argmax(axis=1) makes labels of one" in words


def save(folder, **arrays):
    """Paths of arrays by name."""
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return [folder / f"{name}.npy" for name in arrays]


def test_guides_are_files(pair, tmp_path):
    image, text, *_ = pair
    guide = np.random.default_rng(8).normal(size=(2, M, 3))
    paths = save(tmp_path, image_guide=guide[0], text_guide=guide[1])
    flags = ("--guide", paths[0], "--guide", paths[1], "--guide-margin", 0.3)
    result = report(image, text, *flags)
    assert result["options"]["guide"] == list(map(str, paths))
    assert result["options"]["guide_margin"] == 0.3
    assert result["retrieval"] is None
    assert "--guide: expected 2 for clip, got 1" in fail("loss", image, text, *flags[:2])
    np.save(paths[1], guide[1, :3])
    assert "expected shape" in fail("loss", image, text, *flags, "--scale", 3)


def test_a_teacher_has_files(pair, tmp_path):
    image, text, *_ = pair
    teacher = np.random.default_rng(9).normal(size=(2, M, 3))
    query, key = save(tmp_path, tq=teacher[0], tk=teacher[1])
    flags = ["--loss", "distill", "--teacher-query", query, "--teacher-key", key]
    result = report(image, text, *flags, "--teacher-scale", 2.0)
    assert result["options"]["teacher_key"] == str(key)
    assert result["options"]["teacher_scale"] == 2.0
    assert "--teacher-key is of distill" in fail("loss", image, text, *flags[4:])
    words = "distill: expected --teacher-query and --teacher-key"
    assert words in fail("loss", image, text, *flags[:4])
    result = fail("loss", image, text, *flags, "--scale", 3, "--teacher-scale", -1)
    assert "--teacher-scale: expected a positive number, got -1.0" in result
    np.save(key, teacher[1][:3])
    result = fail("loss", image, text, *flags, "--scale", 3)
    assert re.search(r"--teacher-key \(.*tk.npy\): expected shape", result)


def test_own_negatives_positive_ids_and_prefixes(pair, tmp_path):
    image, text, u, _ = pair
    rng, ids = np.random.default_rng(10), np.arange(M) // 2
    own, mask, ids, others, indices = save(
        tmp_path, own=rng.normal(size=(M, 2, u.shape[1])), own_mask=rng.random((M, 2)) < 0.6,
        positive_ids=ids, others=ids + M, own_indices=np.full((M, 3), 2 * M),
    )  # fmt: skip
    arguments = ("--loss", "info_nce", "--own", own, "--own-mask", mask, "--no-in-batch")
    result = report(image, text, *arguments)
    assert result["options"]["own"] == str(own)
    assert not result["options"]["in_batch"]
    base = ("loss", image, text, "--scale", 3)
    assert "--own-mask" in fail(*base, *arguments[:2], "--own-mask", mask)
    table = save(tmp_path, table=u)
    words = ("--loss", "info_nce", "--own", *table, "--own-indices", indices)
    assert "--own-indices (" in fail(*base, *words)
    pair_of_ids = ("--positive-ids", ids, "--positive-ids", others)
    assert "no row has a positive" in run(*base, "--loss", "lit", *pair_of_ids).stderr
    error = fail(*base, *pair_of_ids)
    assert "--positive-ids: expected one array for clip, got a pair" in error
    prefixes = f"--dims 2,{u.shape[1]}, --dim-weights 0.5,1"
    assert prefixes in succeed(*base, *prefixes.replace(", ", " ").split())
