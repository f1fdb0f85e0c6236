"""Gymnasium's environments and TextArena's games, as an agent meets them in text."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from agent_peft.environments import load_environment
from agent_peft.environments.games.gymnasium import is_text, reader_of, scaled_score
from agent_peft.testing import check_environment
from agent_peft.types import AgentPeftError, Outcome, StopReason

gymnasium = pytest.importorskip("gymnasium", reason="the extra gymnasium is not installed")
spaces = gymnasium.spaces


class Echo(gymnasium.Env):
    """It pays for the text 'right', asks again at anything else, and fails at 'fail'."""

    observation_space = spaces.Text(20)
    action_space = spaces.Text(9)

    def __init__(self, reward=1.0):
        self.reward = reward

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return f"hello {self.np_random.integers(1000)}", {}

    def step(self, action):
        if action == "fail":
            raise ZeroDivisionError("in Echo")
        if action == "refused":
            return "no", 0.0, False, False, {"valid": False}
        return f"you said {action}", self.reward * (action == "right"), action in ("right", "end"), False, {}


class Pictures(gymnasium.Env):
    observation_space = spaces.Box(0, 255, (8, 8, 3))
    action_space = spaces.Discrete(2)


gymnasium.register("Echo-v0", Echo, max_episode_steps=3)
gymnasium.register("Pictures-v0", Pictures)
gymnasium.register("Arms-v0", type("Arms", (Echo,), {"action_space": spaces.Box(0, 1, (2,))}))

LAKE = {"id": "FrozenLake-v1", "make": {"is_slippery": False}, "actions": ["left", "down", "right", "up"]}
GUESS = {"id": "textarena/GuessTheNumber-v0"}


def load(**keys):
    return load_environment("gymnasium", **{"num_tasks": 4, **keys})


def play(environment, *replies, task=0):
    """The opening, and the result of each reply."""
    episode = environment.episode(environment.tasks[task], 0)
    opening = episode.start()[-1].content
    return opening, [episode.step(reply) for reply in replies]


def test_named_actions_reach_the_goal():
    opening, results = play(load(**LAKE), "down", "I go Down.", "right", "left? no: right", "down", "right")
    assert opening == "0\nReply with one of these actions: left, down, right, up"
    assert [result.observation for result in results] == ["4", "8", "9", "10", "14", ""]
    assert results[-1].outcome is Outcome.CORRECT and results[-1].stop_reason is StopReason.FINISHED
    assert results[-1].score == 1.0


def test_numbers_are_the_names_of_actions_that_have_none():
    opening, results = play(load(**{**LAKE, "actions": None}), "1", "11")
    assert "0, 1, 2, 3" in opening
    assert (results[0].observation, results[0].valid) == ("4", True)
    assert not results[1].valid and "0, 1, 2, 3" in results[1].observation


def test_a_loss_and_a_time_limit_differ():
    _, lost = play(load(**LAKE), "right", "down")
    assert (lost[-1].outcome, lost[-1].stop_reason) == (Outcome.INCORRECT, StopReason.FINISHED)
    _, truncated = play(load(id="Echo-v0"), "a", "b", "c")
    assert (truncated[-1].outcome, truncated[-1].stop_reason) == (Outcome.INCORRECT, StopReason.TURN_LIMIT)
    _, ours = play(load(id="Echo-v0", max_turns=2), "a", "b")
    assert (ours[-1].outcome, ours[-1].stop_reason) == (Outcome.INCORRECT, StopReason.TURN_LIMIT)


def test_texts_are_actions_as_they_are():
    environment = load(id="Echo-v0", prompt="Now: {observation}")
    opening, results = play(environment, " why ", "far too long")
    assert opening.startswith("Now: hello ")
    assert (results[0].observation, results[0].valid) == ("you said why", True)
    assert not results[1].valid
    assert play(environment, "right")[1][-1].outcome is Outcome.CORRECT
    refused = play(environment, "refused")[1][-1]
    assert (refused.observation, refused.valid, refused.done) == ("no", False, False)


def test_a_task_is_a_seed_and_splits_share_none():
    environment = load(id="Echo-v0")
    assert play(environment) == play(environment) != play(environment, task=1)
    train, heldout = (
        {
            task.content["seed"]
            for seed in range(3)
            for task in load(id="Echo-v0", split=split, seed=seed).tasks
        }
        for split in ("train", "heldout")
    )
    assert len(train) == len(heldout) == 12
    assert {seed % 2 for seed in train} == {0} and {seed % 2 for seed in heldout} == {1}


def test_the_sum_of_rewards_is_the_score_between_two_bounds(caplog):
    scores = [
        play(load(id="Echo-v0", make={"reward": reward}, score=score), "right")[1][-1].score
        for reward, score in ((0.25, (0, 1)), (25, (0, 100)), (-5, (-10, 10)))
    ]
    assert scores == [0.25, 0.25, 0.25] and not caplog.messages
    for _ in range(2):
        assert play(load(id="Echo-v0", make={"reward": 7}), "right")[1][-1].score == 1
    assert len(caplog.messages) == 1 and "add up to more than environment.score: [0, 1]" in caplog.text
    assert scaled_score(0.1 + 0.2 + 0.7, (0, 1)) == 1  # it is a little less


def test_each_step_says_how_far_the_episode_has_come(caplog):
    _, results = play(load(id="Echo-v0", make={"reward": 5}, score=(5, 10)), "a", "right")
    assert [result.score for result in results] == [0.0, 0.0]
    assert not caplog.messages  # the sum before the end may be anything


def test_observations_that_are_no_text():
    assert is_text(spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 1, (4,))]))
    assert is_text(spaces.Dict(a=spaces.Text(5), b=spaces.MultiBinary(3)))
    assert not is_text(spaces.Dict(a=spaces.Text(5), b=spaces.Box(0, 255, (84, 84))))
    assert not is_text(spaces.Sequence(spaces.Discrete(2)))


@pytest.mark.parametrize("keys", [LAKE, GUESS, {"id": "textarena/Countdown-v0"}], ids=lambda keys: keys["id"])
def test_all_rules_are_kept(keys):
    if "textarena" in keys["id"]:
        pytest.importorskip("textarena", reason="the extra textarena is not installed")
    check_environment("gymnasium", num_tasks=3, **keys)


def test_longer_names_come_first():
    read, _ = reader_of(spaces.Discrete(3), ("up", "up left", "-1"))
    assert [read(reply) for reply in ("up", "Up left!", "-1", "upper", "")] == [0, 1, 2, None, None]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"id": "FrozenLak-v1"}, "environment.id: FrozenLak-v1: NameNotFound: .*FrozenLake"),
        ({"id": "no_such_module:Lake-v1"}, "no_such_module"),
        ({"id": "FrozenLake-v1", "make": {"slippery": 1}}, "FrozenLake-v1: TypeError.*slippery"),
        ({"id": "Pictures-v0"}, "Pictures-v0: ValueError: an observation is Box.*, which is no text"),
        ({"id": "Arms-v0"}, "Arms-v0: ValueError: an action is Box.*, which has no names"),
        ({**LAKE, "actions": ["left", "right"]}, "there are 4 actions, and 2 names in environment.actions"),
        ({"id": "Echo-v0", "actions": ["a"]}, "Text.*, which has no names"),
        ({"id": "Echo-v0", "score": (1, 1)}, "environment.score: give .lowest, highest."),
        ({"id": "Echo-v0", "prompt": "Play."}, "environment.prompt: has no {observation}"),
        ({"id": "textarena/GuesTheNumber-v0"}, "NameNotFound: .*GuessTheNumber"),
        ({"id": "textarena/TicTacToe-v0"}, "TicTacToe-v0: .*; only games of one player can be"),
        ({"id": "textarena/GuessWho-v0"}, "OpenRouter API key"),
    ],
)
def test_a_mistake_is_one_line(keys, message):
    if "textarena" in keys["id"]:
        pytest.importorskip("textarena")
    with pytest.raises(AgentPeftError, match=message) as told:
        load(**keys)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(("package", "id"), [("gymnasium", "FrozenLake-v1"), ("textarena", GUESS["id"])])
def test_an_absent_package_is_one_line_with_the_extra(package, id, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "agent_peft.environments.games.textarena", raising=False)
    with pytest.raises(AgentPeftError, match=rf"pip install '\.\[{package}\]'"):
        load(id=id)


def test_an_environment_that_raises_says_where():
    environment = load(id="Echo-v0")
    with pytest.raises(ZeroDivisionError, match="in Echo"):
        play(environment, "fail")


def test_code_that_the_id_names_is_noted():
    from agent_peft.lookup import without_imports

    with without_imports() as names:
        load_environment.__globals__["configured"](
            type(load(id="Echo-v0").config), {"kind": "gymnasium", "id": "my_module:Mine-v0"}
        )
    assert names == ["my_module:Mine-v0"]


def test_a_game_tells_what_happened_since_the_last_move():
    pytest.importorskip("textarena")
    environment = load(**GUESS, make={"max_number": 3, "max_turns": 9})
    opening, (low,) = play(environment, "[0]")
    assert "between 1 and 3" in opening and not low.valid and "outside the range" in low.observation
    number = next(n for n in "123" if play(environment, n)[1][0].done)
    _, (right,) = play(environment, f"I say [{number}].")
    assert (right.outcome, right.score, right.valid) == (Outcome.CORRECT, 1.0, True)
    _, (wrong,) = play(environment, "3" if number != "3" else "1")
    hint = "lower" if number != "3" else "higher"
    assert (wrong.observation, wrong.valid) == (f"The target number is {hint}.", True)


def test_a_game_out_of_turns_or_with_two_invalid_moves():
    pytest.importorskip("textarena")
    environment = load(**GUESS, make={"max_number": 1000, "max_turns": 2})
    _, results = play(environment, "1", "2", "3")
    assert [result.stop_reason for result in results] == [None, None, StopReason.TURN_LIMIT]
    assert results[-1].valid and 0 < results[-1].score < 1 and results[-1].outcome is Outcome.INCORRECT
    _, results = play(environment, "x", "y")
    assert [result.valid for result in results] == [False, False]
    assert (results[-1].stop_reason, results[-1].score) == (StopReason.FINISHED, 0.0)


def test_games_on_threads_draw_from_their_own_seeds():
    pytest.importorskip("textarena")
    environment = load(id="textarena/2048-v0-ultra-easy", num_tasks=8)  # it draws at every move

    def seen(task):
        opening, results = play(environment, *["[left]", "[up]", "[right]", "[down]"] * 2, task=task)
        return opening, results

    alone = [seen(task) for task in range(8)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(seen, range(8))) == alone
