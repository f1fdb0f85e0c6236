import dataclasses

import pytest
import torch

from agent_peft.batch import collate, trained_mask
from agent_peft.types import Task, Trajectory, Turn

SHORT = Trajectory(Task("a"), (Turn((1,), (2,), (-0.5,)),), rewards=(1.0,))
LONG = Trajectory(
    Task("b"), (Turn((1, 2), (3,), (-0.25,)), Turn((4,), (5, 6), (-0.1, -0.2))), rewards=(0.5, -2.0)
)


def test_collate_pads_on_the_right():
    batch = collate([SHORT, LONG], groups=[4, 7])
    assert batch.tokens.tolist() == [[1, 2, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6]]
    assert batch.lengths.tolist() == [2, 6]
    assert batch.action_mask.int().tolist() == [[0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 1, 1]]
    torch.testing.assert_close(
        batch.logprobs, torch.tensor([[0, -0.5, 0, 0, 0, 0], [0, 0, -0.25, 0, -0.1, -0.2]])
    )
    assert batch.returns.tolist() == [1.0, -1.5]
    assert batch.groups.tolist() == [4, 7]
    assert not batch.weights.any() and not batch.advantages.any()


def test_the_first_token_is_never_learnt_since_nothing_predicts_it():
    assert collate([Trajectory(Task("t"), (Turn((), (1, 2), (-1.0, -1.0)),))], [0]).action_mask.tolist() == [
        [False, True]
    ]


@pytest.mark.parametrize(
    ("mistake", "repair", "learned"),
    [
        ((7, 1, 2, 8, 9), (7, 3, 8, 9), "0110"),  # other tokens, and the one after them
        ((7, 8, 9), (7, 3, 4, 8, 9), "01110"),  # more tokens
        ((7, 1, 8, 9), (7, 8, 9), "010"),  # fewer: it has to continue with the 8
        ((7, 1, 8, 1, 9), (7, 2, 8, 2, 9), "01111"),  # two changes, and what is between them
        ((7, 1, 1, 1, 9), (7, 1, 1, 9), "0001"),  # tokens that fit the start and the end count once
        ((1, 2), (1, 2, 3), "001"),
        ((1, 2, 3), (1, 2), "01"),
        ((1, 2), (3,), "1"),
        ((1, 2), (1, 2), "01"),  # no repair; a turn has something to learn
    ],
)
def test_of_a_repair_what_it_changes_is_learned(mistake, repair, learned):
    """Everything before and after is as in the mistake, and to learn it would teach to copy the mistake."""
    logprobs = tuple(0.0 for _ in mistake), tuple(0.0 for _ in repair)
    turns = (
        Turn((5,), mistake, logprobs[0], mistake=True),
        Turn((6,), repair, logprobs[1]),
        Turn((5,), repair, logprobs[1]),
    )
    mask = "".join(str(int(is_learned)) for is_learned in trained_mask(Trajectory(Task("t"), turns), False))
    assert mask == "0" + "0" * len(mistake) + "0" + learned + "0" + "1" * len(repair), "only after a mistake"


def test_select_cuts_to_the_longest_row_chosen():
    batch = dataclasses.replace(collate([SHORT, LONG, SHORT], [0, 1, 2]), reference_logprobs=torch.ones(3, 6))
    chosen = batch.select([2, 0])
    assert chosen.tokens.tolist() == [[1, 2], [1, 2]]
    assert chosen.groups.tolist() == [2, 0]
    assert chosen.reference_logprobs.shape == (2, 2)
    assert len(chosen) == 2


def test_to_leaves_an_absent_reference_absent():
    batch = collate([SHORT], [0]).to("cpu")
    assert batch.reference_logprobs is None
    assert batch.tokens.tolist() == [[1, 2]]


def test_a_batch_of_nothing_is_what_a_rank_without_groups_has():
    nothing, none = collate([], []), collate([SHORT], [3]).select([])
    assert len(nothing) == 0 and nothing.rows_by_group() == {}
    assert none.sequences == nothing.sequences == []
    for name in (field.name for field in dataclasses.fields(none)):
        ours, tensor = getattr(nothing, name), getattr(none, name)
        assert (ours is None and tensor is None) or (ours.shape, ours.dtype) == (tensor.shape, tensor.dtype)


