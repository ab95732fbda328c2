"""The runs of a sweep on Ray: side by side, each with its log; a failed one ends no other."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from embodyrl.distributed.ray_commands import run_commands
from embodyrl.errors import UserError

# Ray is imported by the module alone, which sets its authentication before.
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("ray") is None, reason="the extra scale is not installed"),
]


def test_they_run_and_a_failed_one_is_told(tmp_path: Path) -> None:
    code = "import sys; print('here', sys.argv[1]); sys.exit(int(sys.argv[1]))"
    commands = {f"run{i}": [sys.executable, "-c", code, str(i)] for i in (0, 3)}
    assert run_commands(commands, tmp_path, cpus=0.5) == {"run3": 3}
    assert [(tmp_path / f"run{i}.log").read_text() for i in (0, 3)] == ["here 0\n", "here 3\n"]


def test_a_run_that_fits_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="A run with 1000 CPU does not fit"):
        run_commands({"a": [sys.executable, "-c", ""]}, tmp_path, cpus=1000)
