"""Integers in a model's text."""

import re

# A minus sign counts only at the start of a word, and digits beyond the eighteenth do not.
INTEGER = re.compile(r"(?:(?<!\w)-)?[0-9]{1,18}")


def first_integer(text: str) -> int | None:
    found = INTEGER.search(text)
    return int(found[0]) if found else None


def last_integer(text: str) -> int | None:
    """As `first_integer`; commas within a number are taken out ("1,204" is 1204)."""
    found = INTEGER.findall(re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", text))
    return int(found[-1]) if found else None
