"""How people join phrases: lists, and conditions with "and", "or" and "either"."""

from __future__ import annotations

from agent_peft.environments.db_bench.generation.grammar import Derivation
from agent_peft.environments.db_bench.generation.plan import Junction


def listed(draw: Derivation, texts: list[str], word: str = "and") -> str:
    """Texts with commas and a word before the last one."""
    if len(texts) == 1:
        return texts[0]
    comma = "," if len(texts) > 2 and draw.chance(0.6) else ""
    return f"{', '.join(texts[:-1])}{comma} {word} {texts[-1]}"


def joined(draw: Derivation, junction: Junction, texts: list[str]) -> str:
    """Conditions joined so that what belongs together can be told."""
    word = junction.connector.lower()
    nested = any(isinstance(part, Junction) for part in junction.parts)
    if not nested:
        if word == "or":
            either = "either " if draw.chance(0.6) else ""
            return either + listed(draw, texts, "or")
        return (
            "both " if len(texts) == 2 and texts[0].startswith("the ") and draw.chance(0.03) else ""
        ) + listed(draw, texts, "and")
    first, second = texts
    inner_or = word == "and"
    if inner_or:  # (a or b) and c
        bracketed = [
            f"either {text.removeprefix('either ')}" if isinstance(part, Junction) else text
            for part, text in zip(junction.parts, texts, strict=True)
        ]
        if draw.chance(0.25):
            bracketed = [
                f"({text.removeprefix('either ')})" if isinstance(part, Junction) else text
                for part, text in zip(junction.parts, texts, strict=True)
            ]
            return f"{bracketed[0]} and {bracketed[1]}"
        if isinstance(junction.parts[0], Junction) and isinstance(junction.parts[1], Junction):
            return f"{bracketed[0]}, and also {bracketed[1]}"
        plain, choice = (
            (bracketed[1], bracketed[0])
            if isinstance(junction.parts[0], Junction)
            else (bracketed[0], bracketed[1])
        )
        return f"{plain}, and {choice}" if draw.chance(0.5) else f"{plain} and, in addition, {choice}"
    if draw.chance(0.25):
        marked = [
            f"({text})" if isinstance(part, Junction) else text
            for part, text in zip(junction.parts, texts, strict=True)
        ]
        return f"{marked[0]} or {marked[1]}"
    return f"either {first}, or {second}" if draw.chance(0.6) else f"{first}, or else {second}"
