"""`k3fuse run`: generate tokens from a bundle: on a GPU, on simulated ranks, or by stock torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from k3fuse.checkpoint.safetensors_header import write_safetensors
from k3fuse.cli.device import engine_source, open_engine, require_gpu
from k3fuse.cli.load import Source, parse_ints, use_one_thread
from k3fuse.cli.output import console, emit_json, progress
from k3fuse.errors import InputError
from k3fuse.models.kimi import KimiModel
from k3fuse.parameter import TensorSpec
from k3fuse.runtime.bundle import Bundle, read_bundle
from k3fuse.runtime.executor import Capacity, Executor
from k3fuse.runtime.generate import Generation, generate
from k3fuse.runtime.reference import ReferenceExecutor
from k3fuse.runtime.sampling import SampledExecutor, Sampling
from k3fuse.runtime.stock import StockExecutor

DEVICES = ("cpu", "cuda")
EXECUTORS = ("reference", "stock")
DTYPES = {"bf16": None, "float64": torch.float64}


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("run")(run)


def run(
    bundle: Annotated[Path, typer.Argument(help="Bundle directory.")],
    prompt_ids: Annotated[
        list[str],
        typer.Option(help="Token ids of a prompt, comma-separated; again for each prompt."),
    ],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 16,
    executor: Annotated[
        str, typer.Option(help="reference: the fused plan on simulated ranks; stock: the model.")
    ] = "reference",
    device: Annotated[
        str, typer.Option(help="cpu, or cuda: the compiled kernels on this machine's GPU.")
    ] = "cpu",
    loopback: Annotated[
        bool,
        typer.Option("--loopback", help="cuda: one rank that plays its peers; numbers not real."),
    ] = False,
    random_weights: Annotated[
        int | None,
        typer.Option(help="cuda: random weights of this seed for a built-in model."),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="Draw tokens from the logits over this; 0: greedy.")
    ] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw among so many of the best tokens; 0: all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Draw among the best tokens that reach this probability.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    rows_per_request: Annotated[
        int, typer.Option(help="Rows of a verify step (as compiled by --verify-rows); 1: none.")
    ] = 1,
    dtype: Annotated[
        str, typer.Option(help="bf16: the model's own precision; float64: exact arithmetic.")
    ] = "bf16",
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos", help="End a prompt at the model's end token.")
    ] = False,
    logits: Annotated[
        Path | None, typer.Option(help="Save the logits and hidden rows of every generated token.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Checkpoint, if not where the bundle was compiled from.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Continue prompts: prefill by the stock forward, decode by the fused plan."""
    use_one_thread()
    if executor not in EXECUTORS:
        raise InputError(f"--executor {executor}: choose {' or '.join(EXECUTORS)}")
    if dtype not in DTYPES:
        raise InputError(f"--dtype {dtype}: choose {' or '.join(DTYPES)}")
    if rows_per_request < 1:
        raise InputError(f"--rows-per-request {rows_per_request}: a step has at least one row")
    if logits is not None and (logits.is_dir() or not logits.parent.is_dir()):
        raise InputError(f"--logits {logits}: name a file in a directory that exists")
    if device not in DEVICES:
        raise InputError(f"--device {device}: choose {' or '.join(DEVICES)}")
    if device == "cpu" and (loopback or random_weights is not None):
        raise InputError("--loopback and --random-weights need --device cuda")
    sampling = Sampling(temperature, top_k, top_p, seed)
    if not sampling.greedy and rows_per_request > 1:
        raise InputError(
            f"--temperature {temperature} --rows-per-request {rows_per_request}: sampling verifies "
            "no drafts, leave one out"
        )
    prompts = [_prompt(text) for text in prompt_ids]
    opened = read_bundle(bundle)
    _check_rows(opened, rows_per_request)
    if device == "cuda":
        require_gpu()
    source = engine_source(opened, checkpoint, random_weights)
    stop_token = source.config.eos_token_id if stop_at_eos else None

    def continued(runner: Executor) -> Generation:
        runner = runner if sampling.greedy else SampledExecutor(runner, sampling)
        with progress("generate") as task:
            task.total(len(prompts) * max_new_tokens)
            return generate(
                runner,
                prompts,
                max_new_tokens,
                buckets=sorted({b.batch for b in opened.buckets}),
                stop_token=stop_token,
                rows_per_request=rows_per_request,
                on_step=lambda new: task.advance(sum(len(tokens) for tokens in new.values())),
            )

    if device == "cuda":
        seed_of_weights = random_weights or 0
        with open_engine(opened, source, loopback=loopback, seed=seed_of_weights) as engine:
            generation, where, speaks = continued(engine), engine.mode.label, engine.mode.speaks
        if not speaks:
            return
    else:
        generation = continued(_cpu_executor(opened, source, executor, DTYPES[dtype]))
        where = f"{opened.manifest.tp} simulated ranks" if executor == "reference" else "stock"
    if logits is not None:
        _save(logits, generation)
    if json_output:
        emit_json(
            {
                "tokens": generation.tokens,
                "executor": executor if device == "cpu" else "cuda",
                "ranks": where,
                "tp": opened.manifest.tp,
                "dtype": dtype,
                "rows_per_request": rows_per_request,
                "mean_accepted": generation.mean_accepted,
            }
        )
        return
    for prompt, tokens in zip(prompts, generation.tokens, strict=True):
        console.print(f"{_ids(prompt)} -> {_ids(tokens)}", highlight=False)


def _prompt(text: str) -> list[int]:
    if not text.strip():
        raise InputError("--prompt-ids is empty: a prompt has at least one token id")
    return list(parse_ints(text, "--prompt-ids"))


def _ids(tokens: list[int]) -> str:
    return ",".join(map(str, tokens))


def _check_rows(bundle: Bundle, rows_per_request: int) -> None:
    rows = Capacity.of(bundle.options).rows
    if rows_per_request > 1 and rows_per_request != rows:
        have = f"--verify-rows {rows}" if rows > 1 else "no --verify-rows"
        raise InputError(
            f"--rows-per-request {rows_per_request}: the bundle was compiled with {have}"
        )


def _cpu_executor(bundle: Bundle, source: Source, name: str, dtype: torch.dtype | None) -> Executor:
    with progress("load weights") as task:
        task.total(source.parameter_bytes())
        model = source.module(task.advance)
    assert isinstance(model, KimiModel)
    if dtype is not None:
        model = model.to(dtype)
    if name == "stock":
        return StockExecutor(model, Capacity.of(bundle.options))
    return ReferenceExecutor.load(bundle, model)


def _save(path: Path, generation: Generation) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for index, (rows, hidden) in enumerate(zip(generation.logits, generation.hidden, strict=True)):
        tensors[f"prompt.{index}.logits"] = rows.float()
        tensors[f"prompt.{index}.hidden"] = hidden.float()
    specs = [TensorSpec(name, tuple(tensor.shape), "F32") for name, tensor in tensors.items()]
    try:
        write_safetensors(path, specs, lambda spec: tensors[spec.name])
    except OSError as error:
        raise InputError(f"--logits {path}: cannot be written ({error})") from None
