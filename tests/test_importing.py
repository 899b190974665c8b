"""Checkpoints of two public programs: imported models compute what the programs compute, and give the same words."""

import argparse
import functools

import pytest
import torch
from pairs import in_turn
from public_models import annotated, jadore
from test_cli import failure

import fastattn_command as cli
from fastattn.translation import checkpoint
from fastattn.translation.importing import import_model
from fastattn.translation.search import Search, translate

# Words by id, which differ by program and language. Some words stand in both languages; "three" and "tres" stand in
# one.
SOURCE = {
    "jadore": ["<unk>", "<blank>", "<s>", "</s>", "one", "two", "x", "three", "don't"],
    "annotated": ["<s>", "</s>", "<blank>", "<unk>", "two", "one", "three", "don't", "x"],
}
TARGET = {
    "jadore": ["<unk>", "<blank>", "<s>", "</s>", "dos", "uno", "x", "tres", "¡", "!"],
    "annotated": ["<s>", "</s>", "<blank>", "<unk>", "tres", "dos", "uno", "x", "!", "¡", "más"],
}
SENTENCES = [["one", "two", "x"], ["three"], ["don't", "x", "three", "unheard", "of", "one"], ["x", "x"]]


def shuffled(model):
    """Change the weights, biases and gains so that each affects the result."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layer_stack" in name or "layers" in name or "emb" in name or "generator" in name or "prj" in name:
                scale = 1.0 if "emb" in name else 0.2
                parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.eval()


def program(name, path, tied=False):
    """Save a model of the program at ``path`` and return its logits, as a function of ids."""
    torch.manual_seed(4)
    source, target = SOURCE[name], TARGET[name]
    if name == "jadore":
        target = source if tied else target
        sizes = {"d_word_vec": 24, "d_model": 24, "d_inner": 40, "n_layers": 2, "n_head": 3, "d_k": 5, "d_v": 7}
        sharing = {"trg_emb_prj_weight_sharing": tied, "emb_src_trg_weight_sharing": tied}
        model = shuffled(jadore.Transformer(len(source), len(target), 1, 1, **sizes, **sharing))
        settings = argparse.Namespace(n_head=3, d_k=5, d_v=7, dropout=0.2, label_smoothing=True)
        torch.save({"epoch": 3, "settings": settings, "model": model.state_dict()}, path)
        return lambda src, tgt: model(src, tgt).view(*tgt.shape, -1)
    model = shuffled(annotated.make_model(len(source), len(target), N=2, d_model=24, d_ff=40, h=4))
    state = {key.replace("generator.", "generator.proj."): value for key, value in model.state_dict().items()}
    torch.save(state, path)

    def logits(src, tgt):
        seen = torch.ones(1, tgt.shape[1], tgt.shape[1]).tril()
        return model(src, tgt, (src != source.index("<blank>")).unsqueeze(-2), seen)

    return logits


def word_files(name, folder, tied=False):
    paths = [folder / "source.txt", folder / "target.txt"]
    for path, words in zip(paths, (SOURCE[name], SOURCE[name] if tied else TARGET[name]), strict=True):
        path.write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    return paths


CASES = [("jadore", False), ("jadore", True), ("annotated", False)]


@pytest.fixture(params=CASES, ids=str)
def imported(request, tmp_path):
    """Return the model and the tokenizer that the command has imported, the program's name, the words of its target,
    and its logits as a function of ids."""
    name, tied = request.param
    logits = program(name, tmp_path / "model", tied)
    files, out = map(str, word_files(name, tmp_path, tied)), tmp_path / "imported"
    assert cli.main(["import", str(tmp_path / "model"), str(out), "--words", *files, "--heads", "4"]) == 0
    assert checkpoint.updates(out) is None
    return *checkpoint.load(out), name, SOURCE[name] if tied else TARGET[name], logits


def source_ids(name, words):
    return [SOURCE[name].index(word if word in SOURCE[name] else "<unk>") for word in [*words, "</s>"]]


@torch.no_grad()
def test_logits(imported):
    """Logits of a teacher-forced batch of one are the program's, for the words of the target side. Other words are
    never produced."""
    model, tokenizer, name, target, logits = imported
    assert model.config.tying == ("all" if target == SOURCE[name] else "none")
    pieces = [piece.removeprefix("▁") for piece in tokenizer.pieces(list(range(tokenizer.vocab_size)))]
    ours = [pieces.index({"<blank>": "<pad>"}.get(word, word)) for word in target]
    others = sorted(set(range(len(pieces))) - set(ours))
    said = [target.index(word) for word in ("<s>", "x", *target[5:8], "<unk>")]
    for words in SENTENCES:
        wanted = logits(torch.tensor([source_ids(name, words)]), torch.tensor([said]))[0]
        source = [*tokenizer.encode([" ".join(words)])[0], pieces.index("</s>")]
        found = model(torch.tensor([source]), torch.tensor([[ours[word] for word in said]]))[0]
        torch.testing.assert_close(found[:, ours], wanted, rtol=1e-4, atol=1e-4)
        assert (found[:, others] < -1e8).all()


@torch.no_grad()
def test_translations(imported):
    """The folder that the command writes translates greedily as the program does."""
    model, tokenizer, name, target, logits = imported
    never = [target.index("<blank>"), target.index("<s>")]
    wanted = []
    for words in SENTENCES:
        source, said = source_ids(name, words), [target.index("<s>")]
        while len(said) <= len(source) + 4 and target[said[-1]] != "</s>":
            scores = logits(torch.tensor([source]), torch.tensor([said]))[0, -1]
            scores[never] = -torch.inf
            said.append(int(scores.argmax()))
        wanted.append([target[word] for word in said[1:] if target[word] != "</s>"])
    found = translate(model, tokenizer, [" ".join(words) for words in SENTENCES], Search(beam=1, extra_tokens=4))
    assert [line.replace("⁇", "<unk>").split() for line in found] == wanted
    assert len({tuple(words) for words in wanted}) > 2


# Gives the model the names that torch.compile gives, without compiling.
as_compiled = functools.partial(torch.compile, backend="eager")


def within(model):
    """Replace a part of the model by the compiled part."""
    model.encoder = as_compiled(model.encoder)
    return model


WRAPPERS = {
    "module.": torch.nn.DataParallel,
    "_orig_mod.": as_compiled,
    "_orig_mod.module.": lambda model: as_compiled(torch.nn.DataParallel(model)),
    "module._orig_mod.": lambda model: torch.nn.DataParallel(as_compiled(model)),
    # a module that trains a model and has a loss with its own weights
    "model._orig_mod.": lambda model: torch.nn.ModuleDict(
        {"model": as_compiled(model), "loss": torch.nn.CrossEntropyLoss(weight=torch.ones(3))}
    ),
    "encoder._orig_mod.": within,
    "an average": torch.optim.swa_utils.AveragedModel,
}
AROUND = {
    "as the program": lambda weights: weights,
    "state_dict": lambda weights: {"state_dict": weights, "epoch": 3, "optimizer_states": [{"state": {0: {}}}]},
    "nested": lambda weights: {"checkpoint": {"model": {"state_dict": weights}}, "step": torch.tensor(3)},
    "in float64": lambda weights: {name: tensor.double() for name, tensor in weights.items()},
}


class Bare(torch.nn.Module):
    """Module that has these names and tensors."""

    def __init__(self, weights):
        super().__init__()
        for name, tensor in weights.items():
            module = self
            *parts, last = name.split(".")
            for part in parts:
                module._modules.setdefault(part, torch.nn.Module())
                module = module._modules[part]
            module.register_buffer(last, tensor)


@pytest.mark.parametrize(("wrapper", "name"), in_turn(WRAPPERS, ["jadore", "annotated"]))
def test_a_wrapped_checkpoint_is_the_one_inside(tmp_path, name, wrapper):
    """A wrapped checkpoint gives the model inside, under the names of torch's own wrappers and in nested
    dictionaries. Weights become float32."""
    program(name, tmp_path / "model")
    files = word_files(name, tmp_path)
    wanted, tokenizer = import_model(tmp_path / "model", *files, heads=4)
    assert not wanted.training
    saved = torch.load(tmp_path / "model", weights_only=False)
    weights = saved["model"] if name == "jadore" else saved
    if name == "jadore":
        saved["settings"] = vars(saved["settings"])  # a dictionary is as good as the program's Namespace
    wrapped = WRAPPERS[wrapper](Bare(weights)).state_dict()
    assert wrapped.keys() != weights.keys()
    for around in AROUND.values():
        inside = around(wrapped)
        torch.save({**saved, "model": inside} if name == "jadore" else inside, tmp_path / "wrapped")
        found, same = import_model(tmp_path / "wrapped", *files, heads=4)
        assert (found.config, same.model) == (wanted.config, tokenizer.model)
        assert {parameter.dtype for parameter in found.parameters()} == {torch.float32}
        assert all(map(torch.equal, found.parameters(), wanted.parameters()))
    halved = {name: tensor.bfloat16() for name, tensor in wrapped.items()}
    torch.save({**saved, "model": halved} if name == "jadore" else halved, tmp_path / "wrapped")
    found, _ = import_model(tmp_path / "wrapped", *files, heads=4)
    for got, expected in zip(found.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=2**-8, atol=0)  # bfloat16 rounds by at most that


NO_FILES = ["hello", "no file", "k", "\x80", "(dp0\n"]  # torch's unpickler raises another error for each


def test_what_is_not_imported(tmp_path, capsys):
    """What is refused by name. If a file holds two models, the message says that the user must choose."""

    def saved(name, content):
        path = tmp_path / name
        path.write_text(content, encoding="utf-8") if isinstance(content, str) else torch.save(content, path)
        return path

    program("annotated", other := tmp_path / "other")
    others = word_files("annotated", tmp_path)
    program("jadore", path := tmp_path / "model")
    (folder := tmp_path / "words").mkdir()
    files = source, target = word_files("jadore", folder)
    spaced = source.read_text(encoding="utf-8").replace("three", "three four")
    later = torch.load(path, weights_only=False)
    bare = {"state_dict": dict(later["model"])}
    later["model"]["encoder.layer_norm.weight"] = torch.full((24,), 1.5)
    weights = torch.load(other)
    averaged = {f"module.{name}": tensor for name, tensor in weights.items()}
    two, both = {"state_dict": weights, "ema": averaged}, {**weights, **averaged, "n_averaged": torch.tensor(3)}
    alone = ": save the one to import alone"
    for model, words, message in (
        (path, [source, source], "source.txt has 9 words but"),
        (path, [source, saved("bare", "one\ntwo\n")], "bare lacks <blank> or <pad>: expected all pieces of the pro"),
        (path, [saved("twice", "one\none\n"), target], "twice has 1 words more than once"),
        (path, [saved("spaced", spaced), target], "the word 'four' cannot be a piece"),
        (tmp_path / "none", files, f"cannot read {tmp_path / 'none'}: No such file"),
        *((saved(repr(text), text), files, "it is no file of torch.save") for text in NO_FILES),
        (saved("later", later), files, "the model normalises the embeddings of its encoder, as later versions"),
        (saved("bare state", bare), files, "without its settings: expected the program's dictionary of"),
        (saved("two", two), others, f"two holds 2 models, at state_dict, ema.module{alone}"),
        (saved("both", both), others, f"both holds 2 models, at the top level, module{alone}"),
        (saved("weights", {"weights": torch.ones(3)}), files, "is of neither program"),
        (other, [*others, "--heads", "7"], "num_heads is 7, expected a divisor of d_model=24"),
    ):
        assert message in failure(["import", model, tmp_path / "out", "--words", *words], capsys)
    assert not (tmp_path / "out").exists()
