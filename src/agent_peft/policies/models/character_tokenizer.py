"""A tokenizer of characters, for models that are trained from scratch."""

from __future__ import annotations

from collections import Counter

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agent_peft.policies.models.chat_template import BARE_TEMPLATE
from agent_peft.types import AgentPeftError


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character, after ``<pad> <bos> <eos>``.

    Its chat template writes ``<bos>`` and then the contents one after the other, with an ``<eos>`` after
    each of the assistant's. It writes no roles and no generation prompt. A character outside the alphabet
    is an error.

    >>> character_tokenizer("01+=").encode("1+0=")
    [4, 5, 3, 6]
    """
    if not alphabet:
        raise AgentPeftError("policy.alphabet: an alphabet needs at least one character")
    if twice := ", ".join(repr(character) for character, count in Counter(alphabet).items() if count > 1):
        raise AgentPeftError(f"policy.alphabet: {twice} stands there more than once; leave the others out")
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", *alphabet])}
    # <unk> is not in the vocabulary, so an unknown character raises
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)  # type: ignore[no-untyped-call]
    tokenizer.chat_template = BARE_TEMPLATE
    return tokenizer
