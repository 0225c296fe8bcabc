from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import nn

from k3fuse.checkpoint import files
from k3fuse.checkpoint.audit import audit
from k3fuse.checkpoint.files import Checkpoint, open_checkpoint
from k3fuse.checkpoint.reader import iter_parameters, load_into, load_parameter
from k3fuse.checkpoint.synth import synthesize
from k3fuse.errors import CheckpointError
from k3fuse.functional.mxfp4 import dequantize
from k3fuse.models.kimi import KimiModel
from k3fuse.models.kimi_builtin import BUILTIN_CONFIGS
from k3fuse.models.kimi_config import read_kimi_config, to_hf_dict
from k3fuse.models.kimi_parameters import kimi_init, kimi_parameters
from k3fuse.parameter import ParameterSpec, TensorSpec
from tests.checkpoint.conftest import small_specs


def one_file(directory: Path, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text("{}")
    return open_checkpoint(directory)


def plain(name: str, tensor: torch.Tensor, dtype: str) -> ParameterSpec:
    shape = tuple(tensor.shape)
    return ParameterSpec(name, shape, dtype, (TensorSpec(name, shape, dtype),))


def test_values_equal_those_of_safetensors(small: Path) -> None:
    expected: dict[str, torch.Tensor] = {}
    for shard in small.glob("*.safetensors"):
        expected |= load_file(shard)
    seen: list[int] = []
    checkpoint = open_checkpoint(small)
    for spec, tensor in iter_parameters(checkpoint, small_specs(), seen.append):
        want = [expected[source.name] for source in spec.sources]
        assert torch.equal(tensor, torch.stack(want) if spec.stacked else want[0])
    assert seen == [96, 3 * 64, 3 * 4, 96]


@pytest.mark.parametrize("index", range(4))
def test_every_slice_equals_the_slice_of_the_whole(small: Path, index: int) -> None:
    checkpoint, spec = open_checkpoint(small), small_specs()[index]
    whole = load_parameter(checkpoint, spec)
    for dim, size in enumerate(spec.shape):
        for start, stop in [(0, size), (0, 1), (size // 2, size), (1, 1)]:
            cut = load_parameter(checkpoint, spec, slice=(dim, start, stop))
            assert torch.equal(cut, whole.narrow(dim, start, stop - start))
        with pytest.raises(ValueError, match="out of range"):
            load_parameter(checkpoint, spec, slice=(dim, 0, size + 1))


def test_pages_that_were_let_go_are_read_again(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "RESIDENT_BYTES", 100)
    checkpoint = open_checkpoint(small)
    first = {spec.path: tensor for spec, tensor in iter_parameters(checkpoint, small_specs())}
    for spec, tensor in iter_parameters(checkpoint, small_specs()):
        assert torch.equal(tensor, first[spec.path])


def test_unaligned_and_empty_tensors(tmp_path: Path) -> None:
    header = (
        b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},'
        b'"b":{"dtype":"F32","shape":[2],"data_offsets":[3,11]},'
        b'"c":{"dtype":"F32","shape":[0],"data_offsets":[11,11]}}'
    )
    value = torch.tensor([1.5, -2.25])
    data = b"abc" + value.numpy().tobytes()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    assert torch.equal(load_parameter(checkpoint, plain("b", value, "F32")), value)
    assert load_parameter(checkpoint, plain("c", torch.empty(0), "F32")).shape == (0,)


def test_a_parameter_may_reshape_and_widen(tmp_path: Path) -> None:
    stored = torch.randn(1, 1, 4, 1).bfloat16()
    checkpoint = one_file(tmp_path, {"A_log": stored})
    spec = ParameterSpec("A_log", (4,), "F32", (TensorSpec("A_log", (1, 1, 4, 1), "BF16"),))
    assert torch.equal(load_parameter(checkpoint, spec), stored.float().reshape(4))


def test_nan_scale_names_the_tensor(tmp_path: Path) -> None:
    scale = torch.tensor([[127, 255], [0, 254]], dtype=torch.uint8)
    checkpoint = one_file(tmp_path, {"w1_scale": scale, "w1_packed": scale.clone()})
    with pytest.raises(CheckpointError, match=r"w1_scale: 1 scale byte.*NaN"):
        load_parameter(checkpoint, plain("w1_scale", scale, "U8"))
    assert torch.equal(load_parameter(checkpoint, plain("w1_packed", scale, "U8")), scale)


def test_low_nibble_is_the_even_element(tmp_path: Path) -> None:
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, :2] = torch.tensor([0x21, 0xF7])
    scale = torch.full((1, 1), 127, dtype=torch.uint8)
    checkpoint = one_file(tmp_path, {"p": packed, "s": scale})
    loaded = [
        load_parameter(checkpoint, plain(n, t, "U8")) for n, t in (("p", packed), ("s", scale))
    ]
    values = dequantize(loaded[0], loaded[1], torch.float32)
    assert torch.equal(values[0, :4], torch.tensor([0.5, 1.0, 6.0, -6.0]))


def test_missing_and_changed_tensors_are_named(small: Path) -> None:
    checkpoint = open_checkpoint(small)
    with pytest.raises(CheckpointError, match="ghost is missing"):
        load_parameter(checkpoint, plain("ghost", torch.empty(1), "F32"))
    name = "lm_head.weight"
    with pytest.raises(CheckpointError, match=r"BF16 \[8, 6\], expected BF16 \[8, 5\]"):
        load_parameter(checkpoint, plain(name, torch.empty(8, 5), "BF16"))


class Pair(nn.Module):
    def __init__(self, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(2, 3, device=device, dtype=dtype))
        self.b = nn.Parameter(torch.empty(2, 3, device=device, dtype=dtype))


def pair_specs(dtype: str = "BF16") -> list[ParameterSpec]:
    return [plain(name, torch.empty(2, 3), dtype) for name in "ab"]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_load_into(tmp_path: Path, device: str) -> None:
    stored = {name: torch.randn(2, 3).bfloat16() for name in "ab"}
    module, seen = Pair(device), list[int]()
    before = module.a
    load_into(module, one_file(tmp_path, stored), pair_specs(), seen.append)
    assert torch.equal(module.a, stored["a"])
    assert torch.equal(module.b, stored["b"])
    assert (module.a is before) == (device == "cpu")
    assert seen == [12, 12]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_shared_source_shares_storage(tmp_path: Path, device: str) -> None:
    a, b = pair_specs()
    module = Pair(device)
    load_into(
        module,
        one_file(tmp_path, {"a": torch.ones(2, 3).bfloat16()}),
        [a, replace(b, sources=a.sources)],
    )
    assert module.a.data_ptr() == module.b.data_ptr()


def test_conversion_must_lose_nothing(tmp_path: Path) -> None:
    stored = {name: torch.tensor([[1.0, 2, 3], [0.5, 0.25, 1.25]]) for name in "ab"}
    module = Pair("cpu", torch.bfloat16)
    load_into(module, one_file(tmp_path, stored), pair_specs("F32"))
    assert torch.equal(module.b.float(), stored["b"])
    stored["b"][0, 0] = 1.001
    with pytest.raises(CheckpointError, match=r"tensor b: F32 values do not fit .*bfloat16"):
        load_into(module, one_file(tmp_path, stored), pair_specs("F32"))
    wide = Pair("cpu", torch.float64)
    load_into(wide, one_file(tmp_path, stored), pair_specs("F32"))
    assert torch.equal(wide.b, stored["b"].double())
    codes = {name: torch.zeros(2, 3, dtype=torch.uint8) for name in "ab"}
    with pytest.raises(CheckpointError, match="U8 cannot become"):
        load_into(wide, one_file(tmp_path, codes), pair_specs("U8"))


def test_module_and_specs_must_match(tmp_path: Path) -> None:
    checkpoint = one_file(tmp_path, {name: torch.ones(2, 3).bfloat16() for name in "ab"})
    with pytest.raises(CheckpointError, match=r"only one of the module and the specs: b$"):
        load_into(Pair("cpu"), checkpoint, pair_specs()[:1])
    a, b = pair_specs()
    with pytest.raises(CheckpointError, match=r"parameter b: .*\[2, 3\].*\[3, 2\]"):
        load_into(Pair("cpu"), checkpoint, [a, replace(b, shape=(3, 2))])


@pytest.mark.parametrize("name", ["kimi-k3-tiny", "kimi-k3-tiny-9", "kimi-linear-tiny"])
def test_specs_are_the_parameters_of_the_model(name: str) -> None:
    config = BUILTIN_CONFIGS[name]
    words = {torch.bfloat16: "BF16", torch.float32: "F32", torch.uint8: "U8"}
    model = KimiModel(config, device="meta")
    have = {path: (tuple(p.shape), words[p.dtype]) for path, p in model.named_parameters()}
    assert {spec.path: (spec.shape, spec.dtype) for spec in kimi_parameters(config)} == have


def test_k3_tiny_loads(k3_tiny: Path) -> None:
    checkpoint = open_checkpoint(k3_tiny)
    config = read_kimi_config(checkpoint.config, "config.json")
    model = KimiModel(config, device="meta")
    specs = kimi_parameters(config, checkpoint.dtypes)
    load_into(model, checkpoint, specs)
    parameters = dict(model.named_parameters())
    for spec in specs:
        assert torch.equal(parameters[spec.path], load_parameter(checkpoint, spec))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tied_model_shares_the_embedding(tmp_path: Path, device: str) -> None:
    config = replace(BUILTIN_CONFIGS["kimi-linear-tiny"], tie_word_embeddings=True)
    target = tmp_path / "tied"
    synthesize(kimi_parameters(config), to_hf_dict(config), target, init=partial(kimi_init, config))
    checkpoint = open_checkpoint(target)
    assert "lm_head.weight" not in checkpoint.tensors
    config = read_kimi_config(checkpoint.config, "config.json")
    specs = kimi_parameters(config, checkpoint.dtypes)
    assert audit(checkpoint, specs, tied=config.tie_word_embeddings).aliases == ("lm_head.weight",)
    model = KimiModel(config, device=device)
    load_into(model, checkpoint, specs)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
