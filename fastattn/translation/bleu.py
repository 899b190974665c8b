"""Division of text into words for BLEU: sacrebleu's tokenizers, and the choice of one by the script of a text."""

import collections
import itertools
import unicodedata
from typing import Any

from fastattn.errors import InputError, require

# Writing of text, by the first word of its letters' Unicode names.
WRITING = {
    "CJK": "Chinese",
    **dict.fromkeys(("HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA"), "Japanese"),
    "HANGUL": "Korean",
    **{name.upper(): name for name in ("Thai", "Lao", "Khmer", "Myanmar", "Tibetan")},
}
KANA = 0.1  # minimum share of kana among the Chinese characters and kana of Japanese text.
ANY = ("char", "flores200", "flores101", "spm", "spBLEU-1K")  # characters or pieces; they fit every script.
# Tokenizers that fit a writing, the default first. Writings from Thai to Tibetan put no spaces between words.
FITTING = {
    "Chinese": ("zh", *ANY),
    "Japanese": ("ja-mecab", *ANY),
    "Korean": ("ko-mecab", *ANY),
    **dict.fromkeys(("Thai", "Lao", "Khmer", "Myanmar", "Tibetan"), ANY),
    "": ("13a", "intl", "zh", "none", *ANY),
}
EXTRAS = {"ja-mecab": "ja", "ko-mecab": "ko"}  # sacrebleu's extras, which install the package of a tokenizer


def choose(references: list[str], tokenize: str | None = None) -> tuple[str, list[str]]:
    """Choose the tokenizer for BLEU against these references.

    Args:
        tokenize: sacrebleu's name of a tokenizer. None: the default of the references' script, or "char" if its
            package is not installed.

    Returns:
        The tokenizer's name, and warnings.

    Raises:
        InputError: the tokenizer cannot be used.
    """
    script = writing(references)
    fitting = FITTING[script]
    if tokenize is not None:
        metric(tokenize)
        if tokenize in fitting:
            return tokenize, []
        what = f"most letters of the references are {script}" if script else "the references are not of its script"
        return tokenize, [f"the tokenizer {tokenize} does not fit: {what}; leave --tokenize out, or give {fitting[0]}"]
    try:
        metric(fitting[0])
    except InputError as error:
        return "char", [f"BLEU is of the tokenizer char: {error}"]
    return fitting[0], []


def metric(tokenize: str) -> Any:
    """Make sacrebleu's BLEU with this tokenizer.

    Raises:
        InputError: sacrebleu has no such tokenizer, or the tokenizer's package or model is missing.
    """
    bleu = require("sacrebleu.metrics").BLEU
    try:
        return bleu(tokenize=tokenize)
    except KeyError:
        raise InputError(f"sacrebleu has no tokenizer {tokenize!r}: expected 13a, zh or another of its names") from None
    except (Exception, SystemExit) as error:  # the exception depends on the tokenizer
        if tokenize in EXTRAS:
            mend = f'install what it needs: pip install "sacrebleu[{EXTRAS[tokenize]}]"'
        else:
            mend = f"its model is fetched once, which failed ({error}): connect to the network, or give another one"
        raise InputError(f"sacrebleu's tokenizer {tokenize} cannot be used; {mend}") from None


def writing(lines: list[str]) -> str:
    """Return the writing of most letters, a key of ``FITTING``; "" for writings with spaces between words."""
    letters: collections.Counter[str] = collections.Counter()
    for character, number in collections.Counter(itertools.chain.from_iterable(lines)).items():
        if character.isalpha():
            name = unicodedata.name(character, "").removeprefix("HALFWIDTH ").removeprefix("FULLWIDTH ")
            letters[WRITING.get(name.partition(" ")[0], "")] += number
    is_japanese = letters["Japanese"] > KANA * (letters["Chinese"] + letters["Japanese"])
    mixed = ("Chinese", "Japanese") if is_japanese else ("Japanese", "Chinese")
    letters[mixed[1]] += letters.pop(mixed[0], 0)
    most, number = max(letters.items(), key=lambda item: item[1])
    return most if 2 * number > letters.total() else ""
