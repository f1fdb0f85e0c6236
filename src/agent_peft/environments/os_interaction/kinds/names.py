"""The names of folders, files, people and groups, and the words of generated tasks, in two disjoint pools."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Names:
    """The pools of one split, and how it asks for several things at once (``joints``: what stands before each
    request).

    >>> set(TRAIN.users) & set(HELDOUT.users)
    set()
    """

    tops: tuple[str, ...]
    folders: tuple[str, ...]
    stems: tuple[str, ...]
    extensions: tuple[str, ...]
    users: tuple[str, ...]
    groups: tuple[str, ...]
    words: tuple[str, ...]
    joints: tuple[tuple[str, str, str], ...]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


TRAIN = Names(
    tops=_words("/srv /opt /data /work"),
    folders=_words(
        "atlas birch cedar comet delta ember falcon garnet harbor iris juniper kestrel lagoon maple nimbus "
        "onyx pebble quartz ridge sable "
        "topaz umber violet willow zephyr basil coral dune fern grove hazel ivory jade linden mango nova"
    ),
    stems=_words(
        "notes report budget draft invoice plan summary schedule recipe letter inventory orders readings "
        "metrics journal agenda checklist "
        "contacts minutes results settings stock tickets wishes todo diary prices events"
    ),
    extensions=_words("txt log conf md csv cfg"),
    users=_words(
        "alice bruno carla dmitri elena felix greta hugo irene jonas karin liam marta nils olga pavel rosa "
        "stefan tara viktor wendy yusuf "
        "anton berta clara david"
    ),
    groups=_words(
        "editors rangers painters builders drivers bakers sailors miners welders writers tailors farmers "
        "singers weavers hikers readers "
        "runners jugglers nurses players"
    ),
    words=_words(
        "apple river stone cloud paper green window silver button candle garden market orange yellow "
        "rocket planet bridge forest castle "
        "dragon island kettle mirror needle pillow ribbon spider turtle wagon"
    ),
    joints=(
        ("", " ", " "),
        ("", " Then do this: ", " After that: "),
        ("1. ", " 2. ", " 3. "),
        ("First: ", " Second: ", " Third: "),
    ),
)

HELDOUT = Names(
    tops=_words("/depot /projects /storage /vault"),
    folders=_words(
        "anchor beacon canyon dahlia elm fjord glacier heron indigo jasper kelp lotus mesa nectar orchid "
        "prairie quill raven spruce tundra "
        "urchin vale walnut yarrow acorn bramble clover drift"
    ),
    stems=_words(
        "memo ledger outline survey quote roster catalog itinerary manual receipts scores transcript "
        "proposal glossary logbook bulletin "
        "timetable payroll essay lecture"
    ),
    extensions=_words("text list ini rst tsv dat"),
    users=_words(
        "amara boris celine diego edith fabio gwen hassan ingrid jorge kaya lena milan nadia oscar priya "
        "ravi sofia tomas ursula vera zane"
    ),
    groups=_words(
        "pilots dancers gardeners potters tutors chemists divers masons brewers skaters cooks poets "
        "surveyors florists archers climbers"
    ),
    words=_words(
        "lemon meadow copper thunder basket purple ladder marble pocket saddle tunnel whistle harvest "
        "lantern velvet blanket cactus pepper "
        "anvil bucket curtain feather hammer"
    ),
    joints=(
        ("Two or more things are needed. ", " Also: ", " And: "),
        ("(a) ", " (b) ", " (c) "),
        ("To begin with: ", " Next: ", " At last: "),
    ),
)
