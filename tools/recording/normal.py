"""Removes from a recording what differs between two runs of the same program.

`normal.yaml` is the whole list. It replaces ports of loopback addresses above 9999 except the default 50050, ids, seeds that were drawn (6
to 19 digits), times and durations by the names of their fields, the figures of a line for people, PIDs with the padding beside them, dates,
names of log folders, versions of Python, sizes with a unit, addresses of objects, and numbers of folders. Before that, the folders and
addresses of the recording are replaced by their names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tools.recording.stack import read_table

QUOTE = r'\\*"'


class Normal:
    """The rules of one recording. places: names by the folder or address that each replaces."""

    def __init__(self, places: Mapping[str, str]) -> None:
        rules = read_table("normal.yaml")
        long_first = sorted(places, key=len, reverse=True)
        self._table = [(re.compile(re.escape(place)), places[place].replace("\\", r"\\")) for place in long_first]
        for pattern, replacement in rules["table"]:
            self._table.append((re.compile(pattern.replace("{quote}", QUOTE).replace("{times}", rules["times"])), replacement))

    def of(self, result: Any) -> Any:
        """The result without what differs from run to run."""
        text = json.dumps(result, ensure_ascii=False, sort_keys=True)
        for pattern, replacement in self._table:
            text = pattern.sub(replacement, text)
        return json.loads(text)
