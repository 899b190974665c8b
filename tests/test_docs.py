"""Checks of docs/: the shown code runs, and docs/migrate.md computes what the replaced code does.

The reference and the design list everything that exists."""

import doctest
import gzip
import importlib
import inspect
import itertools
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import launched
import pytest
import test_importing
import torch
from conftest import require_package
from public_models import annotated, jadore, notebook
from torch import nn
from torch.nn import functional as F

import fastattn
import fastattn_command
from fastattn.cli import COMMANDS
from fastattn.translation import checkpoint
from fastattn.translation.export import to_ctranslate2, to_huggingface

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGE = (DOCS / "migrate.md").read_text()
# Blocks of migrate.md by their heading and their number below it.
BLOCKS = {
    f"{section.splitlines()[0]} {number}": block
    for section in PAGE.split("\n## ")[1:]
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", section, re.DOTALL), 1)
}


PROGRAMS = {
    "From The Annotated Transformer": lambda: annotated.make_model(40, 40, N=2, d_model=32, d_ff=40, h=4),
    "From jadore801120/attention-is-all-you-need-pytorch": lambda: jadore.Transformer(
        40, 40, 0, 0, d_word_vec=32, d_model=32, d_inner=40, n_layers=2, n_head=4, d_k=8, d_v=8
    ),
    "From the notebook with `AttentionHead`": lambda: notebook.Transformer(40, 40, 32, N=2, h=4, d_model=32),
}


def run(name):
    """Run the block and return what it defines."""
    if "transformers" in BLOCKS[name]:
        require_package("transformers")
    section = name.rpartition(" ")[0]
    namespace = {"model": PROGRAMS[section]()} if section in PROGRAMS else {}
    exec(BLOCKS[name], namespace)
    return SimpleNamespace(**namespace)


@pytest.mark.parametrize("name", BLOCKS)
def test_block_runs(name):
    run(name)


@pytest.mark.parametrize("section", PROGRAMS)
def test_programs_are_patched(section):
    """The first block of a section patches the program, its attention included."""
    model = run(f"{section} 1").model
    assert any("Attention" in family for family in fastattn.unpatch(model).changed.values())


PAGES = {
    str(page.relative_to(DOCS)): re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    for page in sorted(DOCS.rglob("*.md"))
    if page.name not in ("migrate.md", "design.md")  # the design's block lists signatures
}
EXPORTED = PAGES.pop("translate.md")


@pytest.mark.parametrize("page", [page for page, blocks in PAGES.items() if blocks])
def test_page_runs(page):
    """A page's blocks run one after the other in one namespace, as a reader would paste them."""
    namespace = {"__name__": "__main__"}
    for block in PAGES[page]:
        exec(block, namespace)


@pytest.mark.slow
def test_exported_models_are_used_as_shown(tmp_path, monkeypatch, capsys):
    """The blocks of docs/translate.md translate by the other programs. Marian's model is random."""
    for package in ("ctranslate2", "transformers"):
        require_package(package)
    monkeypatch.chdir(tmp_path)
    model, tokenizer = checkpoint.load(checkpoint.PRETRAINED)
    to_ctranslate2(model, tokenizer, "model-ct2")
    checkpoint.save_int8(model, tokenizer, None, "model-int8")
    to_huggingface(fastattn.Transformer(replace(model.config, norm_first=False)), tokenizer, "model-hf")
    capsys.readouterr()
    for block in EXPORTED:
        exec(block, {})
    by_ctranslate2, by_marian, by_int8 = capsys.readouterr().out.splitlines()
    assert by_ctranslate2 == by_int8 == "['Y el rey salió.']"
    assert re.fullmatch(r"\[['\"].+['\"]\]", by_marian)


