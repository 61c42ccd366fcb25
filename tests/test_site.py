"""The pages become a site without a warning."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from docs.site_links import on_page_markdown

ROOT = Path(__file__).parents[1]


def test_every_page_is_in_the_sites_table_of_contents():
    settings = (ROOT / "mkdocs.yml").read_text().replace("!ENV ", "")  # a tag of MkDocs
    named = set(re.findall(r"\w+\.md", yaml.dump(yaml.safe_load(settings)["nav"])))
    assert named == {page.name for page in (ROOT / "docs").glob("*.md")}


def test_links_out_of_the_site_become_names_of_files():
    page = "[the recipe](../recipes/qwen_vl), [data](data.md#sizes), ![time](../benchmarks/results/train.png)"
    assert on_page_markdown(page) == "the recipe (`recipes/qwen_vl`), [data](data.md#sizes), ![time](figures/train.png)"


@pytest.mark.full
def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert "from_pretrained" in (tmp_path / "api" / "index.html").read_text(encoding="utf-8")
