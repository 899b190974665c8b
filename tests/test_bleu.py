# ruff: noqa: RUF001
"""BLEU of texts in many scripts against sacrebleu's; the choice of the tokenizer, and its warnings."""

import json
import urllib.error
import urllib.request
from pathlib import Path
from unittest import mock

import pytest
import sacrebleu
import torch
from conftest import refused
from sacrebleu.metrics import bleu as sacrebleus
from sacrebleu.tokenizers import tokenizer_spm
from test_cli import failure, train_arguments

import fastattn_command as cli
from fastattn import Transformer, TransformerConfig
from fastattn.translation import bleu, checkpoint
from fastattn.translation.data import read_lines
from fastattn.translation.evaluate import scores
from fastattn.translation.search import Search, translate
from fastattn.translation.tokenizer import Tokenizer
from fastattn.translation.train import read_metrics

TEXT = {
    "Chinese": "起初，神创造天地。地是空虚混沌，渊面黑暗（神的灵运行在水面上）。",
    "Japanese": "はじめに神は天と地とを創造された。地は形なく、むなしく、やみが淵のおもてにあった。",
    "Korean": "태초에 하나님이 천지를 창조하시니라 땅이 혼돈하고 공허하며 흑암이 깊음 위에 있고",
    "Thai": "ในปฐมกาลพระเจ้าทรงเนรมิตสร้างฟ้าและแผ่นดิน แผ่นดินก็ว่างเปล่าอยู่",
    "Lao": "ໃນຕົ້ນເດີມນັ້ນ ພຣະເຈົ້າໄດ້ເນລະມິດສ້າງຟ້າສະຫວັນແລະແຜ່ນດິນໂລກ",
    "Khmer": "កាលដើមដំបូងឡើយ ព្រះបានបង្កើតផ្ទៃមេឃ និងផែនដី",
    "Myanmar": "အစအဦး၌ ဘုရားသခင်သည် ကောင်းကင်နှင့် မြေကြီးကို ဖန်ဆင်းတော်မူ၏။",
    "Tibetan": "ཐོག་མར་དཀོན་མཆོག་གིས་གནམ་དང་ས་བཀོད་པ་མཛད།",
}
SPACED = [
    "En el principio creó Dios los cielos y la tierra.",
    "В начале сотворил Бог небо и землю.",
    "आदि में परमेश्वर ने आकाश और पृथ्वी की सृष्टि की।",
    "في البدء خلق الله السماوات والأرض.",
    "Beijing (北京) means northern capital.",
    "1, 2, 3!",
    "",
]


def usable(tokenize):
    """Return whether sacrebleu has everything that the tokenizer needs."""
    try:
        sacrebleus.BLEU(tokenize=tokenize)
    except RuntimeError:
        return False
    return True


DEFAULTS = {"Chinese": "zh", "Japanese": "ja-mecab", "Korean": "ko-mecab"}
INSTALLED = {script: name for script, name in DEFAULTS.items() if usable(name)}


@pytest.mark.parametrize("script", TEXT)
def test_the_tokenizer_of_a_script(script):
    """The tokenizer is sacrebleu's own for the script if there is one and it is installed, else characters."""
    references = [TEXT[script], "Amen."]
    assert bleu.writing(references) == script
    name, warnings = bleu.choose(references)
    assert name == INSTALLED.get(script, "char")
    assert bool(warnings) == (script in DEFAULTS.keys() - INSTALLED.keys())
    translations = [TEXT[script][::-1], "Amen."]
    found = scores(translations, references)
    assert found.bleu == sacrebleu.corpus_bleu(translations, [references], tokenize=name).score
    assert scores(references, references).bleu == pytest.approx(100)


@pytest.mark.parametrize("line", SPACED)
def test_scripts_with_spaces_have_13a(line):
    """A few Chinese characters among other letters do not change the tokenizer."""
    assert bleu.choose([line] * 3) == ("13a", [])


def test_kanji_alone_do_not_make_japanese_chinese():
    """Kanji do not make Japanese Chinese, and a name in katakana does not make Chinese Japanese."""
    assert bleu.writing(["東京都", "国会議事堂", "山に登った。", "花が咲いた。"]) == "Japanese"
    assert bleu.writing([TEXT["Chinese"] * 3, "ポケモン"]) == "Chinese"
    assert bleu.writing(["ﾃﾚﾋﾞｦﾐﾙ"]) == "Japanese"


@pytest.mark.parametrize(("script", "name", "extra"), [("Japanese", "ja-mecab", "ja"), ("Korean", "ko-mecab", "ko")])
def test_what_a_tokenizer_needs_is_named(monkeypatch, script, name, extra):
    """The default becomes characters; a tokenizer that was requested is refused."""
    monkeypatch.setattr(f"sacrebleu.tokenizers.tokenizer_{extra}_mecab.MeCab", None)
    found, (warning,) = bleu.choose([TEXT[script]])
    assert found == "char"
    assert warning == (
        f"BLEU is of the tokenizer char: sacrebleu's tokenizer {name} cannot be used; "
        f'install what it needs: pip install "sacrebleu[{extra}]"'
    )
    message = f"sacrebleu's tokenizer {name} cannot be used; install"
    refused(message, scores, [TEXT[script]], [TEXT[script]], name)


