"""Helpers of tests/cli: run the command `infonce`, and check its exit code and output."""

import pytest
from click.testing import CliRunner

from infonce.cli import main

M, D = 48, 12  # shape of the arrays of `pair`
PNG = b"\x89PNG\r\n\x1a\n"


def run(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments])


def succeed(*arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def fail(*arguments, code=2):
    """Run a command that fails with exit code `code`; returns its error message, one line."""
    result = run(*arguments)
    assert result.exit_code == code, (result.output, result.exception)
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert result.stderr.startswith("infonce: ")
    return result.stderr


def close(value, expected, rtol=2e-6):
    return value == pytest.approx(expected, rel=rtol)
