"""Other projects' own tests of their losses, run with the losses of this library in their place.

    python tools/peers.py --fetch FOLDER [PEER ...]       clone the projects into FOLDER
    python tools/peers.py FOLDER [PEER ...] [--record]    run their tests

Not part of the other tests: it needs a network once, the projects' requirements, and pytest-mock,
absl-py. Each test file runs in a process of its own, in which the names of the peer's modules are
this library's. Every failure has its reason in `PEERS`; one without a reason, or a reason without
a failure, is an error. `--record` writes benchmarks/results/peer_tests.json, which
`python benchmarks/render.py` puts into docs/migrating.md.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "results" / "peer_tests.json"
HERE, REPORT = "INFONCE_PEER", "INFONCE_PEER_REPORT"  # environment of a run
NO_HUB = (
    "distilbert/distilbert-base-uncased",
    "sentence-transformers-testing/stsb-bert-tiny-safetensors",
    "sentence-transformers/all-MiniLM-L6-v2",
)


@dataclass(frozen=True)
class Peer:
    """A project, its tests, and where its names are."""

    url: str
    commit: str
    tests: tuple[str, ...]
    ours: str  # the module with this library's losses
    theirs: tuple[str, ...]  # the modules in which they take the place of others
    why: dict[str, str] = field(default_factory=dict)  # pattern of failing tests -> reason
    source: str = "."  # folder of its packages
    stand_ins: tuple[str, ...] = ()  # imported by the project, not by what is tested
    folder: str = ""  # if not that of its name
    swap: Callable[[Any, Any], Any] = lambda ours, theirs: ours  # what takes the place of a name
    environment: dict[str, str] = field(default_factory=dict)


def either(ours: Any, theirs: Any) -> Any:
    """This library's class, or the other class if this library's refuses the arguments."""

    def make(*arguments: Any, **settings: Any) -> Any:
        try:
            return ours(*arguments, **settings)
        except ValueError:
            return theirs(*arguments, **settings)

    return make


def chunked(ours: Any, theirs: Any) -> Any:
    """Tests of chunks compare a loss in chunks with one that has none. The first is this library's,
    the second stays theirs. They call a private method, which here is `forward`."""

    def make(**settings: Any) -> Any:
        if "chunk_size" not in settings:
            return theirs(**settings)
        loss = ours(**settings)

        def one_process_loss(*arguments: Any, negative_only: bool = False) -> Any:
            if negative_only:
                raise NotImplementedError("SigLIP's loss without positives")
            return loss(*arguments)

        loss._loss = one_process_loss
        return loss

    return make


METRIC_LEARNING = (
    "https://github.com/KevinMusgrave/pytorch-metric-learning",
    "216a792c22b0154d3d3bf008a7317edc7d677e71",
    ("tests/losses/test_ntxent_loss.py",),
    "infonce.torch.pytorch_metric_learning",
    ("pytorch_metric_learning.losses",),
)
OPEN_CLIP: dict[str, Any] = {
    "url": "https://github.com/mlfoundations/open_clip",
    "commit": "89fb801f1e6087880e951fc8354b8a2077b79c6d",
    "ours": "infonce.torch.open_clip",
    "theirs": ("open_clip", "open_clip.loss"),
    "source": "src",
    "stand_ins": ("torchvision", "timm", "ftfy"),
}
PEERS = {
    "open_clip": Peer(**OPEN_CLIP, tests=("tests/test_factory_task.py",)),
    "open_clip, its own loss where a test gives no chunk_size": Peer(
        **OPEN_CLIP,
        tests=("tests/test_siglip_chunked_loss.py",),
        why={
            r"forward\[True": "the private method's loss without positives, which is not here",
            "zero_skips": "equal to the last bit, of another order of sums",
        },
        folder="open_clip",
        swap=chunked,
    ),
    "lightly": Peer(
        "https://github.com/lightly-ai/lightly",
        "e8d317fc5a87f4387a85a35e689869039ec249ee",
        ("tests/loss/test_ntx_ent_loss.py", "tests/loss/test_dcl_loss.py"),
        "infonce.torch.lightly",
        ("lightly.loss", "lightly.loss.ntx_ent_loss", "lightly.loss.dcl_loss"),
        {"neg_temp": "a negative temperature, which is an error here"},
        stand_ins=("torchvision",),
    ),
    "pytorch-metric-learning": Peer(
        *METRIC_LEARNING,
        {"": "each also takes LpDistance, which is an error here"},
        source="src",
    ),
    "pytorch-metric-learning, LpDistance by its own loss, without float16": Peer(
        *METRIC_LEARNING,
        source="src",
        folder="pytorch-metric-learning",
        swap=either,
        environment={"TEST_DTYPES": "float32,float64"},
    ),
    "sentence-transformers": Peer(
        "https://github.com/huggingface/sentence-transformers",
        "cad211983f36ce458e9b3360f3e11b29fc54cbd8",
        (
            "tests/sentence_transformer/losses/test_cmnrl.py",
            "tests/sentence_transformer/losses/test_gradcache.py",
            "tests/sentence_transformer/losses/test_merged_forward.py",
        ),
        "infonce.torch.sentence_transformers",
        (
            "sentence_transformers.sentence_transformer.losses",
            "sentence_transformers.sentence_transformer.losses.multiple_negatives_ranking",
            "sentence_transformers.sentence_transformer.losses.cached_multiple_negatives_ranking",
        ),
        {
            "config_back_compat": "a partial of cos_sim, which is an error here",
            "under_autocast": "a bfloat16 loss is expected, and the loss is float32 here",
            "gather_across_devices_offset": "a patched gather stands for two processes; nothing is "
            "gathered here",
        },
    ),
    "sentence-transformers, tokens": Peer(
        "https://github.com/huggingface/sentence-transformers",
        "cad211983f36ce458e9b3360f3e11b29fc54cbd8",
        ("tests/multi_vector_encoder/losses/test_misc.py",),
        "infonce.torch.sentence_transformers.multi_vector",
        (
            "sentence_transformers.multi_vector_encoder.losses",
            "sentence_transformers.multi_vector_encoder.losses.multiple_negatives_ranking",
            "sentence_transformers.multi_vector_encoder.losses.cached_multiple_negatives_ranking",
        ),
        {
            "config_includes_hyperparameters": "XTR scores, which are an error here",
            "does_not_scale_with_world_size": "a patched gather stands for two processes; nothing "
            "is gathered here",
        },
        folder="sentence-transformers",
    ),
    "pylate": Peer(
        "https://github.com/lightonai/pylate",
        "1f1f47cee5df35ebe6fd2286a0a205a1523e4119",
        ("tests/test_contrastive.py", "tests/test_cached_contrastive.py"),
        "infonce.torch.pylate",
        ("pylate.losses",),
    ),
    "colpali-engine": Peer(
        "https://github.com/illuin-tech/colpali",
        "9be8f1972d6d2ab6b47454e068e10191ce32c219",
        ("tests/loss/test_bi_losses.py", "tests/loss/test_li_losses.py"),
        "infonce.torch.colpali_engine",
        ("colpali_engine.loss",),
        {"filtering": "pos_aware_negative_filtering, which is an error here"},
    ),
    "optax": Peer(
        "https://github.com/google-deepmind/optax",
        "2edbcbe2390da13983b92cbef94ac0460ecde1c5",
        ("optax/losses/_self_supervised_test.py",),
        "infonce.jax.optax",
        ("optax.losses._self_supervised",),
    ),
}


# --- inside of a run: a plugin of pytest ----------------------------------------------------------

outcomes: dict[str, str] = {}


def pytest_configure() -> None:
    """The peer's names are this library's."""
    peer = PEERS[os.environ[HERE]]
    sys.meta_path.append(StandIns([n for n in peer.stand_ins if not importlib.util.find_spec(n)]))
    ours = importlib.import_module(peer.ours)
    for module in map(importlib.import_module, peer.theirs):
        for name in ours.__all__:
            if hasattr(module, name):
                setattr(module, name, peer.swap(getattr(ours, name), getattr(module, name)))


def pytest_runtest_logreport(report: Any) -> None:
    name = report.nodeid.partition("::")[2]
    if report.failed or report.skipped or report.when == "call":
        outcomes[name] = report.outcome if outcomes.get(name) != "failed" else "failed"


def pytest_sessionfinish() -> None:
    Path(os.environ[REPORT]).write_text(json.dumps(outcomes))


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules that have every name, for libraries that are missing."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        is_missing = name.partition(".")[0] in self.names
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_missing else None

    def create_module(self, spec: Any) -> Any:
        return MagicMock(name=spec.name, __path__=[], __spec__=spec, __name__=spec.name)

    def exec_module(self, module: Any) -> None:
        pass


# --- a run ----------------------------------------------------------------------------------------


def fetch(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        peer = PEERS[name]
        at = folder / (peer.folder or name)
        at.mkdir(parents=True, exist_ok=True)
        for command in (
            ["init", "-q"],
            ["fetch", "-q", "--depth", "1", peer.url, peer.commit],
            ["checkout", "-q", "FETCH_HEAD"],
        ):
            subprocess.run(["git", "-C", str(at), *command], check=True)


def run(name: str, folder: Path, scratch: Path) -> list[dict[str, Any]]:
    """A row of the record for each test file of a peer."""
    peer, rows = PEERS[name], []
    at = (folder / (peer.folder or name)).resolve()
    environment = {
        **os.environ,
        HERE: name,
        REPORT: str(scratch / "report.json"),
        "PYTHONPATH": os.pathsep.join(map(str, (at / peer.source, at, ROOT / "tools"))),
        "HF_HUB_OFFLINE": "1",
        "TEST_DEVICE": "cpu",
        **peer.environment,
    }
    unused = set(peer.why)
    for file in peer.tests:
        (scratch / "report.json").unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "peers", "-c", os.devnull]
        command += ["--rootdir", str(at), "-p", "no:cacheprovider", str(at / file)]
        done = subprocess.run(
            command, cwd=scratch, env=environment, capture_output=True, text=True, timeout=1200
        )
        if not (scratch / "report.json").exists():
            raise SystemExit(f"{name}: {file}: {done.stdout[-3000:]}{done.stderr[-3000:]}")
        report = json.loads((scratch / "report.json").read_text())
        counts = Counter(report.values())
        reasons = Counter()
        for test in (test for test, outcome in report.items() if outcome == "failed"):
            matching = [pattern for pattern in peer.why if re.search(pattern, test)]
            if not matching:
                print(done.stdout[-6000:])
                raise SystemExit(f"{name}: {file}: {test} fails, for no reason in PEERS")
            reasons[peer.why[matching[0]]] += 1
            unused.discard(matching[0])
        rows.append(
            {
                "project": name,
                "tests": file,
                "passed": counts["passed"],
                "failed": counts["failed"],
                "skipped": counts["skipped"],
                "why they fail": "; ".join(f"{n}: {why}" for why, n in reasons.items()) or "-",
                "commit": peer.commit[:10],
            }
        )
        print(rows[-1])
    if unused:
        raise SystemExit(f"{name}: nothing fails for {sorted(unused)}")
    return rows


def make_models(folder: Path) -> None:
    """Small models of random weights, and texts, under the names that tests load from a hub."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from torch_problems import sentence_model

    model = sentence_model(positions=256)
    for name in NO_HUB:
        model.save(str(folder / name))
    (texts := folder / "lightonai" / "lighton-ms-marco-mini" / "triplet").mkdir(parents=True)
    rows = [f"question {i},answer {i},other {i * i}" for i in range(8)]
    (texts / "train.csv").write_text("\n".join(["query,positive,negative", *rows]))
    (texts.parent / "README.md").write_text(
        "---\nconfigs:\n- config_name: triplet\n  data_dir: triplet\n---\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the projects are")
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"of {', '.join(PEERS)}; all")
    parser.add_argument("--fetch", action="store_true", help="clone them")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    arguments = parser.parse_args()
    names = arguments.peers or list(PEERS)
    if arguments.fetch:
        return fetch(arguments.folder, names)
    with tempfile.TemporaryDirectory() as scratch:
        if {"sentence-transformers", "pylate"}.intersection(names):
            make_models(Path(scratch))
        rows = [row for name in names for row in run(name, arguments.folder, Path(scratch))]
    if arguments.record:
        git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        record = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": f"CPU, {platform.machine()}",
            "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
            "versions": {
                name: importlib.metadata.version(name) for name in ("torch", "jax", "transformers")
            },
            "results": rows,
        }
        RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
