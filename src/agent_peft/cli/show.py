"""The commands that show a run: show prints episodes, report makes a page for a browser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agent_peft.cli.app import AsJson, print_output
from agent_peft.printable import printable
from agent_peft.types import AgentPeftError, Outcome

if TYPE_CHECKING:
    from rich.console import RenderableType

    from agent_peft.runs.reading import EpisodeRecord

STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "cyan"}
ORDERS = {"reward": "reward", "advantage": "advantage", "turns": "turns", "tokens": "num_tokens"}
OUTCOMES = {"correct": "bold green", "incorrect": "bold red", "unknown": "bold yellow"}


def show(
    run: Annotated[Path, typer.Argument(help="run directory", metavar="RUN")],
    step: Annotated[
        int | None, typer.Option(min=1, help="step of the run, from 1; the newest by default")
    ] = None,
    task: Annotated[str | None, typer.Option(help="task, by its id; without it, all are listed")] = None,
    attempt: Annotated[int | None, typer.Option(min=0, help="which episode of the task, from 0")] = None,
    evaluation: Annotated[
        str | None, typer.Option(help="an evaluation instead of a step, such as after_grpo")
    ] = None,
    outcome: Annotated[
        Outcome | None, typer.Option(help="only episodes that ended so", case_sensitive=False)
    ] = None,
    sort: Annotated[
        str | None, typer.Option(help=f"{', '.join(ORDERS)}: the lowest first; the highest with -reward")
    ] = None,
    worst: Annotated[bool, typer.Option("--worst", help="the episode with the lowest reward")] = False,
    as_json: AsJson = False,
) -> None:
    """Show an episode as the agent saw it, with its rewards and with what would have been right. Where
    several episodes fit, list them.
    """
    episodes, place = _episodes(run, step, evaluation)
    matches = _fitting(episodes, task, attempt, place)
    if outcome is not None:
        matches = [episode for episode in matches if episode.outcome is outcome]
        place = f"{place}, {outcome.value}"
        if not matches:
            raise AgentPeftError(f"{place}: there is no such episode; leave --outcome out to list all")
    if worst:
        if sort is not None or attempt is not None:
            raise AgentPeftError("--worst is one episode; leave --sort and --attempt out")
        matches = [min(matches, key=lambda episode: episode.reward)]
    elif sort is not None:
        matches = _sorted(matches, sort)
    if as_json:
        print_output({"episodes": [_json(episode) for episode in matches]})
    elif len(matches) == 1 or (task is not None and attempt is not None):
        for episode in matches:
            print_output(_drawn(episode, place))
    else:
        print_output(_list(matches, place))
        print("add --task and --attempt to see one of them")


def _episodes(run: Path, step: int | None, evaluation: str | None) -> tuple[list[EpisodeRecord], str]:
    """The episodes of a step or an evaluation, and its name."""
    from agent_peft.runs.reading import load_run

    record = load_run(run)
    if evaluation is None:
        steps = record.trajectories.steps
        if not steps:
            raise AgentPeftError(f"{run}: has no trajectories; there are some once a step is done")
        number = steps[-1] if step is None else step - 1
        if number not in steps:
            near = min(steps, key=lambda other: abs(other - number))
            raise AgentPeftError(
                f"step {step} has no trajectories on disk; the nearest that has some is {near + 1}"
            )
        return record.trajectories.of_step(number), f"step {number + 1}"
    if step is not None:
        raise AgentPeftError("--step has no effect with --evaluation; leave one of them out")
    result = record.evaluation(evaluation)
    if not result.episodes.steps:
        raise AgentPeftError(
            f"{run}: the evaluation {evaluation!r} has no episodes; its numbers are in {result.path}"
        )
    return list(result.episodes), f"evaluation {result.name}"


def _fitting(
    episodes: list[EpisodeRecord], task: str | None, attempt: int | None, place: str
) -> list[EpisodeRecord]:
    from agent_peft.lookup import alike

    of_task = [episode for episode in episodes if task in (None, episode.task)]
    if not of_task:
        near = alike(task, {episode.task for episode in episodes})
        advice = "leave --task out to list them" if near is None else f"did you mean {near!r}?"
        raise AgentPeftError(f"{place} has no task {task!r}; {advice}")
    matches = [episode for episode in of_task if attempt in (None, episode.attempt)]
    if not matches:
        most = max(episode.attempt for episode in of_task)
        what = place if task is None else f"{place}, task {task!r}"
        raise AgentPeftError(f"{what}: has no attempt {attempt}; the last is {most}")
    return matches


def _sorted(episodes: list[EpisodeRecord], order: str) -> list[EpisodeRecord]:
    name = order.removeprefix("-")
    if name not in ORDERS:
        from agent_peft.lookup import nearest

        raise AgentPeftError(f"--sort {order}: unknown; {nearest(name, ORDERS)}")
    return sorted(episodes, key=lambda one: one.summary.get(ORDERS[name]) or 0, reverse=order != name)


def _json(episode: EpisodeRecord) -> dict[str, Any]:
    fields = {name: value for name, value in vars(episode).items() if not name.startswith("_")}
    return {**fields, "messages": [message.to_json() for message in episode.messages]}


def _list(episodes: list[EpisodeRecord], place: str) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{place}: {len(episodes)} episodes", title_justify="left")
    for heading in ("task", "attempt", "outcome", "ended", "reward", "advantage", "turns", "tokens"):
        table.add_column(heading, no_wrap=heading == "task")
    for episode in episodes:
        facts = episode.summary
        numbers = [_number(facts[name]) if name in facts else "" for name in ("reward", "advantage")]
        counts = [str(facts[name]) for name in ("turns", "num_tokens")]
        outcome = Text(episode.outcome.value, style=OUTCOMES[episode.outcome])
        table.add_row(
            Text(episode.task), str(episode.attempt), outcome, episode.stop_reason.value, *numbers, *counts
        )
    return table


def _drawn(episode: EpisodeRecord, place: str) -> RenderableType:
    """An episode: what is known of it, then its messages."""
    from rich.console import Group
    from rich.text import Text

    stage = "" if episode.stage is None else f" of stage {episode.stage}"
    skills = f" ({', '.join(episode.skills)})" if episode.skills else ""
    head = (
        f"{place}{stage}, task {episode.task}{skills}, attempt {episode.attempt} of group {episode.group}, "
        f"seed {episode.seed}"
    )
    outcome = Text(episode.outcome.value, style=OUTCOMES[episode.outcome])
    score = "" if episode.score is None else f", score {_number(episode.score)}"
    outcome.append(
        f"{score}, {episode.stop_reason.value}; {episode.num_tokens} tokens, "
        f"{episode.num_action_tokens} of them the agent's",
        style="not bold default",
    )
    terms = ", ".join(f"{name} {_number(value)}" for name, value in episode.reward_terms.items())
    reward = f"reward {_number(episode.reward)} = {terms}"
    parts = [Text(printable(head), style="bold"), outcome, Text(printable(reward))]
    actions = [n for n, message in enumerate(episode.messages) if message.role == "assistant"]
    turn_of = {place: turn for turn, place in enumerate(actions[-len(episode.rewards) :])}
    for number, message in enumerate(episode.messages):
        style = STYLES.get(message.role, "")
        title = message.role + (_of_turn(episode, turn_of[number]) if number in turn_of else "")
        content = "\n".join(map(printable, message.text.split("\n")))
        parts += [Text(), Text(f"── {title} ──", style=f"bold {style}"), Text(content, style=style)]
    if episode.reference is not None:
        content = "\n".join(map(printable, episode.reference.split("\n")))
        parts += [Text(), Text("── what would have been right ──", style="bold magenta"), Text(content)]
    return Group(*parts)


def _of_turn(episode: EpisodeRecord, turn: int) -> str:
    """What is known of a turn, for the title of its action."""
    parts = [f", turn {turn + 1}", f"reward {_number(episode.rewards[turn])}"]
    if episode.advantages is not None:
        parts.append(f"advantage {_number(episode.advantages[turn])}")
    if turn in episode.invalid_turns:
        parts.append("not understood")
    if turn in episode.cut_turns:
        parts.append("cut by a limit on tokens")
    if episode.forced and episode.forced[turn]:
        parts.append("its thought cut by sampling.max_thinking_tokens")
    if turn in episode.mistake_turns:
        parts.append("a mistake, not learned")
    return ", ".join(parts)


def _number(value: float) -> str:
    """
    >>> _number(0.30000000000000004), _number(-1.0), _number(1e-7)
    ('0.3', '-1', '1e-07')
    """
    return f"{value:.4g}"


def report(
    runs: Annotated[list[Path], typer.Argument(help="run directories", metavar="RUN...")],
    output: Annotated[
        Path | None,
        typer.Option(help="the file to write; by default RUN/report.html, for several runs ./report.html"),
    ] = None,
    live: Annotated[
        bool,
        typer.Option("--live", help="serve the page on this machine, and refresh it while runs continue"),
    ] = False,
    port: Annotated[
        int | None, typer.Option(help="port of --live; by default any free one", min=0, max=65535)
    ] = None,
) -> None:
    """Write a page with the curves, evaluations, configuration and episodes of runs."""
    if not live:
        if port is not None:
            raise AgentPeftError("--port has no effect without --live; leave it out")
        _write_report(runs, output)
    elif output is not None:
        raise AgentPeftError(
            "--output has no effect with --live, which writes nothing; leave one of them out"
        )
    else:
        _serve_report(runs, port or 0)


def _write_report(runs: list[Path], output: Path | None) -> None:
    from agent_peft.reports.page import write_report

    place = output or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    result = write_report(runs, place)
    note = "" if result.beside is None else f" (keep the folder {result.beside.name} next to it)"
    print(printable(f"wrote {result.page}: {result.episodes} episodes{note}; open it in a browser"))


def _serve_report(runs: list[Path], port: int) -> None:
    from agent_peft.reports.live import live_server

    with live_server(runs, port) as server:
        print(f"open http://127.0.0.1:{server.server_address[1]}/ in a browser; Ctrl-C ends it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("ended")
