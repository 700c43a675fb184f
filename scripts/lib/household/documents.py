"""What the nightly automation has summarised: a week of the household's notes, the same three documents.

Each comes to roughly 2,000 tokens. Sentences vary in form and content, so that a prompt cache finds nothing
to reuse, and nothing is drawn anew, so that two runs have exactly the same work.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Final

_NUM_CHARACTERS: Final = 8400
"""About 2,000 tokens of such prose."""

_DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_PEOPLE: Final = ("Alice", "Bob", "the neighbour", "a guest", "the plumber", "Grandmother", "the courier")
_HOURS: Final = ("before dawn", "at breakfast", "around ten", "at noon", "in the early afternoon", "at dusk")
_FEELINGS: Final = ("as expected", "a little late", "without trouble", "against the plan", "for once on time")

_ENERGY: Final = (
    "{hour} on {day} the {machine} ran for {n} minutes and the meter moved more than {person} liked.",
    "The roof gave {n} percent of what was used on {day}, {feeling}, although clouds came {hour}.",
    "{person} switched off the {machine} {hour}; the standby lamp stayed lit until {other_day}.",
    "On {day} the battery was filled {hour}, and the {machine} drew from it for {n} minutes.",
    "Nobody noticed that the {machine} had been warm since {other_day} until {person} touched it {hour}.",
    "The tariff changed {hour} on {day}, so {person} moved the {machine} to the cheap hours, {feeling}.",
    "A fuse tripped {hour}; {person} found the {machine} and the kettle on one line on {day}.",
    "Compared with {other_day}, the {machine} needed {n} percent less on {day}, which surprised {person}.",
)
_MACHINES: Final = ("heat pump", "oven", "washing machine", "dryer", "car charger", "freezer", "dishwasher")

_GARDEN: Final = (
    "{person} watered the {plant} {hour} on {day} because the soil sensor had fallen to {n} percent.",
    "On {day} the {plant} stood in full flower, {feeling}, and bees came {hour}.",
    "Rain of {n} millimetres fell {hour} on {day}; the {plant} lay flat but rose again by {other_day}.",
    "{person} planted a second row beside the {plant} on {day} and promised to weed it {hour}.",
    "Slugs ate the {plant} between {other_day} and {day}; {person} set out beer traps {hour}.",
    "The greenhouse opened its roof {hour} on {day} at {n} degrees, {feeling}, and saved the {plant}.",
    "{person} picked {n} handfuls from the {plant} on {day} and left half of them for {other_day}.",
    "A blackbird nests behind the {plant}, so {person} will not cut there {hour}, certainly not on {day}.",
)
_PLANTS: Final = ("tomatoes", "lavender", "beans", "old rose", "strawberries", "pumpkin", "lettuce", "thyme")

_VISITS: Final = (
    "{person} rang {hour} on {day} and waited {n} seconds until the {door} was answered.",
    "The {door} stood open for {n} minutes {hour} on {day}; {person} closed it, {feeling}.",
    "On {day} {person} came home {hour}, and the lights near the {door} followed by themselves.",
    "A parcel lay at the {door} {hour}; {person} took it in on {day}, two days after {other_day}.",
    "{person} borrowed the ladder {hour} on {day} and brought it back through the {door} on {other_day}.",
    "The camera at the {door} saw only leaves {hour} on {day}, {n} times, which {person} found funny.",
    "{person} stayed for {n} minutes on {day}, left {hour}, and forgot an umbrella beside the {door}.",
    "The lock of the {door} was slow {hour} on {day}; {person} oiled it, {feeling}, before {other_day}.",
)
_DOORS: Final = ("front door", "garden gate", "cellar door", "garage door", "balcony door", "back entrance")


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One thing to summarise."""

    title: str
    instructions: str


def _notes(seed: int, sentences: tuple[str, ...], things: tuple[str, ...]) -> str:
    """Return prose of the wanted length; the same seed always gives the same text."""
    chance = Random(seed)
    text: list[str] = []
    kind = "machine" if things is _MACHINES else "plant" if things is _PLANTS else "door"
    for number in count():
        day, other_day = chance.sample(_DAYS, 2)
        sentence = sentences[(number + chance.randrange(2)) % len(sentences)].format(
            day=day,
            other_day=other_day,
            hour=chance.choice(_HOURS),
            person=chance.choice(_PEOPLE),
            feeling=chance.choice(_FEELINGS),
            n=chance.randrange(3, 99),
            **{kind: chance.choice(things)},
        )
        text.append(sentence[0].upper() + sentence[1:])
        if sum(map(len, text)) > _NUM_CHARACTERS:
            return " ".join(text)
    raise AssertionError("unreachable")


def _document(title: str, seed: int, sentences: tuple[str, ...], things: tuple[str, ...]) -> Document:
    notes = _notes(seed, sentences, things)
    order = f"Write a detailed report of the week from these notes of the household's {title.lower()} log."
    return Document(title=title, instructions=f"{order}\n\n{notes}\n\n{order}")


DOCUMENTS: Final = (
    _document("Energy", 1, _ENERGY, _MACHINES),
    _document("Garden", 2, _GARDEN, _PLANTS),
    _document("Visitors", 3, _VISITS, _DOORS),
)
