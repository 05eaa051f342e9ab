"""A Listing is a dict in the order of its keys, and fingerprints are hashes of it."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zloader.access.stored_objects import Listing, StoredObject, fingerprint, list_files, mirror_fingerprint

pytestmark = pytest.mark.any_version

ENTRIES = st.builds(StoredObject, st.integers(0, 2**53), st.text(max_size=40), st.text(max_size=40))
OBJECTS = st.dictionaries(st.text(st.characters(codec=None), max_size=12), ENTRIES, max_size=12)


@given(objects=OBJECTS, others=st.lists(st.text(max_size=12)))
def test_a_listing_has_what_the_dict_has(objects, others):
    listed = Listing(objects.items())
    assert dict(listed) == objects
    assert list(listed) == sorted(objects)
    assert dict(listed.sizes) == {key: entry.size for key, entry in objects.items()}
    for key in others:
        assert (key in listed, listed.get(key), listed.sizes.get(key)) == (
            key in objects,
            objects.get(key),
            objects[key].size if key in objects else None,
        )
    assert None not in listed
    with pytest.raises(KeyError, match="nowhere"):
        listed.sizes["nowhere" * 3]


@given(objects=OBJECTS, origin=st.text(max_size=9))
def test_the_fingerprints_are_hashes_of_the_sorted_entries(objects, origin):
    def digest(entries: list) -> str:
        return hashlib.sha256(repr(entries).encode()).hexdigest()[:32]

    listed, ordered = Listing(objects.items()), sorted(objects.items())
    assert fingerprint(listed) == digest([(key, entry.size, entry.tag) for key, entry in ordered])
    wanted = digest([origin, *((key, *entry) for key, entry in ordered)])
    stamped = all(entry.stamp for entry in objects.values())
    assert mirror_fingerprint("url", origin, listed) == (wanted if stamped else None)


def test_a_file_whose_name_is_no_text_is_listed(tmp_path):
    (tmp_path / "a").write_bytes(b"1234")
    bytes_path = bytes(tmp_path) + b"/\xff"
    with open(bytes_path, "wb") as file:  # noqa: PTH123 - a Path cannot be made of bytes
        file.write(b"12")
    listed = list_files(str(tmp_path))
    assert dict(listed.sizes) == {"a": 4, "\udcff": 2}
    assert len(fingerprint(listed)) == 32
