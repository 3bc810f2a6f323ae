"""Pages of the KV cache: which are free, who holds them, and which can be found again.

A page is a block of ``block_size`` tokens of the cache. Of each, one thing holds at a time:

    free    nobody needs what is in it               a bit of ``FreePages``
    held    by one request or more (``owners``)      written only while one request holds it
    idle    held by nobody, and found by its digest  the longest unused one is evicted first

A page that more than one request holds is full, so none of them writes to it, and copying on write
comes down to this: whoever goes on from a shared prefix whose last page is partly filled needs a
page of its own for that part. Pages are never moved.

The digest of a full page names its tokens and all before them:

    digest[i] = blake2b(digest[i - 1] | tokens[i * block_size : (i + 1) * block_size])

16 bytes, so that two prefixes never meet by chance (keys and values of other tokens would be read,
and nothing would tell).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

WORD = 64


class FreePages:
    """A bit a page, 1 = free, in 64-bit words, and a stack of the words that have one.

    Taking a page and giving it back are a few operations on one word, however many pages there are:
    the word on top of the stack, and its lowest bit. Pages that are taken together mostly adjoin.
    """

    def __init__(self, num_pages: int) -> None:
        whole, rest = divmod(num_pages, WORD)
        words = [2**WORD - 1] * whole + [2**rest - 1] * (rest > 0)
        self.num_pages = self.count = num_pages
        self._words: array[int] = array("Q", words)
        self._open: array[int] = array("I", reversed(range(len(words))))  # words that are not 0

    def take(self, count: int) -> list[int]:
        """So many free pages, no longer free. There must be as many (``count``)."""
        assert count <= self.count, f"{count} pages of {self.count} that are free"
        self.count -= count
        pages: list[int] = []
        while count:
            index = self._open[-1]
            word = self._words[index]
            while word and count:
                others = word & (word - 1)
                pages.append(index * WORD + (word ^ others).bit_length() - 1)
                word, count = others, count - 1
            self._words[index] = word
            if not word:
                self._open.pop()
        return pages

    def give(self, pages: Iterable[int]) -> None:
        """Make pages free."""
        for page in pages:
            assert 0 <= page < self.num_pages, f"page {page} of {self.num_pages}"
            index, bit = page // WORD, 1 << page % WORD
            word = self._words[index]
            assert not word & bit, f"page {page} was free already"
            if not word:
                self._open.append(index)
            self._words[index] = word | bit
            self.count += 1

    def __contains__(self, page: int) -> bool:
        return bool(self._words[page // WORD] >> page % WORD & 1)

    def num_bytes(self) -> int:
        """Of the words and the stack."""
        return len(self._words) * (self._words.itemsize + self._open.itemsize)


def digests(
    tokens: npt.NDArray[np.int32], block_size: int, known: Sequence[bytes] = ()
) -> list[bytes]:
    """Digests of all full pages of a request's tokens; ``known`` are those of its first pages."""
    found = list(known)
    for i in range(len(found), len(tokens) // block_size):
        page = tokens[i * block_size : (i + 1) * block_size]
        found.append(
            blake2b((found[-1] if found else b"") + page.tobytes(), digest_size=16).digest()
        )
    return found


class PagePool:
    """All pages of a cache. Without ``prefix_cache`` nothing is found again.

    ``stale`` collects pages whose contents nobody will read any more: what a cache keeps beside its
    pages (residual slots) has to be released before they are written again, and whoever does so
    empties the list.
    """

    def __init__(self, num_pages: int, *, prefix_cache: bool = True) -> None:
        self.num_pages, self.prefix_cache = num_pages, prefix_cache
        self.free = FreePages(num_pages)
        self.owners = [0] * num_pages  # requests that hold each page
        self.idle: OrderedDict[int, None] = OrderedDict()  # the longest unused page first
        self.stale: list[int] = []
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Pages that ``take`` could hand out: free ones, and idle ones, which it would evict."""
        return self.free.count + len(self.idle)

    def take(self, count: int) -> list[int]:
        """``count`` pages, held once each.

        Raises:
            ValueError: fewer are available; nothing is taken then.
        """
        if count > self.available:
            raise ValueError(f"KV cache: expected {count} available pages, got {self.available}")
        while self.free.count < count:
            self._evict()
        pages = self.free.take(count)
        for page in pages:
            self.owners[page] = 1
        return pages

    def find(self, names: Sequence[bytes]) -> list[int]:
        """Pages of the longest prefix of these digests that is in the cache. They are not held."""
        pages: list[int] = []
        for name in names:
            page = self._page_of.get(name)
            if page is None:
                break
            pages.append(page)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more request holds these pages, which are full: held ones, or found and idle."""
        for page in pages:
            if self.owners[page] == 0:
                del self.idle[page]
            self.owners[page] += 1

    def publish(self, page: int, name: bytes) -> None:
        """From now on a held page is found by its digest, unless another page already is."""
        assert self.owners[page] > 0, f"page {page} is held by nobody"
        if self.prefix_cache and name not in self._page_of:
            assert page not in self._digest_of, f"page {page} has a digest already"
            self._page_of[name] = page
            self._digest_of[page] = name

    def give(self, pages: Sequence[int]) -> None:
        """A request no longer holds its pages, given in the order of its tokens.

        Its last page is unused for longest then: a prefix is found only from its start.
        """
        for page in reversed(pages):
            assert self.owners[page] > 0, f"page {page} is held by nobody"
            self.owners[page] -= 1
            if self.owners[page]:
                continue
            if page in self._digest_of:
                self.idle[page] = None
            else:
                self._free(page)

    def _evict(self) -> None:
        page, _ = self.idle.popitem(last=False)
        del self._page_of[self._digest_of.pop(page)]
        self._free(page)

    def _free(self, page: int) -> None:
        self.stale.append(page)
        self.free.give((page,))