def test_parts_of_a_batch_share_the_lists_of_its_tokens():
    batch = collate([SHORT, LONG], [0, 1])
    part = batch.select([1]).to("cpu")
    assert part.sequences[0] is batch.sequences[1] and part.sequences == [list(LONG.tokens)]


def test_rows_by_group():
    assert collate([SHORT, LONG, SHORT], [4, 4, 1]).rows_by_group() == {4: [0, 1], 1: [2]}


def test_each_turns_reward_is_on_its_last_sampled_token():
    assert collate([SHORT, LONG], [0, 1]).rewards.tolist() == [[0, 1.0, 0, 0, 0, 0], [0, 0, 0.5, 0, 0, -2.0]]


def test_no_reward_is_lost_where_a_turn_sampled_nothing():
    empty = Turn((7, 8), (), ())
    for turns in (
        (empty, LONG.turns[0], LONG.turns[1]),
        (LONG.turns[0], empty, LONG.turns[1]),
        (*LONG.turns, empty),
    ):
        batch = collate([Trajectory(Task("t"), turns, rewards=(1.0, 2.0, 4.0))], [0])
        assert batch.rewards.sum(1).tolist() == batch.returns.tolist() == [7.0]
        assert not batch.rewards[~batch.action_mask].any()
    # a turn that sampled nothing pays with the token before it; the first with the first token to come
    assert batch.rewards[0].tolist() == [0, 0, 1.0, 0, 0, 6.0, 0, 0]
    assert collate(
        [Trajectory(Task("t"), (Turn((), (1,), (-1.0,)), LONG.turns[0]), rewards=(1.0, 2.0))], [0]
    ).rewards.tolist() == [[0, 0, 0, 3.0]]


def test_rewards_are_one_for_each_turn():
    with pytest.raises(ValueError, match="zip"):
        collate([Trajectory(Task("t"), LONG.turns, rewards=(1.0,))], [0])


CUT = Trajectory(
    Task("c"),
    (
        Turn((1,), (2, 3), (-0.5, -0.25)),
        Turn((4,), (5, 6), (-0.1, float("-inf")), cut=True),
        Turn((7,), (8,), (-0.2,)),
    ),
    rewards=(1.0, -0.5, 0.25),
)


def test_cut_actions_are_left_out_where_that_is_asked_for():
    """Their tokens are read, and not learned from; their rewards go to the last token that is."""
    whole, masked = collate([CUT], [0]), collate([CUT], [0], mask_cut=True)
    assert masked.action_mask.int().tolist() == [[0, 1, 1, 0, 0, 0, 0, 1]]
    assert whole.action_mask.int().tolist() == [[0, 1, 1, 0, 1, 1, 0, 1]]
    assert masked.tokens.tolist() == whole.tokens.tolist() and masked.returns.tolist() == [0.75]
    assert masked.rewards.tolist() == [[0, 0, 0.5, 0, 0, 0, 0, 0.25]]
    torch.testing.assert_close(masked.logprobs, torch.tensor([[0, -0.5, -0.25, 0, 0, 0, 0, -0.2]]))
    assert collate([SHORT, LONG], [0, 1], mask_cut=True).action_mask.equal(
        collate([SHORT, LONG], [0, 1]).action_mask
    )


def test_mistakes_of_a_demonstration_are_always_left_out():
    """They are read, and their rewards go to the first token that is learned."""
    wrong = Turn((1,), (2, 3), (0.0, 0.0), valid=False, mistake=True)
    shown = Trajectory(Task("m"), (wrong, Turn((4,), (5, 6), (0.0, 0.0))), rewards=(-0.5, 1.0))
    for mask_cut in (False, True):
        batch = collate([shown], [0], mask_cut)
        assert batch.action_mask.int().tolist() == [[0, 0, 0, 0, 1, 1]]
        assert batch.tokens.tolist() == [[1, 2, 3, 4, 5, 6]]
        assert batch.rewards.tolist() == [[0, 0, 0, 0, -0.5, 1.0]]
