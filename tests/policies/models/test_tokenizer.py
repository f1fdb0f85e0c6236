from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from agent_peft.policies.models.tokenizer import character_tokenizer
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.types import AgentPeftError, Message


def test_character_tokenizer(tmp_path):
    tokenizer = character_tokenizer("0123456789+=\n é<>")
    c = ChatTokenizer(tokenizer)
    opening = c.opening([Message("user", "12+é="), Message("user", "\n<")])
    assert opening == [1, *tokenizer.convert_tokens_to_ids(list("12+é=\n<"))]
    assert c.end_of_turn == {2} and c.rewriting is None
    assert c.action_tokens("46") == [7, 9, 2] and c.decode_action([7, 9, 2]) == "46"
    assert c.following("0", [7, 9, 2]) == [3] and c.following("0", [7, 9]) == [2, 3]
    assert c.following("<>", []) == [2, *tokenizer.convert_tokens_to_ids(["<", ">"])]
    with pytest.raises(AgentPeftError, match=r"policy\.alphabet lacks the characters 'xz'; add"):
        c.following("1x2z", [])
    tokenizer.save_pretrained(tmp_path)
    again = ChatTokenizer(AutoTokenizer.from_pretrained(tmp_path))
    assert again.opening([Message("user", "12+é=\n<")]) == opening and again.end_of_turn == {2}
    assert (again.tokenizer.pad_token_id, again.tokenizer.bos_token_id, len(again.tokenizer)) == (
        0,
        1,
        3 + 17,
    )
    for wrong, told in (("", "at least one character"), ("01120", "'0', '1' is there more than once")):
        with pytest.raises(AgentPeftError, match=rf"policy\.alphabet: .*{told}"):
            character_tokenizer(wrong)
