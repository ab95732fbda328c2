"""`make lint` finds keys in the files that git keeps, and packages that are not pinned by hash."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import scan

HASH = "--hash=sha256:" + "0a" * 32


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("key = 'AKIA" + "IOSFODNN7EXAMPLE'", "AWS"),
        ("-----BEGIN RSA " + "PRIVATE KEY-----", "Private Key"),
        ("token: ghp_" + "a1B2" * 9, "GitHub"),
        ("https://user:" + "hunter2000@example.com/x.git", "Basic Auth"),
        ("hf_" + "Ab3" * 11, "Hugging Face"),
    ],
)
def test_a_key_is_found_with_its_line(line, kind, tmp_path):
    (tmp_path / "a.py").write_text(f"# nothing\n{line}\n")
    (found,) = scan.secrets(["a.py"], tmp_path)
    assert found.startswith("a.py:2: looks like a secret") and kind in found


def test_what_looks_like_none_is_none(tmp_path):
    (tmp_path / "a.py").write_text("token = os.environ['TOKEN']\ncommit = '64206c6'\n")
    assert list(scan.secrets(["a.py"], tmp_path)) == []


def test_a_package_without_its_hash_is_found():
    good = f"torch==2.9.0 ; python_version < '3.13' \\\n    {HASH} \\\n    {HASH}\n    # via x\n"
    assert list(scan.unpinned("lock", good)) == []
    for bad in (
        "torch==2.9.0",
        f"torch>=2.9.0 {HASH}",
        f"torch @ https://example.com/torch.whl {HASH}",
        "git+https://example.com/torch",
        "torch==2.9.0 --hash=md5:00",
    ):
        assert len(list(scan.unpinned("lock", bad))) == 1, bad
