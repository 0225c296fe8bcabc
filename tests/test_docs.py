"""The documentation is executed: commands, examples, generated parts, pass docstrings, links."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from docs import refresh
from k3fuse.cli import app, main
from k3fuse.ir import all_ops, parse_graph, verify
from k3fuse.passes.base import Pass
from k3fuse.passes.pipeline import PIPELINE

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")], key=lambda path: path.as_posix()
)
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))

PROVISION = {"make": "CI runs make itself, on a clean virtual environment"}
"""First words of shell lines that are not run here, and why."""


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    """Fenced code blocks of a page marked with exactly this language."""
    pattern = rf"^```{re.escape(language)}\n(.*?)^```$"
    return re.findall(pattern, page.read_text(), re.MULTILINE | re.DOTALL)


def shell_lines(page: Path) -> list[str]:
    """Commands of the page's sh blocks, with continuation lines joined, without comments."""
    text = "".join(blocks(page, "sh")).replace("\\\n", " ")
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def console_lines(page: Path) -> list[str]:
    """Commands of the page's console blocks: shown with their output, too long to run here."""
    text = "".join(blocks(page, "console")).replace("\\\n", " ")
    return [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ ")]


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if shell_lines(p)], ids=name)
def test_shell_lines_run(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for line in shell_lines(page):
        program, *arguments = shlex.split(line, comments=True)
        if program in PROVISION:
            continue
        if program == "python":
            (script,) = arguments
            assert Path(script).parent.name == "examples", f"{name(page)}: {line}"
            assert Path(script).stem in EXAMPLES, f"{name(page)}: {line}"  # run by their own test
            continue
        assert program == "k3fuse", f"{name(page)}: only k3fuse, make and examples: {line}"
        # Exit code 1 is an answer ("these differ"), not a failure of the command.
        with contextlib.suppress(SystemExit):
            main(arguments)
        printed = capsys.readouterr()
        complaint = printed.err.strip()
        assert not complaint.startswith(("k3fuse:", "Usage")), f"{name(page)}: {line}: {complaint}"
        silent = arguments[0] == "diff" or "-o" in arguments
        if "--json" in arguments:
            keys = set(json.loads(printed.out))
            missing = {key for key in keys if f"`{key}`" not in (ROOT / "docs/cli.md").read_text()}
            assert not missing, f"docs/cli.md: {line}: {sorted(missing)}"
        assert printed.out.strip() or silent, f"{name(page)}: {line}: prints nothing"


@pytest.mark.parametrize("page", [p for p in PAGES if console_lines(p)], ids=name)
def test_console_lines_parse(page: Path) -> None:
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    for line in console_lines(page):
        words = shlex.split(line, comments=True)
        if words[0] == "torchrun":  # starts `python -m k3fuse`
            words = words[words.index("-m") + 1 :]
        program, command, *arguments = words
        assert program == "k3fuse"
        group.commands[command].make_context(command, arguments)


@pytest.mark.parametrize("example", EXAMPLES)
def test_example(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module(f"examples.{example}").main()
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("file", refresh.FILES)
def test_generated_parts_are_fresh(file: str) -> None:
    text = (ROOT / file).read_text()
    assert re.findall(r"<!-- generated: (\w+) -->", text)
    assert refresh.refreshed(text) == text, f"{file} is stale: run python docs/refresh.py"


def links(page: Path) -> Iterator[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    yield from re.findall(r"\]\(([^)\s]+)\)", text)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as code hosts make them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_internal_links_resolve(page: Path) -> None:
    for link in links(page):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name(page)}: no {link}"
        if anchor:
            assert anchor in anchors(target), f"{name(page)}: no heading for {link}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_paths_in_code_exist(page: Path) -> None:
    for path in re.findall(r"`((?:k3fuse|tests|docs|examples)/[\w/.-]+)`", page.read_text()):
        assert (ROOT / path).exists(), f"{name(page)}: no {path}"


@pytest.mark.parametrize("item", PIPELINE, ids=lambda item: item.name)
def test_before_and_after_mention_existing_ops(item: Pass) -> None:
    doc = type(item).__doc__ or ""
    code = "\n".join(line for line in doc.splitlines() if re.search(r"%|fused @", line))
    called = set(re.findall(r"\b([a-z][a-z0-9_]*)\(", code))
    assert called or "fused @" in code
    assert called <= set(all_ops()), f"{item.name}: {sorted(called - set(all_ops()))}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_whole_graphs_are_well_formed(page: Path) -> None:
    for text in blocks(page, "text"):
        if text.startswith("graph "):
            graph = parse_graph(text, name(page))
            verify(graph)


def test_readme_states_the_figures_of_the_tool(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text()
    (command,) = (line for line in shell_lines(ROOT / "README.md") if "roofline" in line)
    with contextlib.suppress(SystemExit):
        main([*shlex.split(command)[1:], "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (
        f"{found['bytes'] / 1e9:.2f} GB / {found['bandwidth_bytes_per_s'] / 1e12:.0f} TB/s" in text
    )
    assert f"= {found['floor_ms']:.2f} ms, {found['tokens_per_s']:.0f} tok/s" in text
    assert f"{found['share']:.0%} of it".replace("%", " %") in text
    assert f"{found['everything_else_us_per_layer']:.1f} us a layer" in text
    assert f"passes   {len(PIPELINE)}," in text
