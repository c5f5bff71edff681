"""Index of texts by their n-grams: where a sequence of tokens occurred last.

An entry is a gram, n tokens for each n in [shortest, longest], and the position behind its newest
occurrence. Grams are keyed by their bytes, which Python hashes with a random key per process, so
entries are exact and collisions cannot be arranged.

Costs are bounded: a text's tokens are indexed a part at a time (`work`), and all entries of all
texts share one limit of bytes. Beyond it, the text with the most entries loses its oldest ones.
A text keeps its entries in segments, because a small dictionary grows in bounded time. Entries are
freed a part at a time, too, and count until they are.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

GRAMS_PER_WORK = 512  # entries per call of `work`: a few hundred microseconds
_SEGMENT_GRAMS = 8192
_TOKEN_BYTES = array("i").itemsize


def gram_bytes(longest: int) -> int:
    """Return the most memory that an entry takes, in bytes.

    A bytes object with its header and rounding, a position, and a dictionary's place at its lowest
    load.
    """
    return 33 + _TOKEN_BYTES * longest + 15 + 32 + 80


class IndexedText:
    """A growing text and the entries of its grams that another token follows.

    segment_grams:  entries from which on a segment is full
    """

    def __init__(
        self, shortest: int, longest: int, token_ids: Sequence[int], segment_grams: int
    ) -> None:
        self.token_ids = list(token_ids)
        self._segment_grams = segment_grams
        self._sizes = range(shortest, longest + 1)
        self._segments: deque[dict[bytes, int]] = deque([{}])
        self._num_indexed = 0  # grams that end at or before this position have been entered
        self.num_grams = 0  # entries, of all segments

    @property
    def num_segments(self) -> int:
        """Dictionaries that one look-up may read."""
        return len(self._segments)

    @property
    def is_indexed(self) -> bool:
        """Whether all grams that another token follows are entered."""
        return self._num_indexed >= len(self.token_ids) - 1

    def index(self, most: int) -> int:
        """Enter the next tokens' grams, about `most`; returns how many, known ones included."""
        first, sizes = self._num_indexed, self._sizes
        last = min(len(self.token_ids) - 1, first + max(1, most // len(sizes)))
        if last <= first:
            return 0
        if len(self._segments[-1]) >= self._segment_grams:
            self._segments.append({})
        segment = self._segments[-1]
        before = len(segment)
        start = max(0, first + 1 - sizes[-1])
        data = array("i", self.token_ids[start:last]).tobytes()
        count = 0
        for end in range(first + 1, last + 1):
            stop = _TOKEN_BYTES * (end - start)
            for size in range(sizes[0], min(sizes[-1], end) + 1):
                segment[data[stop - _TOKEN_BYTES * size : stop]] = end
                count += 1
        self._num_indexed = last
        self.num_grams += len(segment) - before
        return count

    def find(self, tail: Sequence[int]) -> int | None:
        """Return the position behind the newest occurrence of the longest known suffix of `tail`.

        None if no suffix of an indexed length is known.
        """
        data = array("i", tail[-self._sizes[-1] :]).tobytes()
        for size in reversed(self._sizes):
            if _TOKEN_BYTES * size > len(data):
                continue
            gram = data[len(data) - _TOKEN_BYTES * size :]
            for segment in reversed(self._segments):
                if (found := segment.get(gram)) is not None:
                    return found
        return None

    def drop_oldest(self) -> dict[bytes, int]:
        """Forget the entries of the oldest segment, and return it."""
        segment = self._segments.popleft()
        self.num_grams -= len(segment)
        if not self._segments:
            self._segments.append({})
        return segment


class GramIndex:
    """Texts by key, within one limit of memory.

    shortest, longest:  tokens of a gram
    max_bytes:          of all entries; tokens themselves take 8 bytes each on top
    """

    def __init__(self, shortest: int, longest: int, max_bytes: int) -> None:
        self._shortest, self._longest = shortest, longest
        most = max_bytes // gram_bytes(longest)
        self._segment_grams = min(_SEGMENT_GRAMS, most // 8)
        # A segment's table, less than half of its memory, is freed with its last entry.
        self._max_grams = most - self._segment_grams // 2
        self._texts: dict[int, IndexedText] = {}
        self._behind: dict[int, IndexedText] = {}  # in order of arrival
        self._dropped: list[dict[bytes, int]] = []  # segments to be freed
        self.num_grams = 0  # entries, of all texts and to be freed

    def add(self, key: int, token_ids: Sequence[int]) -> IndexedText:
        """Add a text, to be indexed by `work`; it replaces a text of the same key."""
        self.remove(key)
        text = IndexedText(self._shortest, self._longest, token_ids, self._segment_grams)
        self._texts[key] = self._behind[key] = text
        return text

    def get(self, key: int) -> IndexedText | None:
        """Return the text of a key."""
        return self._texts.get(key)

    def extend(self, key: int, token_ids: Sequence[int]) -> None:
        """Append the few tokens of a step to a text; unknown keys are ignored."""
        text = self._texts.get(key)
        if text is None:
            return
        text.token_ids.extend(token_ids)
        if key not in self._behind:
            self._enter(text, len(token_ids) * (self._longest - self._shortest + 1))

    def work(self) -> int:
        """Index a bounded part of the texts that wait, then free a part of what was removed.

        Returns how many grams were entered or freed.
        """
        done = 0
        while self._behind and done < GRAMS_PER_WORK:
            key, text = next(iter(self._behind.items()))
            done += self._enter(text, GRAMS_PER_WORK - done)
            if text.is_indexed:
                del self._behind[key]
        return done + self._free(GRAMS_PER_WORK - done)

    def remove(self, key: int) -> None:
        """Forget a text; unknown keys are ignored."""
        self._behind.pop(key, None)
        if (text := self._texts.pop(key, None)) is not None:
            while text.num_grams:
                self._dropped.append(text.drop_oldest())

    def _enter(self, text: IndexedText, most: int) -> int:
        """Index a part of a text, and keep to the limit of memory."""
        before = text.num_grams
        count = text.index(most)
        self.num_grams += text.num_grams - before
        while self.num_grams > self._max_grams:
            if not self._dropped:
                largest = max(self._texts.values(), key=lambda text: text.num_grams)
                self._dropped.append(largest.drop_oldest())
            self._free(self.num_grams - self._max_grams)
        return count

    def _free(self, most: int) -> int:
        """Free up to `most` entries that were dropped; returns how many."""
        done = 0
        while done < most and self._dropped:
            segment = self._dropped[-1]
            count = min(most - done, len(segment))
            for _ in range(count):
                segment.popitem()
            self.num_grams -= count
            done += count
            if not segment:
                self._dropped.pop()
        return done
