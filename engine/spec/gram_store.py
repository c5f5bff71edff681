"""Texts of earlier requests by their n-grams, apart by namespace and within a limit of memory.

A table of a fixed number of places says for each gram where it occurred last: in which text, behind
which token. Keyed hashes of namespace and gram choose the place, a newer gram takes an older one's,
and a found place counts only if the text there has the same tokens and is of the same namespace. So
a text that is forgotten needs no clearing up: its places no longer lead anywhere. Nothing else is
shared by namespaces but room, for which the least recently used text goes, whosever it is.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from remora.engine.types import Namespace

_TOKEN_BYTES = array("i").itemsize
_PLACE_BYTES = array("q").itemsize
_POSITION_BITS = 24
_TEXT_SHARE = 8  # one part in so many is for texts, the others for the table
TEXT_BYTES = 400  # of a text's objects, without tokens
_KEPT_BYTES = _TOKEN_BYTES + 1  # of a token in an array that grows
_WAITING_BYTES = 40  # of a token that waits, a Python int in a list


class _Text:
    """A text, and its tokens that wait for being indexed; the first ones come first."""

    __slots__ = ("namespace", "num_indexed", "token_ids", "waiting")

    def __init__(self, namespace: Namespace, waiting: list[int]) -> None:
        self.namespace = namespace
        self.token_ids = array("i")
        self.waiting = waiting
        self.num_indexed = 0  # grams that end at or before this position have been entered

    @property
    def num_bytes(self) -> int:
        return (
            TEXT_BYTES
            + _KEPT_BYTES * len(self.token_ids)
            + _WAITING_BYTES * len(self.waiting)
            + 4 * len(self.namespace.salt)  # the widest characters
        )


class GramStore:
    """Texts of all namespaces, of which `work` indexes a bounded part at a time.

    shortest, longest:  tokens of a gram
    max_bytes:          of table and texts
    """

    def __init__(self, shortest: int, longest: int, max_bytes: int) -> None:
        self._sizes = range(shortest, longest + 1)
        self._max_text_bytes = max_bytes // _TEXT_SHARE
        self._num_places = max(1, (max_bytes - self._max_text_bytes) // _PLACE_BYTES)
        self._places = array("q", [0]) * self._num_places  # text number and position; 0 = none
        self._texts: OrderedDict[int, _Text] = OrderedDict()  # the least recently used first
        self._behind: OrderedDict[int, _Text] = OrderedDict()  # in order of arrival
        self._next_number = 1
        self._text_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Memory of table and texts."""
        return _PLACE_BYTES * self._num_places + self._text_bytes

    @property
    def num_texts(self) -> int:
        """Texts that are kept, of all namespaces."""
        return len(self._texts)

    def add(self, namespace: Namespace, token_ids: list[int]) -> None:
        """Add a text, to be indexed by `work`; of one that is too long, its end.

        token_ids:  the store's from now on
        """
        room = self._max_text_bytes - TEXT_BYTES - 4 * len(namespace.salt)
        most = min(room // _WAITING_BYTES, 1 << _POSITION_BITS)
        if most < 1:
            return
        if len(token_ids) > most:
            del token_ids[:-most]
        text = _Text(namespace, token_ids)
        self._texts[self._next_number] = self._behind[self._next_number] = text
        self._next_number += 1
        self._text_bytes += text.num_bytes
        while self._text_bytes > self._max_text_bytes:
            number, oldest = self._texts.popitem(last=False)
            self._behind.pop(number, None)
            self._text_bytes -= oldest.num_bytes

    def work(self, most: int) -> int:
        """Index the next part of the texts that wait; returns how many grams, about `most`."""
        done = 0
        while self._behind and done < most:
            number, text = next(iter(self._behind.items()))
            before = text.num_bytes
            count = max(1, (most - done) // len(self._sizes))
            text.token_ids.extend(text.waiting[:count])
            del text.waiting[:count]
            self._text_bytes += text.num_bytes - before
            done += self._enter(number, text)
            if not text.waiting:
                del self._behind[number]
        return done

    def find(self, namespace: Namespace, tail: Sequence[int], most: int) -> Sequence[int]:
        """Return up to `most` tokens that followed the longest known suffix of `tail`.

        Only texts of the namespace are looked up.
        """
        prefix = _prefix(namespace)
        data = array("i", tail[-self._sizes[-1] :])
        for size in range(min(self._sizes[-1], len(data)), self._sizes[0] - 1, -1):
            gram = data[len(data) - size :]
            place = self._places[hash(prefix + gram.tobytes()) % self._num_places]
            number, end = place >> _POSITION_BITS, place & ((1 << _POSITION_BITS) - 1)
            text = self._texts.get(number)
            if (
                text is not None
                and text.namespace == namespace
                and text.token_ids[max(0, end - size) : end] == gram
            ):
                self._texts.move_to_end(number)
                return text.token_ids[end : end + most].tolist()
        return ()

    def _enter(self, number: int, text: _Text) -> int:
        """Enter the grams of a text that another token follows and that are not entered yet."""
        prefix, places, num_places = _prefix(text.namespace), self._places, self._num_places
        shortest, longest = self._sizes[0], self._sizes[-1]
        first, last = text.num_indexed, len(text.token_ids) - 1
        start = max(0, first + 1 - longest)
        data = text.token_ids[start:last].tobytes()
        count = 0
        for end in range(first + 1, last + 1):
            stop = _TOKEN_BYTES * (end - start)
            place = number << _POSITION_BITS | end
            for size in range(shortest, min(longest, end) + 1):
                gram = data[stop - _TOKEN_BYTES * size : stop]
                places[hash(prefix + gram) % num_places] = place
                count += 1
        text.num_indexed = max(first, last)
        return count


def _prefix(namespace: Namespace) -> bytes:
    """Return bytes that keep the places of namespaces apart; what is found is compared anyway."""
    return hash(namespace).to_bytes(8, "little", signed=True)
