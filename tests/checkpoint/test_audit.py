from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]

from k3fuse.checkpoint.audit import audit
from k3fuse.checkpoint.files import open_checkpoint
from k3fuse.errors import CheckpointError
from k3fuse.parameter import ParameterSpec, TensorSpec
from tests.checkpoint.conftest import small_specs

HEAD = "lm_head.weight"
EMBED = "model.embed_tokens.weight"
SCALE = "experts.1.w1_scale"


def rewrite(source: Path, target: Path, **changes: torch.Tensor | None) -> Path:
    """`source` as one file with tensors replaced, added or (None) left out."""
    target.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for shard in source.glob("*.safetensors"):
        tensors |= load_file(shard)
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text("{}")
    return target


def problems(directory: Path, *, tied: bool = False, values: bool = False) -> str:
    with pytest.raises(CheckpointError) as error:
        audit(open_checkpoint(directory), small_specs(), tied=tied, values=values)
    return str(error.value)


def test_a_good_checkpoint_passes(small: Path) -> None:
    report = audit(open_checkpoint(small), small_specs(), tied=False, values=True)
    assert (report.tensors, report.nbytes) == (8, 2 * 96 + 3 * (64 + 4))
    assert (report.aliases, report.notes, report.ignored_tensors) == ((), (), 0)


def test_other_modalities_are_counted_not_checked(small: Path, tmp_path: Path) -> None:
    changed = rewrite(small, tmp_path / "c", **{"vision_tower.w": torch.zeros(5)})
    report = audit(open_checkpoint(changed), small_specs(), tied=False)
    assert (report.ignored_tensors, report.ignored_bytes) == (1, 20)


def test_all_problems_at_once(small: Path, tmp_path: Path) -> None:
    changed = rewrite(
        small,
        tmp_path / "c",
        **{
            SCALE: None,
            "extra.weight": torch.zeros(1),
            EMBED: torch.zeros(8, 5, dtype=torch.bfloat16),
            "experts.0.w1_packed": torch.zeros(4, 16),
        },
    )
    text = problems(changed)
    assert "4 problem(s)" in text
    assert f"{SCALE}: missing" in text
    assert "extra.weight (model.safetensors): extra" in text
    assert "shape [8, 5], not [8, 6]" in text
    assert "experts.0.w1_packed (model.safetensors): dtype F32, not U8" in text


def test_a_long_list_is_cut(small: Path, tmp_path: Path) -> None:
    extra = {f"extra.{i:02d}": torch.zeros(1) for i in range(25)}
    text = problems(rewrite(small, tmp_path / "c", **extra))
    assert "25 problem(s)" in text
    assert "extra.19" in text
    assert "extra.20" not in text
    assert "and 5 more" in text


def test_nan_scale(small: Path, tmp_path: Path) -> None:
    scale = torch.full((4, 1), 123, dtype=torch.uint8)
    scale[2] = 255
    changed = rewrite(small, tmp_path / "c", **{SCALE: scale})
    audit(open_checkpoint(changed), small_specs(), tied=False)
    text = problems(changed, values=True)
    assert SCALE in text
    assert "NaN" in text


def tied_specs() -> list[ParameterSpec]:
    embed, *middle, head = small_specs()
    return [embed, *middle, replace(head, sources=embed.sources)]


def test_tied_without_head(small: Path, tmp_path: Path) -> None:
    changed = rewrite(small, tmp_path / "c", **{HEAD: None})
    report = audit(open_checkpoint(changed), tied_specs(), tied=True)
    assert report.aliases == (HEAD,)
    assert report.tensors == 7


def test_untied_without_head(small: Path, tmp_path: Path) -> None:
    text = problems(rewrite(small, tmp_path / "c", **{HEAD: None}))
    assert f"{HEAD}: missing (the config has tie_word_embeddings false)" in text


def test_tied_with_a_head_of_its_own(small: Path, tmp_path: Path) -> None:
    report = audit(open_checkpoint(small), small_specs(), tied=True)
    assert any(HEAD in note for note in report.notes)
    wrong = torch.zeros(8, 5, dtype=torch.bfloat16)
    assert HEAD in problems(rewrite(small, tmp_path / "c", **{HEAD: wrong}), tied=True)
    # a caller that ignores the stored head hears of it
    with pytest.raises(CheckpointError, match=r"lm_head\.weight .* extra"):
        audit(open_checkpoint(small), tied_specs(), tied=True)


def test_wrong_spec_dtype_is_both_ways(small: Path) -> None:
    specs = small_specs()
    specs[0] = replace(specs[0], sources=(TensorSpec(EMBED, (8, 6), "F32"),))
    with pytest.raises(CheckpointError, match="dtype BF16, not F32"):
        audit(open_checkpoint(small), specs, tied=False)