def commands(page):
    """Return the arguments of each `fastattn` call in the page's shell blocks."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [found[1] for line in lines if (found := re.search(r"(?:^|\| |--no-python +)fastattn (.*)$", line))]


COMMAND_LINES = [
    (page, line)
    for page in ("README.md", *(str(path.relative_to(ROOT)) for path in sorted(DOCS.rglob("*.md"))))
    for line in commands(page)
]


def test_commands_are_understood():
    """The parser accepts each command with the options that the page shows, in this combination."""
    assert {fastattn_command.parse(shlex.split(line)).command for _, line in COMMAND_LINES} <= set(COMMANDS)


def test_the_commands_page_names_and_shows_them():
    table = (DOCS / "translate.md").read_text().partition("## Translate")[0]
    assert sorted(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|([^|]*)\|", table, re.MULTILINE)))) == sorted(COMMANDS)
    shown = {line.split()[0] for line in commands("docs/translate.md")}
    assert shown == set(COMMANDS) - {"prepare"}  # docs/reproduce.md shows it


DOCUMENTED = [
    name for page in sorted((DOCS / "api").glob("*.md")) for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M)
]


def test_the_reference_lists_every_public_name():
    listed = [name.removeprefix("fastattn.") for name in DOCUMENTED if name.count(".") == 1]
    own = [module for name, module in sys.modules.items() if name.startswith("fastattn.")]
    public = {name for module in own for name in getattr(module, "__all__", ()) if hasattr(fastattn, name)}
    alias = "MultiheadAttention"
    assert sorted((*listed, alias)) == sorted(public | {"Transformer", "TransformerConfig"})


@pytest.mark.parametrize("name", DOCUMENTED)
def test_examples_of_the_reference_run(name):
    """Every name of the reference has an example in its docstring, which prints what it shows."""
    if "huggingface" in name:
        require_package("transformers")
    module, _, attribute = name.rpartition(".")
    documented = getattr(importlib.import_module(module), attribute)
    names = {"torch": torch, "fastattn": fastattn} | {own: getattr(fastattn, own) for own in dir(fastattn)}
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(documented), names, name, None, None)
    failures: list[str] = []
    doctest.DocTestRunner().run(example, out=failures.append)
    assert example.examples
    assert failures == []


@pytest.mark.parametrize("page", ["docs/troubleshooting.md", "CONTRIBUTING.md"])
def test_pages_name_what_ci_requires(page):
    names = re.search(r"FASTATTN_REQUIRE=(\S+)", (ROOT / ".ci/run").read_text())[1].split(",")
    (line,) = (line for line in (ROOT / page).read_text().splitlines() if "`FASTATTN_REQUIRE" in line)
    assert sorted(set(re.findall(r"[a-z0-9]+", line)) & set(names)) == sorted(names)


def anchors(page):
    """Return the anchors of a page's headings, as mkdocs forms them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def broken_links(page):
    """Return the links to missing files and missing headings."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if "://" not in link and (not target.exists() or (anchor and anchor not in anchors(target))):
            broken.append(link)
    return broken


def test_links_of_the_repository_exist():
    assert not [(page, broken) for page in (*ROOT.glob("*.md"), *DOCS.rglob("*.md")) if (broken := broken_links(page))]


# Lines that are left out. The tests of packaging cover installation. The tests of the command and the benchmarks cover
# those that show or measure something for minutes.
APART = re.compile(r"-m venv|pip install|fastattn (demo|bench)")
# Replacements that shorten the commands: fewer updates, fewer processes, a smaller model.
SHORTER = (
    ("--max-minutes 10", "--max-steps 2 --save-every 1"),
    ("--nproc-per-node 8", "--nproc-per-node 2"),
    ("--preset base", "--preset tiny --max-steps 2"),
)
# What the commands of a page make.
MADE = {
    "docs/translate.md": [
        *("test.es", "sampled.es", "heads.svg", "model/best", "loss.svg", "model-mean", "model-ct2", "model-int8"),
        "imported",
    ],
    "docs/training.md": ["run/best"],
    "docs/migrate.md": ["imported"],
}
# tests/test_prepare.py runs docs/reproduce.md on its own archives.
RUN = ["README.md", "docs/install.md", "docs/quickstart.md", *MADE]


def given_files(folder):
    """Make the files that the pages' commands read: the verses, a user's text, a checkpoint of another program."""
    verses = folder / "fastattn/verses"
    verses.mkdir(parents=True)
    for path in (ROOT / "fastattn/verses").iterdir():
        if path.suffix == ".gz":
            with gzip.open(path) as whole, gzip.open(verses / path.name, "wb") as part:
                part.writelines(itertools.islice(whole, 400))
        else:
            (verses / path.name).write_text("".join(path.read_text().splitlines(keepends=True)[:8]))
    for name, source in itertools.product(("train", "dev"), (("en", "en"), ("de", "es"))):
        text = (ROOT / f"fastattn/verses/dev.{source[1]}").read_text().splitlines(keepends=True)
        (folder / f"{name}.{source[0]}").write_text("".join(text[: 400 if name == "train" else 8]))
    test_importing.program("jadore", folder / "trained.chkpt")
    (folder / "model.chkpt").symlink_to("trained.chkpt")
    source, target = test_importing.word_files("jadore", folder)
    (folder / "words.de").symlink_to(source)
    (folder / "words.en").symlink_to(target)


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_commands_of_a_page_run(page, tmp_path):
    """A page's shell blocks run one after the other in one folder, unchanged except for omitted and shortened lines."""
    text = (ROOT / page).read_text().replace("\\\n", " ").replace("&&\n", "&& ")
    lines = "".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).splitlines()
    script = "\n".join(line for line in lines if not APART.search(line))
    for long, short in SHORTER:
        script = script.replace(long, short)
    if "ctranslate2" in script:
        require_package("ctranslate2")
    given_files(tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "torchrun").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m torch.distributed.run "$@"\n')
    (programs / "torchrun").chmod(0o755)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{programs}:{os.environ['PATH']}"}
    with launched.command(programs / "fastattn"):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
    assert ("Y dijo Dios: Sea la luz, y fué la luz.\n" in done.stdout) == ("Let there be light" in script)
    assert [name for name in MADE.get(page, []) if not (tmp_path / name).exists()] == []


