"""push and pull, through real HTTP with a hub on this machine."""

import json

import pytest
import torch
from hub_server import TOKEN, Hub
from huggingface_hub import constants
from scale_runs import make

from embodyrl.errors import UserError
from embodyrl.storage import checkpoint
from embodyrl.training.hub import pull, push
from embodyrl.training.runner import train

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def hub(monkeypatch):
    server = Hub()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = make(tmp_path_factory.mktemp("hub"), "run.iterations=2", "run.eval_before=true")
    return train(config, command="embodyrl train reach run.iterations=2")


def test_what_is_pulled_is_what_was_pushed_and_the_card_says_how_it_came_about(run, hub, tmp_path):
    url = push(str(run), "me/reach", endpoint=hub.url)
    assert url.startswith(hub.url)
    folder = pull("me/reach", tmp_path / "got", endpoint=hub.url)
    mine, meta = checkpoint.load(checkpoint.find(run))
    states, pulled = checkpoint.load(checkpoint.find(folder))
    assert states.keys() == {"policy"} and pulled == meta
    assert all(torch.equal(states["policy"][k], v) for k, v in mine["policy"].items())
    card = (folder / "README.md").read_text()
    assert (
        "embodyrl train reach run.iterations=2" in card
        and "| before | 0 |" in card
        and "| after | " in card
    )
    assert sorted(p.name for p in folder.iterdir()) == [
        "README.md",
        "checkpoints",
        "config.yaml",
        "evals",
    ]
    assert len(json.loads((folder / "evals" / "after.json").read_text())["episodes"]) == 8
    push(str(run / "checkpoints" / "step_000002"), "me/reach", endpoint=hub.url)
    assert len([k for k in hub.repos["me/reach"] if k.endswith("policy.safetensors")]) == 1
    with pytest.raises(UserError, match="is there already"):
        pull("me/reach", folder, endpoint=hub.url)


def test_a_download_that_breaks_off_leaves_no_checkpoint_and_the_next_one_goes_on(
    run, hub, tmp_path
):
    push(str(run), "me/reach", endpoint=hub.url)
    hub.cut = "policy.safetensors"
    with pytest.raises(
        UserError, match="me/reach cannot be downloaded: the Hugging Face hub cannot be reached"
    ):
        pull("me/reach", tmp_path / "got", endpoint=hub.url)
    assert not (tmp_path / "got").exists()
    hub.cut = ""
    assert checkpoint.find(pull("me/reach", tmp_path / "got", endpoint=hub.url)).exists()


def test_a_file_that_was_altered_is_refused(run, hub, tmp_path):
    push(str(run), "me/reach", endpoint=hub.url)
    (name,) = [k for k in hub.repos["me/reach"] if k.endswith("meta.json")]
    hub.repos["me/reach"][name] += b" "
    with pytest.raises(
        UserError, match=r"did not arrive whole \(meta.json is not as it was written\)"
    ):
        pull("me/reach", tmp_path / "got", endpoint=hub.url)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_had_is_told_with_its_mend(run, hub, tmp_path, monkeypatch):
    out = tmp_path / "got"
    with pytest.raises(UserError, match="no such repository"):
        pull("me/nothing", out, endpoint=hub.url)
    hub.gated.add("you/gated")
    with pytest.raises(UserError, match="accept its licence"):
        pull("you/gated", out, endpoint=hub.url)
    hub.repos["me/other"] = {"model.safetensors": b""}
    with pytest.raises(UserError, match=r"policy\.pretrained"):
        pull("me/other", out, endpoint=hub.url)
    push(str(run), "me/reach", endpoint=hub.url)
    hub.claimed = 10**18
    with pytest.raises(UserError, match="Free some space"):
        pull("me/reach", out, endpoint=hub.url)
    before = dict(hub.repos["me/reach"])
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(UserError, match="may write there"):
        push(str(run), "me/reach", endpoint=hub.url)
    assert hub.repos["me/reach"] == before
    hub.close()
    with pytest.raises(UserError, match="cannot be reached"):
        pull("me/reach", tmp_path / "none", endpoint=hub.url)
    assert not out.exists()
