"""Rules of imports and includes: they point in one direction, as the table in docs/design.md, section 3, shows."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import fastattn
from fastattn.backends import TABLE
from fastattn.backends.schema import OWN

ROOT = Path(__file__).resolve().parent.parent
STEMS = {"attention", "softmax_dropout", "layer_norm", "dropout"}
# Names of the layers, lowest first. A file may import from its own layer and from those below.
DESIGN = (ROOT / "docs" / "design.md").read_text()
LAYERS = [
    re.findall(r"`([\w./]+)`", row)
    for row in reversed(re.findall(r"\| Python, .*\n((?:\|.*\n)+)", DESIGN)[0].splitlines()[1:])
]
# Files of these folders import each other by file name.
FOLDERS = ("csrc", "csrc.tests", "tools", "benchmarks", "tests", "examples")
MODULES = sorted((ROOT / "fastattn").rglob("*.py"))
OTHERS = [path for folder in FOLDERS for path in (ROOT / folder.replace(".", "/")).rglob("*.py")] + [*ROOT.glob("*.py")]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer(module: str) -> int:
    """Return the level of the layer whose name is the longest prefix of `module`.

    The package itself is a layer of one module."""
    matches = [
        (len(name), level)
        for level, names in enumerate(LAYERS)
        for name in names
        if module == name or (name != "fastattn" and module.startswith(name + "."))
    ]
    assert matches, f"{module} belongs to no layer: add it to the table in docs/design.md"
    return max(matches)[1]


def imports(path: Path) -> set[str]:
    """Return every module that the file imports, in functions too.

    `from package import name` counts as package.name if that is a module."""
    module = module_name(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {known(alias.name, package) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                name = known(f"{base}.{alias.name}", package)
                found.add(name if name in NAMES else known(base, package))
    return found


def known(name: str, package: str) -> str:
    """Return the module's name from the repository's root on, if it is one of the repository's."""
    places = (f"{folder}.{name}" for folder in (package, *FOLDERS) if folder in FOLDERS)
    return next((place for place in places if place in NAMES), name)


NAMES = {module_name(path) for path in (*MODULES, *OTHERS)}
PACKAGE = {module_name(path) for path in MODULES}


@pytest.fixture(scope="module")
def imported():
    """The modules that each module of the repository imports, by name."""
    return {module_name(path): imports(path) for path in (*MODULES, *OTHERS)}


def test_imports_go_down(imported):
    up = {(name, other) for name in imported for other in imported[name] & NAMES if layer(other) > layer(name)}
    assert not up, f"these import from a layer above their own: {sorted(up)}"


PRIVATE = {
    "_torch_private": r"torch(?:\.[a-z]\w*)*(?:\.| import )_[a-zA-Z]",
    "_triton_private": r"from triton\.(?:compiler|runtime|backends)\b|JITFunction|\.(?:fn|constexprs)\b",
}


# Private attributes that classes of other packages offer: named tuples, transformers' models, and torch's attention,
# whose initialisation a subclass may override; and torch's count of in-place changes.
FOREIGN = {
    "_fields", "_make", "_replace", "_can_set_attn_implementation", "_supports_sdpa", "_reset_parameters", "_version",
}  # fmt: skip


@pytest.mark.parametrize("module", PRIVATE)
def test_private_parts_are_in_one_module(module):
    """Only _torch_private.py names private parts of torch, and only _triton_private.py those of Triton."""
    using = {path.stem for path in MODULES if re.search(PRIVATE[module], path.read_text())}
    assert using == {module}