def test_every_page_with_commands_has_them_run():
    assert {page for page, _ in COMMAND_LINES} == {*RUN, "docs/reproduce.md"}


def test_pages_show_the_recorded_results(monkeypatch):
    """The pages hold the current text of everything that `make tables` writes between markers, and the pictures the
    figures that it draws."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    pages = importlib.import_module("pages")
    tables = pages.tables()
    assert len(tables) >= 10
    stale = [
        f"{name} in {page}"
        for (page, name), text in tables.items()
        if f"<!-- {name}:begin -->\n{text}\n<!-- {name}:end -->\n" not in (ROOT / page).read_text()
    ]
    assert stale == [], "`make tables` writes them"
    for name, drawn in pages.pictures().items():
        source = f"<dc:source>{pages.source(*drawn)}</dc:source>"
        assert source in (DOCS / "images" / name).read_text(), "`make tables` draws it"


def test_the_variables_of_the_environment_are_in_one_table():
    """The table lists every environment variable that the code reads, and no other."""
    folders = [ROOT / name for name in ("fastattn", "csrc", "tests", "tools", "benchmarks")]
    sources = [path for folder in folders for kind in ("py", "sh", "cpp", "h") for path in folder.rglob(f"*.{kind}")]
    read = re.compile(r"(?:environ\.get\(|environ\[|getenv\()\s*\"(FASTATTN_[A-Z_]+)\"|\$\{(FASTATTN_[A-Z_]+)[:}]")
    used = {a or b for path in sources for a, b in read.findall(path.read_text())}
    table = (DOCS / "troubleshooting.md").read_text().partition("## Environment variables")[2]
    assert {"FASTATTN_BUILD", "FASTATTN_CPU_ISA"} <= used
    assert used == set(re.findall(r"^\| `(FASTATTN_[A-Z_]+)`", table, re.MULTILINE))


def test_stops_of_the_designs_walk_exist():
    """`path: name` in the design names something that stands in the file with that end of its path."""
    stops = re.findall(r"`([\w/]+\.(?:py|h|cpp|cu)): ([^`]+)`", (DOCS / "design.md").read_text())
    assert len(stops) > 10
    for file, name in stops:
        found = [path for top in ("fastattn", "csrc", "tests") for path in (ROOT / top).rglob(Path(file).name)]
        text = "".join(path.read_text() for path in found if path.as_posix().endswith(f"/{file}"))
        assert all(re.search(rf"\b{word}\b", text) for word in re.findall(r"\w+", name)), (file, name)


def softmax_of(scores, mask):
    return F.softmax(scores if mask is None else scores.masked_fill(mask == 0, -1e9), dim=-1)


@pytest.mark.parametrize("mask", [None, torch.ones(2, 1, 10, 10).tril()], ids=["all", "causal"])
def test_programs_get_the_attention_of_their_own(mask):
    q, k, v = torch.randn(3, 2, 8, 10, 64)
    dropout = nn.Dropout(0.1).eval()
    found, _ = run("From The Annotated Transformer 2").attention(q, k, v, mask, dropout)
    torch.testing.assert_close(found, softmax_of(q @ k.mT / 8, mask) @ v)
    module = SimpleNamespace(dropout=dropout, training=False, temperature=3.0)
    found, _ = run("From jadore801120/attention-is-all-you-need-pytorch 2").forward(module, q, k, v, mask)
    torch.testing.assert_close(found, softmax_of(q @ k.mT / 3, mask) @ v)
    q, k, v, mask = q[:, 0], k[:, 0], v[:, 0], mask if mask is None else mask[:, 0]
    found = run("From the notebook with `AttentionHead` 2").scaled_dot_product_attention(q, k, v, 7.0, dropout, mask)
    torch.testing.assert_close(found, softmax_of(q @ k.mT / 7, mask) @ v)


def test_the_notebooks_heads_at_once():
    """Weights that are copied as the page shows make one module compute all heads of the notebook."""
    heads = [[torch.randn(size, 32) for size in (6, 6, 5)] for _ in range(4)]
    out, x, temperature = torch.randn(32, 20), torch.randn(2, 10, 32), 36
    module = fastattn.MultiHeadAttention(32, 4, bias=False, batch_first=True, head_dim=6, value_head_dim=5)
    queries, keys, values = (torch.cat(weights) for weights in zip(*heads, strict=True))
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.cat((queries * (6**0.5 / temperature), keys, values)))
        module.out_proj.weight.copy_(out)
        found, _ = module(x, x, x, need_weights=False)
    parts = [softmax_of((x @ q.T) @ (x @ k.T).mT / temperature, None) @ (x @ v.T) for q, k, v in heads]
    wanted = torch.cat(parts, -1) @ out.T
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())


def test_the_design_lists_the_public_signatures():
    block = re.search(r"## 2. Public surface\n.*?```python\n(.*?)```", (DOCS / "design.md").read_text(), re.DOTALL)[1]
    lines = re.sub(r" *#.*", "", block).replace("\n  ", " ").splitlines()  # one signature per line
    functions = [line.partition("(")[::2] for line in lines if re.fullmatch(r"[a-z_]+\(.*=.*\)", line)]
    assert len(functions) == 8
    for name, listed in functions:
        actual = inspect.signature(getattr(fastattn, name))
        untyped = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in actual.parameters.values()]
        assert inspect.signature(eval(f"lambda {listed[:-1]}: None")) == inspect.Signature(untyped), name
