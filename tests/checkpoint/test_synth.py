from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from k3fuse.checkpoint.audit import audit
from k3fuse.checkpoint.files import open_checkpoint
from k3fuse.checkpoint.reader import load_parameter
from k3fuse.checkpoint.synth import draw_tensor, synthesize
from k3fuse.errors import InputError
from k3fuse.models.kimi_builtin import BUILTIN_CONFIGS
from k3fuse.models.kimi_config import read_kimi_config
from k3fuse.models.kimi_parameters import kimi_parameters
from k3fuse.parameter import ParameterSpec, TensorSpec
from tests.checkpoint.conftest import small_rule, small_specs

CONFIG = {"eos_token_id": 2, "bos_token_id": 1}


def test_k3_tiny_is_a_valid_checkpoint(k3_tiny: Path) -> None:
    config = BUILTIN_CONFIGS["kimi-k3-tiny"]
    files = sorted(path.name for path in k3_tiny.iterdir())
    assert files == [
        "config.json",
        "generation_config.json",
        *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    assert [path for path in k3_tiny.parent.iterdir() if path != k3_tiny] == []
    checkpoint = open_checkpoint(k3_tiny)
    assert checkpoint.notes == []
    assert read_kimi_config(checkpoint.config, "config.json") == config
    specs = kimi_parameters(config, checkpoint.dtypes)
    report = audit(checkpoint, specs, tied=False, values=True)
    index = json.loads((k3_tiny / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report.nbytes
    generation = json.loads((k3_tiny / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2}
    sizes = [path.stat().st_size for path in k3_tiny.glob("*.safetensors")]
    assert max(sizes) < 1.3 * min(sizes)


def test_k3_tiny_statistics(k3_tiny: Path) -> None:
    checkpoint = open_checkpoint(k3_tiny)
    loaded = {
        spec.path: load_parameter(checkpoint, spec)
        for spec in kimi_parameters(BUILTIN_CONFIGS["kimi-k3-tiny"])
    }
    layer = "model.layers.1"
    q_proj = loaded[f"{layer}.self_attn.q_proj.weight"].float()
    assert q_proj.std().item() == pytest.approx(128**-0.5, rel=0.05)
    a_log = loaded[f"{layer}.self_attn.A_log"]
    assert a_log[:8].abs().min() > 0
    assert not a_log[8:].any()
    norm = loaded[f"{layer}.input_layernorm.weight"].float()
    assert norm.mean().item() == pytest.approx(1, abs=0.05)
    scale = loaded[f"{layer}.block_sparse_moe.experts.w1_scale"]
    assert torch.bincount(scale.view(-1).int()).nonzero().view(-1).equal(torch.arange(122, 125))
    packed = loaded[f"{layer}.block_sparse_moe.experts.w1_packed"]
    assert torch.bincount(packed.view(-1).int(), minlength=256).min() > 0


@pytest.mark.parametrize("shards", [1, 2, 8])
def test_values_do_not_depend_on_shards(tmp_path: Path, small: Path, shards: int) -> None:
    target = tmp_path / "t"
    synthesize(small_specs(), CONFIG, target, init=small_rule, shards=shards)
    assert len(list(target.glob("*.safetensors"))) == shards
    checkpoint, other = open_checkpoint(target), open_checkpoint(small)
    for spec in small_specs():
        assert torch.equal(load_parameter(checkpoint, spec), load_parameter(other, spec))


def test_seed_and_name_decide(tmp_path: Path) -> None:
    spec = TensorSpec("a", (4, 4), "F32")
    first = draw_tensor(spec, "fan_in", 0)
    assert torch.equal(first, draw_tensor(spec, "fan_in", 0))
    assert not torch.equal(first, draw_tensor(spec, "fan_in", 1))
    assert not torch.equal(first, draw_tensor(TensorSpec("b", (4, 4), "F32"), "fan_in", 0))
    with pytest.raises(ValueError, match="unknown rule"):
        draw_tensor(spec, "ones", 0)


def test_same_seed_writes_the_same_bytes(tmp_path: Path, small: Path) -> None:
    target = tmp_path / "t"
    synthesize(small_specs(), {"model_type": "small"}, target, init=small_rule, shards=2)
    for path in small.iterdir():
        assert (target / path.name).read_bytes() == path.read_bytes()


def test_bad_targets(tmp_path: Path) -> None:
    used = tmp_path / "used"
    used.mkdir()
    (used / "keep").write_text("x")
    for target, word in [(used, "not an empty"), (used / "keep", "not an empty")]:
        with pytest.raises(InputError, match=word):
            synthesize(small_specs(), CONFIG, target, init=small_rule)
    with pytest.raises(InputError, match="cannot be created"):
        synthesize(small_specs(), CONFIG, used / "keep" / "b", init=small_rule)
    for shards in (0, 9):
        with pytest.raises(InputError, match="expected 1 to 8"):
            synthesize(small_specs(), CONFIG, tmp_path / "t", init=small_rule, shards=shards)
    huge = TensorSpec("huge", (1 << 50,), "U8")
    with pytest.raises(InputError, match="are free"):
        synthesize(
            [ParameterSpec("huge", huge.shape, "U8", (huge,))], CONFIG, tmp_path / "t", init=str
        )
    assert [path.name for path in tmp_path.iterdir()] == ["used"]
    assert (used / "keep").read_text() == "x"


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    seen: list[int] = []

    def interrupt(nbytes: int) -> None:
        seen.append(nbytes)
        if len(seen) == 5:
            raise KeyboardInterrupt

    target = tmp_path / "t"
    target.mkdir()  # an empty target is fine
    with pytest.raises(KeyboardInterrupt):
        synthesize(small_specs(), CONFIG, target, init=small_rule, shards=2, progress=interrupt)
    assert list(tmp_path.iterdir()) == [target]
    assert list(target.iterdir()) == []
    synthesize(small_specs(), CONFIG, target, init=small_rule)
    assert (target / "config.json").is_file()