def test_a_tokenizer_whose_model_cannot_be_fetched(monkeypatch, tmp_path):
    error = urllib.error.URLError("no route to host")
    monkeypatch.setattr(urllib.request, "urlopen", mock.Mock(side_effect=error))
    monkeypatch.setattr(tokenizer_spm, "SACREBLEU_DIR", str(tmp_path))
    message = "flores200 cannot be used; its model is fetched once, which failed .*route"
    refused(message, scores, ["a"], ["a"], "flores200")
    refused("sacrebleu has no tokenizer '13b'", scores, ["a"], ["a"], "13b")


@pytest.mark.parametrize(
    ("tokenize", "script", "words"),
    [
        ("13a", "Chinese", "most letters of the references are Chinese; leave --tokenize out, or give zh"),
        ("intl", "Thai", "most letters of the references are Thai; leave --tokenize out, or give char"),
        ("zh", "Japanese", "most letters of the references are Japanese; leave --tokenize out, or give ja-mecab"),
        ("13a", "Korean", "most letters of the references are Korean; leave --tokenize out, or give ko-mecab"),
        ("char", "Chinese", None),
        ("zh", "Chinese", None),
        ("intl", None, None),
        ("char", None, None),
    ],
)
def test_a_tokenizer_that_does_not_fit(tokenize, script, words):
    found, warnings = bleu.choose([TEXT.get(script, SPACED[0])], tokenize)
    assert found == tokenize
    assert warnings == ([] if words is None else [f"the tokenizer {tokenize} does not fit: {words}"])


def test_the_commands_tokenizers_are_sacrebleus():
    assert sorted(cli.TOKENIZERS) == sorted(sacrebleus._TOKENIZERS)
    assert set(cli.TOKENIZERS) >= {name for names in bleu.FITTING.values() for name in names}


SMALL = TransformerConfig(60, d_model=16, d_ff=16, num_heads=2, encoder_layers=1, decoder_layers=1)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return two files of Chinese text."""
    folder = tmp_path_factory.mktemp("chinese")
    for name in ("source", "references"):
        (folder / name).write_text(TEXT["Chinese"] + "\n神说：“要有光”，就有了光。\n", encoding="utf-8")
    return [str(folder / "source"), str(folder / "references")]


def test_the_validation_of_a_run(files, tmp_path, capsys):
    """The validation names its tokenizer. Its BLEU is that of the model after the last update."""
    options = ["--vocab-size", "60", "--max-steps", "1", "--bleu-every", "1"]
    assert cli.main(train_arguments(files, tmp_path / "run", *options)) == 0
    assert "validation BLEU is of sacrebleu's tokenizer zh\n" in capsys.readouterr().err
    sources, references = map(read_lines, map(Path, files))
    translations = translate(*checkpoint.load(tmp_path / "run"), sources, Search(beam=1))
    wanted = sacrebleu.corpus_bleu(translations, [references], tokenize="zh").score
    assert read_metrics(tmp_path / "run")[-1]["valid_bleu"] == wanted


@pytest.fixture(scope="module")
def chinese(files, tmp_path_factory):
    """Return the arguments of the command that scores an untrained model."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    checkpoint.save_model(Transformer(SMALL), Tokenizer.train(read_lines(Path(files[0])), 60), folder / "model")
    return ["evaluate", str(folder / "model"), "--test", *files]


@pytest.mark.parametrize(
    ("asked", "used"), [([], "zh"), (["--tokenize", "char"], "char"), (["--tokenize", "13a"], "13a")]
)
def test_evaluate(chinese, capsys, asked, used):
    """The signature names the tokenizer. The paper's BLEU counts words between spaces and is given only with 13a."""
    assert cli.main([*chinese, "--beam", "1", *asked]) == 0
    out, err = capsys.readouterr()
    assert f"|tok:{used}|" in out
    assert ("the kind that the paper reports" in out) == (used == "13a")
    assert ("evaluate: warning: the tokenizer 13a does not fit" in err) == (used == "13a")
    assert cli.main([*chinese, "--beam", "1", "--json", *asked]) == 0
    found = json.loads(capsys.readouterr().out)
    assert f"|tok:{used}|" in found["bleu_signature"]
    assert (found["compound_split_bleu"] is None) == (used != "13a")


def test_evaluate_refuses_a_tokenizer_before_it_translates(chinese, capsys, monkeypatch):
    monkeypatch.setattr("fastattn.translation.evaluate.held_out", lambda *args: pytest.fail("computed a perplexity"))
    assert "argument --tokenize: invalid choice: '13b'" in failure([*chinese, "--tokenize", "13b"], capsys)
    monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_ja_mecab.MeCab", None)
    assert "ja-mecab cannot be used; install what it needs" in failure([*chinese, "--tokenize", "ja-mecab"], capsys)
