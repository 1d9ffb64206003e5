"""Check the types of all packages under their installed names, as CI does.

    python tests/typecheck.py [ARGUMENTS OF MYPY]

In a checkout, infonce.kernels and infonce.distributed are the folders kernels/ and distributed/
(setup.cfg). mypy would take them for other packages, and types that infonce exchanges with them for
Any. Links in a temporary folder give mypy the tree that an installation has.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def link_packages(folder: Path) -> None:
    """Links to all packages in the empty `folder`, where an installation would have them."""
    package = folder / "infonce"
    package.mkdir()
    for path in (*(ROOT / "infonce").iterdir(), ROOT / "kernels", ROOT / "distributed"):
        (package / path.name).symlink_to(path)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        link_packages(Path(folder))
        options = ["--config-file", ROOT / "setup.cfg", "--cache-dir", ROOT / ".mypy_cache"]
        command = [sys.executable, "-m", "mypy", *options, *(sys.argv[1:] or ["infonce"])]
        return subprocess.run(command, cwd=folder).returncode


if __name__ == "__main__":
    sys.exit(main())
