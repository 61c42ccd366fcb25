"""Which drawings of the Open Clip Art Library the quickstart takes, and which of their keywords it keeps."""

from __future__ import annotations

import re

# What can be told from a picture of this size.
FOLDERS = (
    "animals",
    "buildings",
    "computer/buttons",
    "computer/hardware",
    "computer/icons/lemon-theme",
    "decorations",
    "education",
    "electronics",
    "food",
    "geography",
    "people",
    "plants",
    "recreation/games",
    "recreation/holiday",
    "recreation/music",
    "recreation/party",
    "recreation/sports",
    "recreation/toys",
    "shapes/arrows",
    "shapes/callouts",
    "shapes/flowchart",
    "shapes/jigsaw",
    "signs_and_symbols/clocks",
    "signs_and_symbols/flags",
    "signs_and_symbols/led",
    "signs_and_symbols/map_symbols",
    "signs_and_symbols/weather",
    "special/patterns",
    "tools",
    "transportation",
)
# Beginnings of names: backs of cards, one brand's cars, photographs of people, what not everybody wants to look at.
LEFT_OUT = (
    "people/a_man_singing",
    "people/breakdance",
    "people/clothing/pantyhose/",
    "people/enthusiast",
    "people/female_rollandin",
    "people/grandpa",
    "people/hide_girl",
    "people/jazz",
    "people/john_coltrane",
    "people/martin_luther_king",
    "people/sexy_lady",
    "recreation/games/cards/cardbacks/",
    "recreation/games/cards/photo",
    "signs_and_symbols/flags/historic/",
    "signs_and_symbols/flags/miscellany/",
    "tools/weapons/",
    "transportation/vehicles/hummers/",
)
# Keywords that say how a drawing was made or used rather than what it shows.
MEANINGLESS = {
    "11",
    "action",
    "activities",
    "application",
    "architetto francesco rollandin",
    "bordered",
    "cartoon",
    "device",
    "entertainment",
    "equipment",
    "filesystem",
    "geometry",
    "hash",
    "home",
    "icons",
    "lemon theme icon",
    "logo",
    "menu",
    "mimetypes",
    "ornamental",
    "recreation",
    "security",
    "signs and symbols",
    "simple",
    "states",
    "subnational",
    "symbol",
    "theme",
    "united nations member",
    "unsorted",
    "webpage",
    "white",
    "work",
}
# One spelling for each meaning.
ONE_SPELLING = {
    "arrowshape": "arrow",
    "bodypart": "body part",
    "buttons": "button",
    "desserts": "dessert",
    "flags": "flag",
    "icecream": "ice cream",
    "mapsym": "map symbol",
    "musicstuff": "music",
    "northamerica": "north america",
    "roadsign": "road sign",
    "signalflag": "signal flag",
    "tools": "tool",
    "transportation": "transport",
    "unitedstates": "united states",
}
# Titles that name a collection, not the drawing.
COLLECTION = re.compile(r"clipart|clip art|collection|svg|^card$|map symbols|_|^\W*$", re.IGNORECASE)


def is_chosen(name: str) -> bool:
    """Whether the drawing of this name, its path in the library, is taken."""
    return name.startswith(tuple(f"{folder}/" for folder in FOLDERS)) and not name.startswith(LEFT_OUT)


def is_telling(title: str) -> bool:
    """Whether a title says what the drawing shows."""
    return COLLECTION.search(title) is None


def clean_keyword(keyword: str) -> str | None:
    """A keyword in its one spelling, or None where it says nothing about the picture."""
    keyword = keyword.strip().lower().replace("_", " ")
    keyword = ONE_SPELLING.get(keyword, keyword)
    return keyword if re.fullmatch("[a-z ]+", keyword) and keyword not in MEANINGLESS else None
