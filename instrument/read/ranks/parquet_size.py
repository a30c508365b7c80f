"""How much memory the columns of a Parquet file take, from the headers of its pages.

The sizes in the footer need not be true, and a page is decompressed as a whole. So the headers of
all pages are read before any page.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BYTES_PER_VALUE = 8
# The types of Thrift's compact protocol that take a fixed number of bytes, or a variable integer.
_FIXED = {1: 0, 2: 0, 3: 1, 7: 8}
_VARIABLE = {4, 5, 6}
_BINARY, _STRUCT = 8, 12


def memory_of(file: Path, metadata: Any) -> tuple[int, int]:
    """Return the compressed bytes of all pages, and the bytes of the decompressed columns.

    Raises:
        LookupError, RecursionError, ValueError: the file is damaged, or its columns overlap.
    """
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    chunks = [group.column(k) for group in groups for k in range(group.num_columns)]
    packed = sum(chunk.total_compressed_size for chunk in chunks)
    if packed > file.stat().st_size or any(chunk.total_compressed_size < 0 for chunk in chunks):
        raise ValueError("its columns overlap")
    plain = 0
    with file.open("rb") as opened:
        for chunk in chunks:
            begin = chunk.data_page_offset
            if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < begin:
                begin = chunk.dictionary_page_offset
            opened.seek(begin)
            pages = opened.read(chunk.total_compressed_size)
            plain += max(sum(_page_sizes(pages)), _BYTES_PER_VALUE * chunk.num_values)
    return packed, plain


def _page_sizes(pages: bytes) -> Iterator[int]:
    """The sizes of some consecutive pages after decompression."""
    reader = _Compact(pages)
    while reader.at < len(pages):
        sizes = [0, 0]  # after and before decompression: the fields 2 and 3 of a PageHeader
        for field, kind in reader.fields():
            if field in (2, 3) and kind in _VARIABLE:
                sizes[field - 2] = reader.number()
            else:
                reader.skip(kind)
        if min(sizes) < 0:
            raise ValueError("a page has a negative size")
        yield sizes[0]
        reader.at += sizes[1]


class _Compact:
    """Reads values in Thrift's compact protocol; a page header has no lists."""

    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0

    def fields(self) -> Iterator[tuple[int, int]]:
        """The number and the type of each field of a struct; the caller reads its value."""
        field = 0
        while header := self._byte():
            field = field + (header >> 4) if header >> 4 else self.number()
            yield field, header & 15

    def number(self) -> int:
        """A signed integer."""
        found = self._unsigned()
        return (found >> 1) ^ -(found & 1)

    def skip(self, kind: int) -> None:
        """Skip a value."""
        if kind in _FIXED:
            self.at += _FIXED[kind]
        elif kind in _VARIABLE:
            self._unsigned()
        elif kind == _BINARY:
            size = self._unsigned()  # which moves `at`
            self.at += size
        elif kind == _STRUCT:
            for _, inner in self.fields():
                self.skip(inner)
        else:
            raise ValueError("a page header is damaged")

    def _unsigned(self) -> int:
        found, shift = 0, 0
        while True:
            byte = self._byte()
            found |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return found
            if shift > 63:
                raise ValueError("a page header is damaged")

    def _byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]
