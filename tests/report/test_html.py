from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from k3fuse.passes.base import Refusal
from k3fuse.passes.pipeline import PIPELINE
from k3fuse.report.contents import BucketReport
from k3fuse.report.html import render_html
from k3fuse.report.layers import OUTSIDE, layer_lines, representative_layers
from k3fuse.report.slides import ADDED, REMOVED, Slides, make_slides

VOID = {"meta", "input", "br", "hr", "link", "img"}
LOADING = {"src", "href", "data", "action", "poster", "srcset", "xlink:href"}


class Page(HTMLParser):
    """Checks that elements close in order; keeps attributes, ids and text by element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def all_text(self) -> str:
        return "\n".join(text for texts in self.texts.values() for text in texts)

    def ids(self) -> list[str]:
        return [attrs["id"] or "" for _, attrs in self.tags if "id" in attrs]


@pytest.fixture(scope="module")
def text(report: BucketReport) -> str:
    return render_html(report)


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def slides_in(page: Page) -> Slides:
    (raw,) = [t for t in page.texts["script"] if t.startswith("{")]
    data = json.loads(raw)
    slides = {int(layer): codes for layer, codes in data["slides"].items()}
    return Slides(data["passes"], data["lines"], slides)


def test_it_is_well_formed_and_ids_are_unique(page: Page) -> None:
    assert len(set(page.ids())) == len(page.ids())


def test_it_loads_nothing(text: str, page: Page) -> None:
    assert not re.search(r"https?:|url\((?!#)|@import|\bfetch\(|XMLHttpRequest", text)
    assert {tag for tag, _ in page.tags} & {"link", "img", "iframe", "object", "base"} == set()
    assert [attrs for _, attrs in page.tags if LOADING & set(attrs)] == []


def test_it_has_every_pass_and_every_chosen_layer(page: Page, report: BucketReport) -> None:
    slides = slides_in(page)
    assert slides.passes == ["trace", *(item.name for item in PIPELINE)]
    assert set(slides.slides) == set(representative_layers(report.plan))
    assert all(len(s) == len(slides.passes) for s in slides.slides.values())


def test_controls_have_names(page: Page) -> None:
    labelled = {attrs["for"] for tag, attrs in page.tags if tag == "label" and "for" in attrs}
    for tag, attrs in page.tags:
        if tag == "select" or (tag == "input" and attrs.get("type") != "checkbox"):
            assert attrs["id"] in labelled


def test_the_script_uses_ids_that_exist(text: str, page: Page) -> None:
    assert set(re.findall(r'get\("([\w-]+)"\)', text)) <= set(page.ids())


def test_text_is_escaped(report: BucketReport) -> None:
    evil = "</script><script>alert(1)</script>"
    file = next(iter(report.dumps))
    dumps = {**report.dumps, file: report.dumps[file].replace("{\n", f"{{\n  // {evil}\n", 1)}
    refusal = Refusal("dce", f"model.{evil}", f"<b>{evil}", f"%{evil}")
    changed = dataclasses.replace(report, refusals=(refusal,), dumps=dumps)
    text = render_html(changed)
    assert "<script>alert" not in text
    page = Page(text)
    assert len([tag for tag, _ in page.tags if tag == "script"]) == 2
    assert f"<b>{evil}" in page.all_text()
    assert f"  // {evil}" in slides_in(page).lines


def test_every_launch_is_in_the_table_and_chosen_ones_in_the_picture(
    page: Page, report: BucketReport
) -> None:
    launches = report.plan.launches
    rows = [attrs for tag, attrs in page.tags if tag == "tr" and "data-layer" in attrs]
    assert [int(row["data-layer"] or "") for row in rows] == [x.layer for x in launches]
    chosen = representative_layers(report.plan)
    titles = "\n".join(page.texts["title"])
    assert all(
        f"#{i} {x.name} (main)" in titles
        for i, x in enumerate(launches)
        if x.layer in chosen and x.stream == "main"
    )


def test_slides_replay_the_dumps(report: BucketReport) -> None:
    layer = 3
    slides = make_slides(report, [layer, OUTSIDE])
    texts = list(report.dumps.values())
    for index, codes in enumerate(slides.slides[layer]):
        kept = [slides.lines[c // 3] for c in codes if c % 3 != REMOVED]
        assert kept == layer_lines(texts[index], layer)
    for (_, before), (after, codes) in pairwise(enumerate(slides.slides[layer])):
        old = [slides.lines[c // 3] for c in codes if c % 3 != ADDED]
        assert old == [slides.lines[c // 3] for c in before if c % 3 != REMOVED], after


def test_layers_share_out_the_text(report: BucketReport) -> None:
    text = list(report.dumps.values())[-1]
    shared = [layer_lines(text, n) for n in (OUTSIDE, *range(8))]
    assert sum(map(len, shared)) == len(text.splitlines()) - 3  # head, return, closing brace
    assert any("fused @lm_head" in line for line in shared[0] + shared[-1])


def test_a_bundle_without_dumps_still_makes_a_page(report: BucketReport) -> None:
    Page(render_html(dataclasses.replace(report, dumps={})))