def test_private_attributes_are_the_packages_own():
    """Elsewhere, every private attribute that is read is a method of a class of fastattn, or set by it."""
    read, own = set(), set()
    for path in MODULES:
        if path.stem not in PRIVATE:
            nodes = list(ast.walk(ast.parse(path.read_text())))
            attributes = [node for node in nodes if isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr)]
            read |= {node.attr for node in attributes if isinstance(node.ctx, ast.Load)}
            own |= {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
            classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
            own |= {part.name for node in classes for part in node.body if isinstance(part, ast.FunctionDef)}
    assert read - own == FOREIGN


def test_backends_are_reached_through_their_table(imported):
    """Only fastattn.backends reaches into a backend. Code that several backends or the ops need is in fastattn/backends
    itself."""
    inside = {f"fastattn.backends.{name}" for name in TABLE}
    reached = {
        (module, name)
        for module in PACKAGE - {"fastattn.backends"}
        for name in inside
        if not f"{module}.".startswith(f"{name}.")
        and any(f"{other}.".startswith(f"{name}.") for other in imported[module])
    }
    assert not reached


# The loss needs the statistics of its softmax, which the public function does not return.
EXCEPTIONS = {"SoftmaxDropoutArgs", "softmax_dropout_op"}


def test_translation_imports_what_is_public():
    """fastattn.translation imports public names and the modules that serve every layer, such as _torch_private."""
    below = ("fastattn.backends", "fastattn.ops", "fastattn.nn", "fastattn.integrations")
    found = {
        alias.name
        for path in MODULES
        if module_name(path).startswith("fastattn.translation")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and f"{node.module}".startswith(below)
        for alias in node.names
    }
    assert "MultiHeadAttention" in found
    assert found <= set(dir(fastattn)) | EXCEPTIONS


def test_imports_have_no_circle(imported):
    TopologicalSorter({name: wanted & NAMES - {name} for name, wanted in imported.items()}).prepare()


def includes(path: Path) -> set[Path]:
    """Return the files of csrc that the file includes by name."""
    found = set()
    for included in re.findall(r'#include "([^"]+)"', path.read_text()):
        target = (path.parent / included).resolve()
        found.add(target if target.exists() else (ROOT / "csrc" / included).resolve())
    return found


SOURCES = {
    path: includes(path)
    for folder in ("common", "cpu", "cuda", "launch", "bindings")
    for path in sorted((ROOT / "csrc" / folder).rglob("*"))
    if path.suffix in {".h", ".cpp", ".cu"}
}


def folder_of(path: Path) -> str:
    return path.relative_to(ROOT / "csrc").parts[0]


def test_includes_go_down():
    pairs = {(folder_of(path), folder_of(other)) for path in SOURCES for other in SOURCES[path]}
    assert all(folder == other or layer(f"csrc/{other}") < layer(f"csrc/{folder}") for folder, other in pairs), pairs


def test_includes_have_no_circle():
    assert len(SOURCES) > 30
    TopologicalSorter(SOURCES).prepare()


def test_imports_are_read_right(imported):
    """The reader of imports, which the tests above use, understands every form of an import."""
    assert layer("fastattn.ops.attention") == layer("fastattn.backends.cpu") + 1
    assert layer("fastattn") == layer("fastattn.nn") + 2
    assert "fastattn.backends.native" in imported["fastattn.info"]
    assert "fastattn.ops.attention" in imported["fastattn.nn.attention"]
    assert "tools.sass.code" in imported["tools.aot_gate"]
    assert {"benchmarks.against", "fastattn"} <= imported["benchmarks.decoding"]


def test_every_module_serves_users(imported):
    """Every module is reachable from what a user starts, because the wheel holds the whole package. Programs for
    developers are in tools/."""
    entries = {"fastattn", "fastattn.__main__", "fastattn.cli", "fastattn.integrations.huggingface"}
    entries |= {name for name in PACKAGE if name.rpartition(".")[2] in STEMS}  # a backend's are imported by name
    reached: set[str] = set()
    while entries:
        reached |= entries
        entries = {name for module in entries for name in imported[module] & PACKAGE} - reached
    idle = {name for name in PACKAGE - reached if not any(other.startswith(f"{name}.") for other in reached)}
    assert not idle, f"nothing that a user starts imports {sorted(idle)}"


def test_stems():
    """An operation has the same file name wherever it appears."""

    def stems(folder, pattern):
        names = {path.stem.removesuffix("_backward") for path in (ROOT / folder).glob(pattern)}
        return names - {"__init__", "attention_rows", "dispatch", "limits", "launcher"}

    assert stems("fastattn/ops", "*.py") >= STEMS
    assert stems("fastattn/backends/reference", "*.py") == STEMS
    assert stems("csrc/cpu", "*.cpp") == STEMS
    assert stems("csrc/launch", "*.cpp") == STEMS
    assert stems("csrc/bindings", "*.cpp") == STEMS | {"varlen_attention", "library", "runtime"}


def test_the_contract_names_what_the_libraries_define_themselves():
    """A library without one of these operations is of another version, and is not used."""
    sources = "".join(path.read_text() for path in (ROOT / "csrc/bindings").glob("*.cpp"))
    assert sorted(re.findall(r'm\.def\("(\w+)\(', sources)) == sorted(OWN)


def test_torch_headers_only_in_bindings():
    including = {
        path.relative_to(ROOT / "csrc").as_posix()
        for path in (ROOT / "csrc").rglob("*")
        if path.suffix in {".h", ".cpp", ".cu"} and re.search(r"#include\s*[<\"](torch|ATen|c10)/", path.read_text())
    }
    assert including == {"bindings/cuda.h", "bindings/tensors.h", "tests/emulation/torch.cpp"}


def test_kernels_use_c_headers_only():
    """Kernels include only C headers.

    Code for a wide instruction set must not contain a template of the standard library. The linker could choose that
    copy for everyone, and an older machine would meet an illegal instruction."""
    allowed = {"stddef.h", "stdint.h", "string.h", "math.h", "float.h", "limits.h", "immintrin.h", "arm_neon.h"}
    kernels = {path for path in SOURCES if folder_of(path) in ("common", "cpu") and path.stem != "dispatch"}
    for path in kernels:
        assert set(re.findall(r"#include\s*<([^>]+)>", path.read_text())) <= allowed, path


@pytest.mark.torch_version
def test_import_is_light(python):
    """`import fastattn` initialises no CUDA, imports neither Triton nor DTensor nor a compiler of torch, and needs none
    of the extras. `import torch` already loads all that the registry of attention imports.

    A separate process imports the tested fastattn. The checkout in which pytest started may have no compiled
    kernels."""
    found = python("""
        import sys
        import torch
        before = set(sys.modules)
        def refuse(*args, **kwargs):
            raise RuntimeError("CUDA was initialised")
        torch.cuda._lazy_init = refuse
        extras = "matplotlib", "numpy", "sacrebleu", "safetensors", "sentencepiece", "tqdm", "transformers"
        for name in (*extras, "triton", "torch.distributed.tensor"):
            if name not in before:
                sys.modules[name] = None
        import fastattn
        heavy = "torch._dynamo", "torch._inductor", "torch.nn.attention"
        assert not [name for name in set(sys.modules) - before if name.startswith(heavy)]
        import fastattn.integrations.huggingface
        import fastattn.nn
        print(fastattn.__file__)
    """)
    assert found == f"{fastattn.__file__}\n"
