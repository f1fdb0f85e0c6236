"""Prompts with placeholders, and the prompts of every environment by key."""

import pytest
from pydantic import ValidationError

from agent_peft.environments import load_environment
from agent_peft.environments.arithmetic.environment import ArithmeticConfig
from agent_peft.environments.db_bench.config import DBBenchConfig
from agent_peft.environments.db_bench.protocol import SYSTEM_PROMPT
from agent_peft.environments.gsm8k import GSM8KConfig
from agent_peft.environments.os_interaction.config import OSInteractionConfig
from agent_peft.environments.os_interaction.protocol import PROTOCOLS
from agent_peft.environments.templates import check_placeholders, fill, placeholders_of


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{n} turns", "3 turns"),
        ("{n}{n}", "33"),
        ("the text {{n}}", "the text {n}"),
        ("{{{n}}}", "{3}"),
        ('{"a": {"b": 1}}', '{"a": {"b": 1}}'),  # JSON stays as it is, with all its braces
        ("\\frac{1}{2} {} {1} { n }", "\\frac{1}{2} {} {1} { n }"),
        ("{m}", "{n}"),  # a value is not a template
        ("", ""),
    ],
)
def test_placeholders_are_replaced_and_other_braces_stay(template, text):
    assert fill(template, {"n": 3, "m": "{n}"}) == text


def test_placeholders_in_their_order():
    assert placeholders_of("{b} {{c}} {{{a}}} {1} {größe}") == ["b", "a", "größe"]


def test_an_unknown_placeholder_is_told_with_the_nearest():
    assert check_placeholders("{max_turns} {{anything}}", ["max_turns"]) == "{max_turns} {{anything}}"
    with pytest.raises(
        ValueError, match=r"no placeholder {max_turn}; did you mean {max_turns}\? \({{max_turn}}"
    ):
        check_placeholders("{max_turn}", ["max_turns"])
    with pytest.raises(ValueError, match=r"no placeholder {x}; give one of {a}, {b} "):
        check_placeholders("{x}", ["a", "b"])
    with pytest.raises(ValueError, match=r"no placeholder {x}; this text takes none"):
        check_placeholders("{x}", [])


# -- every environment ---------------------------------------------------------------------------------------

GENERATED = {"generate": {"num_tasks": 1, "skills": ["insert"]}}
CONFIGS = {
    "arithmetic": (ArithmeticConfig, {}, ["system_prompt", "prompt"]),
    "gsm8k": (GSM8KConfig, {"tasks": "x.jsonl"}, ["instruction"]),
    "db_bench": (DBBenchConfig, {"tasks": "x.json"}, ["system_prompt", "prompt"]),
    "os_interaction": (OSInteractionConfig, {"tasks": "x.json"}, ["system_prompt", "prompt"]),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_prompt_refuses_an_unknown_placeholder_and_says_which_there_are(kind):
    config_class, settings, keys = CONFIGS[kind]
    for key in keys:
        description = config_class.model_fields[key].description
        with pytest.raises(ValidationError, match=r"there is no placeholder \{zzz\}") as raised:
            config_class(**settings, **{key: "{zzz}"})
        names = str(raised.value).partition("give one of ")[2].partition(" (")[0].split(", ")
        assert names and all(name in description for name in names), key


def test_a_user_prompt_without_the_question_is_refused():
    for kind in ("arithmetic", "db_bench", "os_interaction"):
        config_class, settings, _ = CONFIGS[kind]
        with pytest.raises(ValidationError, match="so it would be the same for every task"):
            config_class(**settings, prompt="Do it.")


def opening(**settings):
    environment = load_environment(settings)
    episode = environment.episode(environment.tasks[0], seed=0)
    try:
        return [(message.role, message.content) for message in episode.start()]
    finally:
        episode.close()
        environment.close()


def test_arithmetic_says_what_its_keys_say():
    problem = {"kind": "arithmetic", "digits": 1, "num_tasks": 1}
    ((role, question),) = opening(**problem)
    assert role == "user" and question.endswith("=") and question[:1].isdigit()
    assert opening(**problem, system_prompt="Do {operation}.", prompt="What is {question}?") == [
        ("system", "Do addition."),
        ("user", f"What is {question}?"),
    ]


def test_db_bench_says_what_its_keys_say():
    plain = opening(kind="db_bench", **GENERATED)
    assert plain[0] == ("system", SYSTEM_PROMPT.replace("{max_turns}", "3"))
    assert plain[0][1].startswith("You work on one SQLite table. Reply in one of two ways.\nTo run one SQL")
    assert (
        "\nThe name of this table is " in plain[1][1]
        and ", and the headers of this table are " in plain[1][1]
    )
    instruction = plain[1][1].partition("\nThe name of this table is ")[0]
    table = plain[1][1].partition("\nThe name of this table is ")[2].partition(",")[0]
    assert opening(
        kind="db_bench",
        **GENERATED,
        max_turns=7,
        system_prompt='{max_turns} turns. {{table}} {"a": {}}',
        prompt="{table}: {instruction}",
    ) == [("system", '7 turns. {table} {"a": {}}'), ("user", f"{table}: {instruction}")]
    assert [role for role, _ in opening(kind="db_bench", **GENERATED, system_prompt="")] == ["user"]


def test_os_interaction_says_what_its_keys_say(sandboxed):
    settings = {"kind": "os_interaction", "generate": {"num_tasks": 1, "skills": ["mkdir"]}}
    system, (_, instruction) = opening(**settings)
    assert system == ("system", PROTOCOLS["act"].prompt(5, answers=False))
    assert system[1].endswith("Act: finish\nYou have 5 turns, the last one included.")
    assert opening(
        **settings,
        system_prompt='{ways} ways, {max_turns} turns.{answer} {"name": {}}',
        prompt="Task: {instruction}",
    ) == [("system", 'two ways, 5 turns. {"name": {}}'), ("user", f"Task: {instruction}")]


def test_the_prompts_of_protocols_by_hand():
    assert PROTOCOLS["act"].prompt(5, answers=True) == (
        "You work in a bash shell on Linux, as root. Reply in one of three ways.\n"
        "To run commands and see their output:\nAct: bash\n\n```bash\nls /tmp\n```\n"
        "To end, when the task is done:\nAct: finish\n"
        "To end with the answer to a question:\nAct: answer(42)\n"
        "You have 5 turns, the last one included."
    )
    assert PROTOCOLS["json_tool_calls"].prompt(4, answers=False) == (
        "You work in a bash shell on Linux, as root. Each reply is one tool call.\n"
        "To run commands and see their output:\n"
        '<tool_call>\n{"name": "bash", "arguments": {"command": "ls /tmp"}}\n</tool_call>\n'
        "To end, when the task is done:\n"
        '<tool_call>\n{"name": "finish", "arguments": {}}\n</tool_call>\n'
        "You have 4 turns, the last one included."
    )
    assert PROTOCOLS["act"].prompt(2, True, "{answer}|{max_turns}") == (
        "To end with the answer to a question:\nAct: answer(42)\n|2"
    )
